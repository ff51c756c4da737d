"""The boundary between two pools moves, and everything that lives at it moves along (K7)."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from kvgraft import Cache, ConfigError, ContractViolation, TokenKey
from kvgraft.admission.decision import Outcome
from kvgraft.config import GuardMode
from kvgraft.types import Tier
from kvgraft_arena import Arena
from kvgraft_arena.sizing import planned_nbytes
from kvgraft_testing.stepped import SteppedTransferEngine

from ..admission.crowd import Crowd
from ..guard.guarded import small
from ..serving import life
from ..serving.setups import SETUPS
from .pools import MIXED, PAGE, arena_of, opened, prefilled


def write_pages(cache: Cache, request: Any) -> list[int]:
    """A number in each page that the request's table names, and in its live state."""
    k, v = cache.mounted[0].component.device.planes
    numbers = list(range(1, len(cache.table(request, "full")) + 1))
    for number, slot in zip(numbers, cache.table(request, "full").tolist()):
        k[slot], v[slot] = number, -number
    cache.mounted[1].component.device.planes[0][cache.state_slot(request, "mamba")] = 77
    return numbers


def read_pages(cache: Cache, request: Any) -> list[int]:
    k, v = cache.mounted[0].component.device.planes
    slots = cache.table(request, "full").tolist()
    assert all(torch.equal(k[slot], -v[slot]) for slot in slots)
    return [int(k[slot].float().mean()) for slot in slots]


def test_a_budget_is_divided_into_whole_extents() -> None:
    cache = opened()
    arena = arena_of(cache)
    assert (arena.n_extents, arena.extent_nbytes) == (64, 1 << 16)
    full, mamba = arena.pools
    assert (full.extent, mamba.extent) == (8, 8)
    assert full.leased + mamba.leased == 64
    assert full.allocator.end == 8 * full.leased
    assert cache.move_memory("full", "mamba")
    assert cache.stats().components["mamba"].device.capacity == 8 * mamba.leased
    assert full.leased + mamba.leased == 64
    cache.close()


def test_live_data_keeps_its_bytes_and_its_places_in_every_table() -> None:
    cache = opened(host_tokens=0)
    shared = prefilled(cache, 0, 40 * PAGE)
    numbers = write_pages(cache, shared)
    assert cache.checkpoint(shared)
    reader = cache.begin(TokenKey(range(40 * PAGE + 1)))
    own = prefilled(cache, 10_000, 30 * PAGE)
    own_numbers = write_pages(cache, own)
    arena = arena_of(cache)
    full = arena.by_name["full"]
    while cache.move_memory("full", "mamba"):
        cache.check_integrity()
    assert full.ledger.headroom < full.extent
    for each in (shared, own):
        cache.stats()
        assert max(cache.table(each, "full").tolist()) < full.allocator.end
    assert read_pages(cache, shared) == numbers
    assert read_pages(cache, reader) == numbers[: len(cache.table(reader, "full"))]
    assert read_pages(cache, own) == own_numbers
    while cache.move_memory("mamba", "full"):
        cache.check_integrity()
    state = cache.mounted[1].component.device.planes[0]
    for each in (shared, own):
        assert float(state[cache.state_slot(each, "mamba")].min()) == 77
        assert cache.state_slot(each, "mamba") < arena.by_name["mamba"].allocator.end
    assert arena.moves > 30
    cache.abort(reader)
    for each in (shared, own):
        cache.finish(each)
    cache.close()


def test_slots_in_tables_stay_until_their_request_ends_where_an_engine_keeps_tables() -> None:
    cache = opened(host_tokens=0)
    arena = arena_of(cache)
    arena.mover.keeps_tables = True
    for first in (0, 20_000):
        cache.finish(prefilled(cache, first, 60 * PAGE))
    own = prefilled(cache, 10_000, 30 * PAGE)
    numbers = write_pages(cache, own)
    table, state = cache.table(own, "full").tolist(), cache.state_slot(own, "mamba")
    while cache.move_memory("full", "mamba"):
        assert cache.table(own, "full").tolist() == table
    assert arena.is_pending  # it waits for the request
    n_moves = arena.moves
    assert n_moves
    assert (cache.state_slot(own, "mamba"), read_pages(cache, own)) == (state, numbers)
    cache.finish(own)
    cache.poll()
    assert arena.moves == n_moves + 1
    cache.check_integrity()
    cache.close()


