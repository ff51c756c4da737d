"""The accelerator's runtime, as far as it goes without one.

Here: which way a piece goes, and the arrays that the driver's call gets, against a C function that
moves bytes of the host. On the toy device, which takes a compiler and a minute: streams, events,
page-locked memory, the whole cache. Nowhere: speed, the real driver, a GPU's kernels.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.file_baton import FileBaton

from kvgraft import Cache, ConfigError
from kvgraft.devices import PlaneCopy
from kvgraft.packages.registry import discover, select
from kvgraft.pools.component import run_copy
from kvgraft_accelerator.cuda_driver import CudaDriver
from kvgraft_accelerator.fragments import Fragmenter, Fragments, Rows
from kvgraft_accelerator.protocol import CopySizes
from kvgraft_accelerator.ways import FEWEST, Ways, parted
from kvgraft_testing.checking import Checker

from ..acceptance.__main__ import contracts
from ..commands import KVGRAFT, ROOT, run
from .toy import alone_in

SIZES = CopySizes(batched_nbytes=1000)

ANY = ctypes.c_void_p
SIZES_IN_C = ctypes.POINTER(ctypes.c_size_t)
ATTRIBUTES_IN_C = ctypes.POINTER(ctypes.c_uint * 6)


class Named:
    """A way that is only named here."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, fragments: Fragments, stream: torch.Stream) -> None:
        raise AssertionError(self.name)

    def move_rows(self, rows: Rows, stream: torch.Stream) -> None:
        raise AssertionError(self.name)


batched, kernel = Named("batched"), Named("kernel")


def fragments_of(sizes: list[int]) -> Fragments:
    n = np.arange(len(sizes), dtype=np.int64)
    return Fragments(n, n + 100, np.array(sizes, np.int64))


def split(ways: Ways, sizes: list[int], *, crosses_bus: bool) -> dict[str, list[int]]:
    found = parted(ways, SIZES, fragments_of(sizes), crosses_bus=crosses_bus)
    return {way.name: some.sources.tolist() for way, some in found}  # type: ignore[attr-defined]


MIXED = [999, 1000, 0, 5000, *[64] * FEWEST]


@pytest.mark.parametrize("crosses_bus", [True, False])
@pytest.mark.parametrize("ways", [Ways(batched), Ways(kernel=kernel)])
def test_a_device_with_one_way_takes_it_for_all(ways: Ways, *, crosses_bus: bool) -> None:
    (found,) = split(ways, MIXED, crosses_bus=crosses_bus).values()
    assert found == [at for at, nbytes in enumerate(MIXED) if nbytes]


def test_large_pieces_are_batched_and_small_ones_are_the_kernels() -> None:
    found = split(Ways(batched, kernel), MIXED, crosses_bus=True)
    assert found == {"batched": [1, 3], "kernel": [0, *range(4, len(MIXED))]}


def test_a_few_small_pieces_are_not_worth_a_kernel() -> None:
    few = [64] * (FEWEST - 1)
    assert list(split(Ways(batched, kernel), [5000, *few], crosses_bus=True)) == ["batched"]
    assert list(split(Ways(batched, kernel), [64, *few], crosses_bus=True)) == ["kernel"]


def test_copies_within_the_device_are_the_kernels() -> None:
    assert list(split(Ways(batched, kernel), MIXED, crosses_bus=False)) == ["kernel"]


@given(st.lists(st.sampled_from([0, 16, 999, 1000, 1 << 20]), max_size=60), st.booleans())
def test_every_piece_goes_one_way(sizes: list[int], crosses_bus: bool) -> None:  # noqa: FBT001
    ways = Ways(batched, kernel)
    found = [
        (int(at), int(nbytes))
        for _, some in parted(ways, SIZES, fragments_of(sizes), crosses_bus=crosses_bus)
        for at, nbytes in zip(some.sources, some.nbytes)
    ]
    assert sorted(found) == [(at, nbytes) for at, nbytes in enumerate(sizes) if nbytes]


