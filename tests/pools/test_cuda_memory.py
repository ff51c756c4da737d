"""Memory of a CUDA device that pools take and give back: against a stand-in of its driver."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvgraft import Cache, ConfigError
from kvgraft_accelerator import cuda_driver
from kvgraft_accelerator.mapped import MappedSpace
from kvgraft_arena import Arenas
from kvgraft_arena.reserved import can_reserve

from ..arena.pools import PAGE, arena_of, opened, prefilled
from .cuda_library import BLOCK, SimulatedDriver

GPU = torch.device("cuda:0")


def blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK)


@given(st.lists(st.integers(0, 40 * BLOCK), max_size=12), st.integers(1, 3))
def test_exactly_the_blocks_that_are_needed_are_mapped_zeroed_and_keep_their_bytes(
    sizes: list[int], n_parts: int
) -> None:
    driver = SimulatedDriver(n_parts * 40 * BLOCK)
    space = MappedSpace(driver, 40 * BLOCK - 8, GPU, n_parts)
    memory, before = space.tensor(), 1
    assert memory.shape == (n_parts, 40 * BLOCK - 8)
    memory[:, :BLOCK] = 7
    for nbytes in sizes:
        space.resize(nbytes)
        after = blocks(min(nbytes, 40 * BLOCK - 8))
        first = min(driver.library.reserved)
        starts = [part * 40 + at for part in range(n_parts) for at in range(after)]
        assert sorted(driver.library.mapped) == [first + at * BLOCK for at in starts]
        assert driver.library.accessible == driver.library.mapped.keys()
        assert driver.library.used == n_parts * space.mapped_nbytes == len(starts) * BLOCK
        assert driver.library.used <= n_parts * nbytes + space.slack_nbytes
        kept = min(before, after) * BLOCK
        assert not kept or memory[:, :kept].min() == 7
        assert not memory[:, kept : after * BLOCK].any()
        memory[:, : after * BLOCK] = 7
        before = after


def test_a_device_without_so_much_memory_says_so_and_keeps_what_was_mapped() -> None:
    driver = SimulatedDriver(4 * BLOCK)
    space = MappedSpace(driver, 40 * BLOCK, GPU)
    space.resize(3 * BLOCK)
    with pytest.raises(MemoryError, match=r"pool: .* more on cuda:0, cuMemCreate: out of memory"):
        space.resize(6 * BLOCK)
    assert driver.library.used == space.mapped_nbytes == 3 * BLOCK
    with pytest.raises(ConfigError, match=r"address space on cuda:0.*lower the budget"):
        MappedSpace(driver, 1 << 41, GPU)


def test_blocks_are_unmapped_when_the_device_has_done_its_work() -> None:
    driver = SimulatedDriver(8 * BLOCK)
    space = MappedSpace(driver, 8 * BLOCK, GPU)
    space.resize(8 * BLOCK)
    waits = driver.waits
    unmap = driver.unmap
    seen = []
    driver.unmap = lambda *args: (seen.append(driver.waits), unmap(*args))[1]  # type: ignore[method-assign, func-returns-value]
    space.resize(BLOCK)
    assert seen == [waits + 1] * 7


def test_all_goes_back_when_the_last_tensor_is_gone() -> None:
    driver = SimulatedDriver(8 * BLOCK)
    space = MappedSpace(driver, 8 * BLOCK, GPU)
    tensor = space.tensor()[0, 3:9]
    space.resize(5 * BLOCK)
    del space
    gc.collect()
    assert driver.library.used == 5 * BLOCK
    tensor[:] = 1
    del tensor
    gc.collect()
    assert (driver.library.used, driver.library.reserved) == (0, {})


class LostDriver(SimulatedDriver):
    """Of a device that fails when it is waited for."""

    def synchronize(self, device: torch.device) -> None:
        super().synchronize(device)
        if self.waits > 1:
            raise RuntimeError("CUDA error: device-side assert triggered")


def test_memory_of_a_lost_device_goes_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be done about it: it goes with the process."""
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    driver = LostDriver(8 * BLOCK)
    space = MappedSpace(driver, 8 * BLOCK, GPU)
    del space
    gc.collect()
    assert driver.waits == 2
    assert told == []


def on_simulated(driver: SimulatedDriver) -> Callable[[int, torch.device, int], MappedSpace]:
    return lambda nbytes, device, n_parts: MappedSpace(driver, nbytes, GPU, n_parts)


def squeezed(cache: Cache) -> None:
    """Memory moves to and fro below a request that is at the end of its pool."""
    below = prefilled(cache, 0, 200 * PAGE)
    request = prefilled(cache, 10_000, 200 * PAGE)
    planes = cache.mounted[0].component.device.planes
    for plane in planes:
        plane[cache.table(request, "full").tolist()] = 5
    cache.abort(below)
    for giver, taker in (("full", "mamba"), ("mamba", "full"), ("full", "mamba")):
        moved = 0
        while cache.move_memory(giver, taker):
            cache.check_integrity()
            moved += 1
        assert moved > 5
        for plane in planes:
            rows = plane[cache.table(request, "full").tolist()]
            assert float(rows.min()) == float(rows.max()) == 5
    cache.abort(request)


def test_pools_share_one_budget_of_mapped_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimulatedDriver(4 << 20)
    monkeypatch.setattr(Arenas, "reserve", on_simulated(driver))
    cache = opened(guard_full_check=1)
    arena = arena_of(cache)
    n_planes = sum(len(each.component.device.planes) for each in cache.mounted)
    assert arena.n_extents * arena.extent_nbytes <= (4 << 20) - n_planes * (BLOCK - 1)
    squeezed(cache)
    assert driver.library.used <= 4 << 20
    cache.close()


def test_a_pool_whose_memory_is_not_there_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = SimulatedDriver(4 << 20)
    monkeypatch.setattr(Arenas, "reserve", on_simulated(driver))
    cache = opened(guard_full_check=1)
    arena = arena_of(cache)
    ends = {name: pool.allocator.end for name, pool in arena.by_name.items()}
    create = driver.library.cuMemCreate
    refused = []

    def refuse(*args: Any) -> int:  # another process took what the giver gave back
        refused.append(args)
        return 2 if len(refused) == 1 else create(*args)

    monkeypatch.setattr(driver.library, "cuMemCreate", refuse)
    for _ in range(3):
        cache.move_memory("full", "mamba")
        cache.check_integrity()
        if refused:
            break
    assert "out of memory; the pool of mamba stays as it is" in caplog.text
    assert sum(pool.leased for pool in arena.pools) == arena.n_extents
    assert sum(arena.by_name[name].allocator.end for name in ends) <= sum(ends.values())
    cache.close()


def test_structures_have_the_sizes_of_cudas_header() -> None:
    sizes = [
        ctypes.sizeof(each)
        for each in (cuda_driver._Location, cuda_driver._Properties, cuda_driver._Access)
    ]
    assert sizes == [8, 32, 12]


def test_without_a_driver_only_the_host_has_address_space() -> None:
    assert can_reserve(torch.device("cpu"))
    if cuda_driver.CudaDriver.find() is None:
        assert not can_reserve(GPU)


@pytest.mark.gpu("cuda")
def test_pools_on_a_gpu_share_one_budget() -> None:
    nbytes = 1 << 30
    wide = {
        "full": {"n_layers": 1, "n_kv_heads": 2, "head_dim": 4096},
        "mamba": {"n_layers": 1, "conv_dim": 0, "n_heads": 8, "head_dim": 16, "state_dim": 1024},
    }
    cache = opened(wide, device="cuda", device_memory=nbytes)
    squeezed(cache)
    cache.close()