def test_memory_of_a_pool_that_shrinks_goes_back_to_the_system() -> None:
    cache = opened(device_memory=64 << 20, guard="off")
    for first in (0, 40_000):
        cache.finish(prefilled(cache, first, 30_000))
    for plane in cache.mounted[0].component.device.planes:
        plane[: cache.mounted[0].component.device.capacity] = 1
    gc.collect()
    before = _resident()
    moved = 0
    while moved < 32 and cache.move_memory("full", "mamba"):
        moved += 1
    freed = before - _resident()
    assert moved == 32
    assert freed > (24 << 20)
    cache.check_integrity()
    cache.close()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_slots_of_a_transfer_in_flight_wait_and_promises_hold_meanwhile() -> None:
    sizes: dict[str, Any] = {"device_tokens": 480 * PAGE, "host_tokens": 900 * PAGE}
    engine = SteppedTransferEngine()
    cache = opened(engine=engine, write_policy="write-through", **sizes)
    arena = arena_of(cache)
    full = arena.by_name["full"]
    n_pages = full.allocator.end - 202
    below = prefilled(cache, 0, 200 * PAGE)
    cache.finish(prefilled(cache, 10_000, n_pages * PAGE))
    assert engine.pending
    cache.abort(below)
    assert (full.ledger.free, full.ledger.pinned) == (202, n_pages)
    first = full.allocator.end - full.extent
    assert cache.move_memory("full", "mamba")
    assert arena.is_pending
    assert full.allocator.closing == full.extent - 2, "two were free"
    assert full.ledger.headroom == 202 - full.extent
    assert not cache.move_memory("full", "mamba"), "one at a time"
    cache.check_integrity()
    request = cache.begin(TokenKey(range(9000, 9000 + PAGE * full.ledger.headroom + PAGE)))
    assert cache.admit(request).outcome is Outcome.DEFERRED
    while engine.pending:
        engine.step()
    cache.poll()
    assert arena.moves == 1
    assert full.allocator.end == full.allocator.capacity == first
    cache.check_integrity()
    cache.abort(request)
    cache.close()


def test_promised_slots_do_not_leave_the_pool() -> None:
    cache = opened(device_tokens=320 * PAGE)
    arena = arena_of(cache)
    full = arena.by_name["full"]
    n_pages = full.allocator.end - 2 * full.extent
    request = cache.begin(TokenKey(range(n_pages * PAGE - 2 * PAGE)))
    assert cache.admit(request).admitted
    assert cache.move_memory("full", "mamba")
    while cache.move_memory("full", "mamba"):
        pass
    assert full.ledger.headroom < full.extent
    life.prefill(cache, request)
    cache.finish(request)
    cache.close()


def test_a_request_that_needs_another_boundary_gets_it() -> None:
    """It fits an empty cache, so it is admitted in the end (A8)."""
    cache = opened(device_tokens=64 * PAGE)
    while cache.move_memory("full", "mamba"):
        pass
    full = arena_of(cache).by_name["full"]
    assert full.leased == 1
    request = cache.begin(TokenKey(range(300 * PAGE)))
    decision = cache.admit(request)
    assert decision.outcome is Outcome.DEFERRED
    assert decision.waits_for is not None
    assert decision.waits_for.memory == 1
    assert "pools that get memory of others: 1" in str(decision)
    cache.poll()
    assert cache.admit(request).admitted
    assert full.allocator.end >= 300
    cache.abort(request)
    huge = cache.begin(TokenKey(range(600 * PAGE)))
    assert cache.admit(huge).outcome is Outcome.NEVER_FITS
    cache.abort(huge)
    cache.close()


