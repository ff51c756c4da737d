"""The accelerator's path on an accelerator: any that torch has here."""

from __future__ import annotations

import random
import sys
from importlib.util import find_spec

import pytest
import torch

from kvgraft import Cache, WritePolicy
from kvgraft.devices import PlaneCopy
from kvgraft.pools.component import run_copy
from kvgraft_accelerator import Accelerator
from kvgraft_accelerator.protocol import CopySizes, Purpose
from kvgraft_accelerator.ways import Ways

from ..commands import ROOT, run
from ..gpu import accelerator
from .torch_player import TorchPlayer

pytestmark = pytest.mark.gpu

SMALL = CopySizes(3072, 512, 100, piece_nbytes=128, group_nbytes=256, few_nbytes=100, n_streams=2)
"""Every way is taken, and rings go round."""


def one_way(kind: str) -> Accelerator:
    """The device with one of its ways, or all of them."""
    device = Accelerator(accelerator(), SMALL)
    if kind == "all":
        return device
    ways = {
        "plain": Ways(),
        "batched": Ways(device.ways.batched),
        "kernel": Ways(kernel=device.ways.kernel),
    }
    return Accelerator(accelerator(), SMALL, ways[kind])


KINDS = (
    "plain",
    *(pytest.param(way, marks=pytest.mark.gpu(way=way)) for way in ("batched", "kernel")),
    "all",
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lanes", [1, 2, 511, 4096])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_rows_go_to_host_and_come_back(kind: str, lanes: int, dtype: torch.dtype) -> None:
    device = one_way(kind)
    values = torch.randint(0, 100, (300, lanes), dtype=dtype)
    there, back = values.to(device.device), torch.zeros_like(values).to(device.device)
    locked = device.page_locked(values.nbytes, "slabs").view(dtype).view(300, lanes).zero_()
    order, wanted = torch.randperm(300)[:200], torch.zeros_like(values)
    backup, load = device.stream(Purpose.BACKUP), device.stream(Purpose.LOAD_BACK)
    backup.wait(device.compute().record())
    rows = torch.arange(200)
    (arrived,) = backup.copy([[PlaneCopy(0, there, locked, order, rows)]])
    load.wait(arrived)
    (ended,) = load.copy([[PlaneCopy(0, locked, back, rows, order)]])
    assert ended.wait(30)
    run_copy(PlaneCopy(0, values, wanted, order, order))
    assert locked[:200].equal(values[order])
    assert back.cpu().equal(wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", list(WritePolicy))
@pytest.mark.parametrize("names", [("full",), ("full", "swa", "mamba"), ("mamba", "full")])
def test_random_requests_read_the_bytes_that_they_computed(
    kind: str, policy: WritePolicy, names: tuple[str, ...]
) -> None:
    player = TorchPlayer(one_way(kind), names, policy)
    player.play(random.Random(f"{kind} {policy} {names}").randrange, 400)
    player.close()


def test_a_cache_is_opened_by_the_devices_name() -> None:
    cache = Cache.open(["full"], device_tokens=64, host_tokens=64, device=accelerator())
    assert cache.mounted[0].component.host is not None
    assert cache.mounted[0].component.host.slab.is_pinned()
    cache.close()


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_a_gpu_has_the_kernel() -> None:
    assert Accelerator(accelerator(), SMALL).ways.kernel is not None


@pytest.mark.gpu("cuda")
@pytest.mark.parametrize("pools", ["FIXED", "SHARED"])
def test_copies_in_flight_fail_with_a_lost_device_and_the_cache_closes(pools: str) -> None:
    done = run(sys.executable, "-m", "tests.devices.lost", "cuda", pools, cwd=ROOT)
    assert "closed" in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