# -- the driver's call for many copies


class Library:
    """A C function with the arguments of the driver's, which moves bytes of the host at once.

    Args:
        is_older: of CUDA 12.8, which has an argument more.
        error: what it returns instead.

    Attributes:
        calls: attributes and stream of each call.
    """

    def __init__(self, *, is_older: bool = False, error: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        n_last = 2 if is_older else 1

        def copy(*given: Any) -> int:
            if error:
                return error
            numbers = [ctypes.cast(each, SIZES_IN_C) for each in (*given[:3], given[5])]
            targets, sources, sizes, firsts = numbers
            for at in range(given[3]):
                ctypes.memmove(targets[at], sources[at], sizes[at])
            if is_older:
                ctypes.cast(given[7], SIZES_IN_C)[0] = given[3]
            attributes = list(ctypes.cast(given[4], ATTRIBUTES_IN_C)[0])
            self.calls.append((attributes, firsts[0], given[6], given[-1]))
            return 0

        words = (ANY, ANY, ANY, ctypes.c_size_t, ANY, ANY, ctypes.c_size_t, *[ANY] * n_last)
        name = "cuMemcpyBatchAsync" if is_older else "cuMemcpyBatchAsync_v2"
        setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *words)(copy))

    def cuGetErrorString(self, error: int, text: Any) -> int:  # noqa: N802 - CUDA's name
        text._obj.value = b"device lost" if error == 46 else None
        return 0


@pytest.mark.parametrize("is_older", [False, True])
def test_the_drivers_call_gets_every_piece_and_is_told_the_order(*, is_older: bool) -> None:
    library = Library(is_older=is_older)
    driver = CudaDriver(library)  # type: ignore[arg-type]
    assert driver.can_batch
    planes = torch.arange(4 * 12 * 8).view(4, 12, 8)
    found, wanted = torch.zeros(12, 4 * 8, dtype=torch.int64), torch.zeros(12, 4, 8).long()
    rows, into = torch.tensor([9, 2, 3, 11]), torch.tensor([4, 5, 6, 0])
    copies = [
        PlaneCopy(0, plane, found[:, 8 * at : 8 * at + 8], rows, into)
        for at, plane in enumerate(planes)
    ]
    driver.copy_batch(Fragmenter().fragments(copies), 0x7F00_1234_5678)
    for at, plane in enumerate(planes):
        run_copy(PlaneCopy(0, plane, wanted[:, at], rows, into))
    assert found.equal(wanted.view(12, 32))
    # the source's order of the stream, no hints, beside compute; from the first piece on
    assert library.calls == [([1, 0, 0, 0, 0, 1], 0, 1, 0x7F00_1234_5678)]


@pytest.mark.parametrize(("error", "reason"), [(46, "device lost"), (719, "error 719")])
def test_an_error_of_the_driver_says_which_call_and_why(error: int, reason: str) -> None:
    driver = CudaDriver(Library(error=error))  # type: ignore[arg-type]
    with pytest.raises(OSError, match=f"cuMemcpyBatchAsync_v2: {reason}"):
        driver.copy_batch(fragments_of([8]), 1)


def test_an_older_driver_has_no_such_call() -> None:
    assert not CudaDriver(SimpleNamespace()).can_batch  # type: ignore[arg-type]


# -- devices


@pytest.mark.no_gpu
@pytest.mark.parametrize("name", ["cuda", "xpu", "hpu", "vulkan"])
def test_a_device_that_is_not_here_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device '{name}': no {name.upper()} device here; use c"):
        Cache.open(["full"], device_tokens=64, device=name)


def test_a_cache_of_shapes_alone_needs_the_device_no_more_than_its_streams() -> None:
    cache = Cache.open(["full"], device_tokens=64, payload=False, device="simulated")
    assert cache.mounted[0].component.device.device.type == "meta"
    cache.close()


