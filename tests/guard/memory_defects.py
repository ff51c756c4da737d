"""A core that moves the memory of pools wrongly."""

from __future__ import annotations

from threading import Event

from kvgraft import Cache
from kvgraft.pools.device import DevicePool
from kvgraft_arena import moving
from kvgraft_arena.extents import Arena

from ..arena.pools import PAGE, opened, prefilled
from .defect import breaks
from .scene import Patch

__all__: list[str] = []


def moved() -> Cache:
    """A request whose pages were at the end of their pool has moved with an extent."""
    cache = opened(device_tokens=480 * PAGE, guard_full_check=1)
    below = prefilled(cache, 0, 200 * PAGE)
    prefilled(cache, 10_000, 270 * PAGE)
    for plane in cache.mounted[0].component.device.planes:
        plane[:] = 1
        plane[:200] = 2
    cache.abort(below)
    while cache.move_memory("full", "mamba"):
        pass
    return cache


@breaks("K7", "full")
def data_that_moves_leaves_its_bytes(put: Patch) -> None:
    copy = DevicePool.copy_slots

    def of_states(pool: DevicePool, source: bytes, target: bytes) -> None:
        if any(spec.name == "recurrent" for spec in pool.specs):
            copy(pool, source, target)

    put.setattr(DevicePool, "copy_slots", of_states)
    moved()


@breaks("K7", "full")
def a_request_keeps_the_slots_that_its_data_left(put: Patch) -> None:
    put.setattr(moving, "_put_run", lambda part, at, slots: None)
    moved()


@breaks("K7")
def an_extent_is_leased_twice(put: Patch) -> None:
    step = Arena.step

    def twice(arena: Arena) -> None:
        if arena.moving is not None:
            arena.moving[0].leased += 1
        step(arena)

    put.setattr(Arena, "step", twice)
    moved()


@breaks("K7", "full")
def slots_that_move_before_their_data_is_computed(put: Patch) -> None:
    put.setattr(moving.Mover, "_is_behind", lambda self: False)
    cache = opened(device_tokens=480 * PAGE)
    below = prefilled(cache, 0, 200 * PAGE)
    request = prefilled(cache, 10_000, 270 * PAGE)
    cache.checkpoint(request, Event())
    cache.abort(below)
    while cache.move_memory("full", "mamba"):
        pass