def test_a_wish_for_another_boundary_that_takes_the_place_of_an_earlier_one_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one that waits is served first, else it might wait for ever (A8)."""
    cache = opened(device_tokens=64 * PAGE)
    while cache.move_memory("full", "mamba"):
        pass
    first = cache.begin(TokenKey(range(300 * PAGE)))
    later = cache.begin(TokenKey(range(50_000, 50_000 + 200 * PAGE)))
    for request in (first, later):
        assert cache.admit(request).outcome is Outcome.DEFERRED
    wish = Arena.wish

    def careless(self: Arena, needs: Mapping[str, int]) -> None:
        self.wished = None
        wish(self, needs)

    monkeypatch.setattr(Arena, "wish", careless)
    with pytest.raises(ContractViolation, match="A8"):
        cache.admit(later)


def test_host_pools_share_a_budget_of_their_own() -> None:
    cache = opened(host_memory=4 << 20)
    for first in range(0, 60_000, 2000):
        cache.finish(prefilled(cache, first, 60 * PAGE))
        assert cache.drain()
    arena = arena_of(cache, Tier.HOST)
    full = arena.by_name["full"]
    before = full.leased
    assert full.ledger.free < 32 * full.extent
    for _ in range(32):
        assert cache.move_memory("full", "mamba", Tier.HOST)
    assert full.leased == before - 32
    assert cache.arenas is not None
    assert cache.arenas.mover.moved_slots > 0
    assert arena_of(cache).moves == 0
    cache.check_integrity()
    cache.close()


def test_data_that_makes_room_for_a_move_is_copied_first_under_write_back() -> None:
    """The guard is on: data that comes to HOST within `move_memory` is no surprise to it (B3)."""
    cache = opened(device_memory=1 << 20, host_tokens=200 * PAGE, write_policy="write-back")
    full = arena_of(cache).by_name["full"]
    assert full.component.host is not None
    for first in range(0, 9000, 1000):
        cache.finish(prefilled(cache, first, 15 * PAGE))
    before = full.component.host.evictable
    while full.component.host.evictable == before:
        assert cache.move_memory("full", "mamba")
    cache.check_integrity()
    cache.close()


def test_pools_that_cannot_share_keep_their_sizes(caplog: pytest.LogCaptureFixture) -> None:
    components = {**MIXED, "hisparse": {"n_layers": 1, "hot_tokens": 32, "max_running": 2}}
    cache = opened(components, device_memory="8MB", host_tokens=64 * PAGE, guard="off")
    assert list(arena_of(cache).by_name) == ["full", "mamba"]
    with pytest.raises(ConfigError, match="'hisparse' shares no device budget; those that do are"):
        cache.move_memory("hisparse", "full")
    cache.close()
    alone = opened({"full": MIXED["full"]}, guard="off")
    assert alone.arenas is not None
    assert not alone.arenas.by_tier
    (said,) = caplog.messages
    assert said.startswith("device_memory: 1 of 1 pools on cpu can share it, so sizes stay")
    alone.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"device_bytes": 1 << 20}, "device_bytes=1048576 and device_memory=4194304: give one"),
        ({"device_tokens": "1MB"}, "device_bytes='1MB' and device_memory=4194304: give one"),
        ({"device_memory": 9000, "device_tokens": 16}, "make 1 extents of 8.2 kB"),
        ({"device_memory": "much"}, "setting device_memory='much' is no size"),
    ],
)
def test_budgets_that_cannot_work_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(**settings)


def test_a_cache_without_a_budget_moves_nothing() -> None:
    cache = Cache.open(["full"], device_tokens=640, page_size=PAGE)
    assert cache.arenas is None
    with pytest.raises(ConfigError, match="open it with device_memory"):
        cache.move_memory("full", "full")
    cache.close()


@pytest.mark.parametrize("name", ["full+mamba", "full+swa+mamba"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_guard_raises_no_alarm_while_boundaries_move(name: str, seed: int) -> None:
    random = Random(f"{name} {seed}")
    plain, _ = small(SETUPS[name], random, GuardMode.OFF)
    nbytes = planned_nbytes(plain.config)
    budgets = {f"{tier.value}_memory": nbytes[tier] * 3 // 2 for tier in nbytes}
    plain.close()
    random = Random(f"{name} {seed}")
    cache, engine = small(SETUPS[name], random, GuardMode.ON, guard_full_check=10, **budgets)
    crowd, names = Crowd(cache, engine, random), cache.tree.by_name
    moves = 0
    for _ in range(150):
        crowd.move()
        tier = random.choice([Tier.DEVICE, Tier.DEVICE, Tier.HOST])
        giver, taker = random.sample(list(names), 2)
        moves += cache.move_memory(giver, taker, tier)
    assert moves > 20
    crowd.run_to_the_end()
    for request in list(cache.requests.values()):
        cache.abort(request)
    crowd.settle()
    cache.close()


def test_a_slot_that_once_was_the_trees_moves_with_a_requests_state() -> None:
    """The guard knows its bytes of then; a request has written others since."""
    cache = opened(device_tokens=480 * PAGE)
    plane = cache.mounted[1].component.device.planes[0]
    for first in range(0, 16_000, 1000):
        cache.finish(prefilled(cache, first, 2 * PAGE))
    assert cache.evict("mamba", 16) > 8
    running = [prefilled(cache, first, 2 * PAGE) for first in range(20_000, 25_000, 1000)]
    for request in running:
        plane[cache.state_slot(request, "mamba")] = 55
    assert cache.evict("mamba", 16) >= 0
    end = arena_of(cache).by_name["mamba"].allocator.end
    running.sort(key=lambda request: cache.state_slot(request, "mamba"))
    assert cache.state_slot(running[-1], "mamba") >= end - 8
    for request in running[:-1]:
        cache.abort(request)
    assert cache.move_memory("mamba", "full")
    assert cache.state_slot(running[-1], "mamba") < end - 8
    assert float(plane[cache.state_slot(running[-1], "mamba")].min()) == 55
    cache.abort(running[-1])
    cache.close()
