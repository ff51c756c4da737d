"""Data that 0.1.0 left on disk is read by every later version, to the bit.

An archive in `frozen/` is never made again. A version that cannot read one needs a reason, and a
major number. The files of another release are added by

    python -m tests.storage_tier.test_frozen 0.2.0
"""

from __future__ import annotations

import hashlib
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from kvgraft import Cache, Request, TokenKey

from ..packaging.test_build import WHOLE

FROZEN = Path(__file__).parent / "frozen"

DIGESTS = {"0.1.0": "d42ebc1ee0e437adbeff86b5ba556d578cbfa6780577de17245b142abd5b166f"}
"""SHA-256 of the archive of each release."""

PAGE = 4
PROMPT = range(100, 141)
NAMESPACE = ("tenant", 7, b"adapter", None)


def opened(directory: Path) -> Cache:
    """The cache whose data it is."""
    return Cache.open(
        {
            "full": {"n_layers": 1, "n_kv_heads": 1, "head_dim": 4, "dtype": "float32"},
            "mamba": {"states": 8, "n_layers": 1, "checkpoint_interval_tokens": 16},
        },
        page_size=PAGE,
        device_tokens=256,
        host_tokens=256,
        storage={
            "url": f"file:{directory / 'store'}?capacity=1MiB",
            "model": "a model",
            "weights": "rev-1",
            "sharding": "tp0/2",
            "store": "write-through",
            "threshold_tokens": 1,
        },
    )


def places(cache: Cache, request: Request, end: int) -> Iterator[tuple[torch.Tensor, Any]]:
    """Every plane, with the rows that a request at `end` tokens reads."""
    pages, state = cache.table(request, "full"), cache.state_slot(request, "mamba")
    for mounted in cache.mounted:
        for plane in mounted.component.device.planes:
            yield plane, state if mounted.name == "mamba" else pages[: end // PAGE].tolist()


def numbers(number: int, rows: torch.Tensor, end: int) -> torch.Tensor:
    """The content of those rows: numbers that differ between planes, pages and states."""
    first = 1000 * number + (0 if rows.ndim == 4 else end)
    found = torch.arange(first, first + rows.numel()) % 251
    return found.reshape(rows.shape).to(rows.dtype)


def write(directory: Path) -> None:
    """Serve one prompt, and leave its pages, its states and the index there."""
    (directory / "store").mkdir()
    with opened(directory) as cache:
        request = cache.begin(TokenKey(PROMPT, NAMESPACE))
        assert cache.admit(request).admitted
        while request.computed < request.prompt:
            n_tokens = cache.next_chunk(request)
            assert cache.allocate(request, n_tokens)
            end = request.computed + n_tokens
            for number, (plane, where) in enumerate(places(cache, request, end)):
                plane[where] = numbers(number, plane[where], end)
            cache.computed(request, n_tokens)
        cache.finish(request)
        assert cache.drain()
        cache.storage.save(directory / "index")


@pytest.fixture(params=DIGESTS)
def left(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The directory that a release left."""
    archive = FROZEN / f"{request.param}.tar.gz"
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == DIGESTS[request.param]
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, **WHOLE)
    return tmp_path


def expect_all(cache: Cache, request: Request) -> None:
    """A request resumes at the last state there is, from the right bytes."""
    assert cache.admit(request).admitted
    cache.load_back(request)
    assert cache.drain()
    end = request.anchor_tokens
    assert end == 40
    assert cache.allocate(request, 1)
    for number, (plane, where) in enumerate(places(cache, request, end)):
        torch.testing.assert_close(plane[where], numbers(number, plane[where], end), rtol=0, atol=0)
    cache.abort(request)


def test_pages_and_states_in_its_store_are_found_by_their_names(left: Path) -> None:
    with opened(left) as cache:
        key = TokenKey([*PROMPT, 7], NAMESPACE)
        prefetch = cache.storage.prefetch(key)
        while not prefetch.ready:
            cache.poll()
        request = cache.begin(key, prefetch=prefetch)
        assert request.storage_tokens == 40
        expect_all(cache, request)


def test_its_index_fills_the_host(left: Path) -> None:
    with opened(left) as cache:
        restoring = cache.storage.load(left / "index")
        assert cache.drain()
        assert restoring.ended
        expect_all(cache, cache.begin(TokenKey([*PROMPT, 7], NAMESPACE)))


if __name__ == "__main__":
    with TemporaryDirectory() as made:
        write(Path(made))
        archive = FROZEN / f"{sys.argv[1]}.tar.gz"
        with tarfile.open(archive, "w:gz") as files:
            for name in "index", "store":
                files.add(Path(made, name), name)
        print(hashlib.sha256(archive.read_bytes()).hexdigest())  # noqa: T201
