"""Pools whose boundary moves: slots open and close at the end, memory comes and goes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvgraft import ContractViolation, Tier
from kvgraft.pools import DevicePool, HostMirror, PlaneSpec
from kvgraft.pools.plan import PoolPlan
from kvgraft_arena.resizing import ResizableAllocator

MIB = 1 << 20
SPECS = [PlaneSpec(layer, "kv", (MIB // 2,), torch.uint8) for layer in range(2)]
"""A slot of 1 MiB, half of it in each plane."""


def numbers(slots: bytes | None) -> list[int]:
    assert slots is not None
    return [int(slot) for slot in np.frombuffer(slots, np.int32)]


def as_slots(*slots: int) -> bytes:
    return np.array(slots, np.int32).tobytes()


def resident_nbytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_free_slots_are_gone_when_they_close_and_taken_ones_when_they_are_freed() -> None:
    slots = ResizableAllocator(6, limit=8)
    assert numbers(slots.allocate(5)) == [4, 3, 2, 1, 0]
    slots.free(as_slots(1))
    slots.close(3)
    assert (slots.n_free, slots.closing, slots.capacity, slots.end) == (1, 2, 5, 3)
    slots.free(as_slots(4, 2))
    assert (slots.n_free, slots.closing, slots.capacity) == (2, 1, 4)
    assert sorted(slots.free_slots()) == [1, 2]
    assert slots.allocate(3) is None
    slots.free(as_slots(3))
    assert (slots.n_free, slots.closing, slots.capacity) == (2, 0, 3)
    slots.grow(5)
    assert sorted(slots.free_slots()) == [1, 2, 3, 4, 5, 6, 7]
    assert sorted(numbers(slots.allocate(7))) == [1, 2, 3, 4, 5, 6, 7]


def test_slots_that_were_never_taken_close_and_open_again() -> None:
    slots = ResizableAllocator(100_000, limit=200_000)
    assert numbers(slots.allocate(2)) == [1, 0]
    slots.close(50_000)
    slots.close(3)
    assert slots.free_slots() == [2]
    slots.grow(199_997)
    assert slots.capacity == 200_000
    assert sorted(slots.free_slots()) == list(range(2, 200_000))


def test_a_pool_grows_up_to_its_limit_and_not_while_it_closes() -> None:
    slots = ResizableAllocator(4, limit=6)
    with pytest.raises(ContractViolation, match="a pool of 4 slots"):
        slots.grow(3)
    slots.allocate(4)
    slots.close(2)
    with pytest.raises(ContractViolation, match="2 closed ones taken, grows by 1"):
        slots.grow(1)
    with pytest.raises(ContractViolation, match="closes at 3"):
        slots.close(3)


def test_more_closed_slots_than_are_taken_are_not_freed() -> None:
    slots = ResizableAllocator(4, limit=4)
    slots.allocate(4)
    slots.close(2)
    slots.free(as_slots(2))
    with pytest.raises(ContractViolation, match="2 closed slots are freed, 1 are taken"):
        slots.free(as_slots(2, 3))
    assert (slots.n_free, slots.closing) == (0, 1)


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_memory_of_closed_slots_goes_back_to_the_system(tier: Tier) -> None:
    plan = PoolPlan(budgets={tier: 1 << 40})
    with plan.building("full"):
        pool = DevicePool(SPECS, 32) if tier is Tier.DEVICE else HostMirror(SPECS, 32)
    assert isinstance(pool.allocator, ResizableAllocator)
    assert pool.allocator.limit == 1 << 20
    assert plan.nbytes(tier) < 33 * MIB
    planes = [pool.plane(layer, "kv") for layer in range(2)]
    before = resident_nbytes()
    for plane in planes:
        plane[:32] = 7
    full = resident_nbytes()
    assert full - before > 30 * MIB
    pool.allocator.close(8)
    pool.resize(8)
    assert full - resident_nbytes() > 22 * MIB
    for plane in planes:
        assert plane[7].min() == plane[0].max() == 7
        assert plane[8].max() == 0
    pool.allocator.grow(8)
    for plane in planes:
        plane[15] = 9
    pool.copy_slots(as_slots(15, 0), as_slots(3, 9))
    assert [int(plane[row].min()) for plane in planes for row in (3, 9, 0)] == [9, 7, 7] * 2


def test_pools_of_an_engine_and_pools_without_a_budget_stay_as_they_are() -> None:
    plan = PoolPlan(budgets={Tier.DEVICE: 1 << 40})
    with plan.building("full"):
        owned = DevicePool(SPECS, 2, tensors=[torch.zeros((2, MIB // 2), dtype=torch.uint8)] * 2)
        mirror = HostMirror(SPECS, 2)
    for pool in (owned, mirror, DevicePool(SPECS, 2)):
        assert not isinstance(pool.allocator, ResizableAllocator)
        assert pool.capacity == 2