@pytest.mark.no_gpu
def test_the_contract_suite_refuses_a_device_that_is_not_here_in_one_line() -> None:
    (full,) = select(["full"])
    for name, reason in (
        ("hpu", "no HPU device here; use cpu"),
        ("meta", "is no accelerator; use"),
    ):
        with pytest.raises(ConfigError, match=f"^device '{name}'.* {reason}"):
            Checker(full, device=name)


def needs_a_compiler(test: Any) -> Any:
    """Long, and skipped where the toy device cannot be compiled."""
    for tool in ("c++", "ninja"):
        reason = f"no {tool} to compile a stand-in with"
        test = pytest.mark.skipif(shutil.which(tool) is None, reason=reason)(test)
    return pytest.mark.long(pytest.mark.timeout(600)(test))


SINKS = "[kvgraft.components]\nsinks = kvgraft_sinks:plugin\n"
"""The component of examples/third_party."""

TOY = "[torch.backends]\ntoy = tests.devices.toy:load\n"
"""Torch loads devices of others when it is imported."""


def path_with(entries: str, directory: Path) -> str:
    """A `PYTHONPATH` with a distribution that publishes these."""
    about = directory / "others-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1\n")
    (about / "entry_points.txt").write_text(entries)
    return os.pathsep.join(map(str, (directory, ROOT, ROOT / "examples" / "third_party" / "src")))


def keeps_the_contract(name: str, device: str, path: str) -> None:
    command = [KVGRAFT, "check", name, "--device", device, "--profile", "dev"]
    done = run(*command, PYTHONPATH=path, timeout_s=590)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_build_that_was_killed_keeps_no_later_one_waiting(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    baton = FileBaton(str(tmp_path / "lock"))
    assert not baton.try_acquire()
    with alone_in(tmp_path):
        assert baton.try_acquire()
        baton.release()


@needs_a_compiler
@pytest.mark.parametrize("name", ["sinks", *(each.name for each in discover())])
def test_every_component_keeps_the_contract_on_a_toy_device(name: str, tmp_path: Path) -> None:
    keeps_the_contract(name, "toy", path_with(SINKS + TOY, tmp_path))


@needs_a_compiler
@pytest.mark.timeout(1200)
@pytest.mark.skipif(find_spec("kvgraft_transformers") is None, reason="needs Python 3.11")
@pytest.mark.parametrize("tests", ["transformers/tests/test_device.py", "hisparse/tests"])
def test_plugins_compute_on_a_toy_device_as_on_the_cpu(tests: str, tmp_path: Path) -> None:
    pytest_there = [sys.executable, "-m", "pytest", "-n", "0", "-qrs", "-W", "ignore", "-m", "gpu"]
    path = path_with(TOY, tmp_path)
    done = run(*pytest_there, ROOT / "plugins" / tests, PYTHONPATH=path, timeout_s=1190)
    assert done.returncode == 0, done.stdout + done.stderr
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert not [line for line in skipped if "no cuda accelerator here, but toy" not in line]


@pytest.mark.long
@pytest.mark.parametrize("name", ["sinks", "mamba"])
def test_components_keep_the_contract_on_the_simulated_device(name: str, tmp_path: Path) -> None:
    keeps_the_contract(name, "simulated", path_with(SINKS, tmp_path))


def test_the_acceptance_asks_every_component() -> None:
    asked = [command[1:] for command in contracts("xpu").values()]
    assert asked == [["check", each.name, "--device", "xpu"] for each in discover()]


@needs_a_compiler
def test_the_runtime_keeps_its_promises_on_a_toy_device() -> None:
    here = Path(__file__).parent
    played = here / "test_on_device.py::test_random_requests_read_the_bytes_that_they_computed"
    suite = [*map(str, (here / "toy" / "suite.py", here / "toy" / "contract.py", played))]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-q", "--timeout=300", *suite],
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
