"""Slots that an engine took and filled enter the tree by way of a request (N2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvgraft import Cache, ConfigError, LeaseError, Request, TokenKey

PAGE = 4
TOKENS = [*range(100, 140)]
COMPONENTS: dict[str, dict[str, dict[str, Any]]] = {
    "full": {"full": {}},
    "full+swa": {"full": {}, "swa": {"window": 10}},
    "swa": {"swa": {"window": 10}},
}
WINDOW_PAGES = 4
"""Pages that a window of ten tokens may touch."""


def opened(components: dict[str, dict[str, Any]], n_pages: int = 64, **settings: Any) -> Cache:
    return Cache.open(
        components,
        page_size=PAGE,
        device_tokens=n_pages * PAGE,
        **{"payload": False, "guard": "on", **settings},
    )


def running(cache: Cache, tokens: list[int]) -> Request:
    """A request that the engine admitted by itself."""
    request = cache.begin(TokenKey(tokens))
    cache.engine_slots.admit(request)
    return request


def taken(cache: Cache, n_pages: int) -> dict[str, Any]:
    return {each.name: cache.engine_slots.take(each.name, n_pages) for each in cache.mounted}


def compute(cache: Cache, request: Request) -> dict[str, Any]:
    """The rest of the prompt, in slots that the engine took."""
    n_pages = -(-request.prompt // PAGE) - request.allocated
    slots = taken(cache, n_pages)
    cache.engine_slots.adopt(request, n_pages, slots)
    cache.computed(request, request.prompt - request.computed)
    return slots


def ended(cache: Cache) -> None:
    cache.check_integrity()
    for each in cache.stats().components.values():
        assert not each.device.pinned
        assert not each.device.private
        assert not each.device.promised
    cache.close()


@pytest.mark.parametrize("components", COMPONENTS.values(), ids=COMPONENTS)
@pytest.mark.rule("N2")
def test_adopted_slots_are_published_and_found(components: dict[str, dict[str, Any]]) -> None:
    cache = opened(components)
    first = running(cache, TOKENS)
    slots = compute(cache, first)
    cache.check_integrity()
    assert cache.finish(first) == len(TOKENS)
    again = running(cache, [*TOKENS, 7])
    assert again.anchor_tokens == len(TOKENS)
    for name, own in slots.items():
        table = cache.table(again, name)
        assert set(table.tolist()) - {-1} <= set(own.tolist())
        assert table[-1] == own[9]
    cache.abort(again)
    ended(cache)


@pytest.mark.rule("N2")
def test_slots_of_tokens_that_the_tree_has_are_freed_and_its_own_are_read() -> None:
    cache = opened(COMPONENTS["full"])
    first, second = running(cache, TOKENS), running(cache, TOKENS)
    slots = compute(cache, first)
    compute(cache, second)
    for request in (first, second):
        assert cache.checkpoint(request)
    assert cache.table(second, "full").tolist() == slots["full"].tolist()
    assert cache.stats().components["full"].device.private == 0
    for request in (first, second):
        assert cache.finish(request) == len(TOKENS)
    assert cache.stats().components["full"].device.evictable == 10
    ended(cache)


@pytest.mark.parametrize("components", COMPONENTS.values(), ids=COMPONENTS)
@pytest.mark.rule("N2")
def test_slots_are_adopted_by_all_components_or_by_none(
    components: dict[str, dict[str, Any]],
) -> None:
    cache = opened(components)
    request = running(cache, TOKENS)
    slots, name = taken(cache, 3), next(iter(components))
    strange = {**slots, name: np.array([*slots[name][:2], 60], np.int32)}
    twice = {**slots, name: slots[name][[0, 1, 1]]}
    wrong: list[dict[str, Any]] = [strange, twice, {**slots, name: np.array([-1], np.int32)}]
    for given in wrong:
        with pytest.raises(LeaseError, match="adopted or given back once"):
            cache.engine_slots.adopt(request, 3, given)
    with pytest.raises(ConfigError, match=r"^adopt: the cache has no component 'other'"):
        cache.engine_slots.adopt(request, 3, {**slots, "other": slots[name]})
    if len(components) > 1:
        with pytest.raises(ConfigError, match=r"2 slots of 'full' for pages \[0, 3\); give 3"):
            cache.engine_slots.adopt(request, 3, {**slots, "full": slots["full"][:2]})
    assert request.allocated == 0
    assert {each: cache.engine_slots.n_taken(each) for each in slots} == dict.fromkeys(slots, 3)
    cache.engine_slots.adopt(request, 3, slots)
    with pytest.raises(LeaseError, match="adopted or given back once"):
        cache.engine_slots.adopt(request, 3, slots)
    with pytest.raises(LeaseError, match="adopted or given back once"):
        cache.engine_slots.give_back(name, slots[name])
    cache.abort(request)
    ended(cache)


@pytest.mark.rule("N2")
def test_pages_that_left_the_window_before_are_not_adopted() -> None:
    cache = opened(COMPONENTS["full+swa"])
    request = running(cache, TOKENS)
    slots = taken(cache, 10)
    gone, slots["swa"] = slots["swa"][:6], slots["swa"][6:]
    cache.engine_slots.give_back("swa", gone)
    cache.engine_slots.adopt(request, 10, slots)
    cache.computed(request, len(TOKENS))
    assert cache.finish(request) == len(TOKENS)
    stats = cache.stats().components
    assert (stats["full"].device.evictable, stats["swa"].device.evictable) == (10, WINDOW_PAGES)
    again = running(cache, [*TOKENS, 7])
    assert again.anchor_tokens == len(TOKENS)
    cache.abort(again)
    ended(cache)


@pytest.mark.rule("N2")
def test_taking_breaks_no_promise_and_evicts_what_nobody_needs() -> None:
    cache = opened(COMPONENTS["full"], n_pages=16)
    old = running(cache, TOKENS)
    compute(cache, old)
    cache.finish(old)
    promised = cache.begin(TokenKey([*range(24)]))
    assert cache.admit(promised).admitted
    room = 16 - cache.stats().components["full"].device.promised
    slots = cache.engine_slots
    assert slots.take("full", room + 1) is None
    held = slots.take("full", room)
    assert held is not None
    assert slots.take("full", 1) is None
    assert cache.allocate(promised, 24)
    cache.computed(promised, 24)
    cache.check_integrity()
    slots.give_back("full", held)
    cache.finish(promised)
    ended(cache)


@pytest.mark.rule("N2")
def test_a_request_that_was_promised_slots_adopts_some_of_them() -> None:
    cache = opened(COMPONENTS["full"])
    request = cache.begin(TokenKey(TOKENS), reserve=8)
    assert cache.admit(request).admitted
    before = cache.stats().components["full"].device.promised
    compute(cache, request)
    assert cache.stats().components["full"].device.promised == before - 10
    assert cache.allocate(request, 8)
    cache.check_integrity()
    cache.abort(request)
    ended(cache)


@pytest.mark.rule("N2")
def test_slots_that_no_engine_can_have_are_refused() -> None:
    with opened({"full": {}, "mamba": {"states": 8}}) as cache:
        for name in ("full", "mamba"):
            with pytest.raises(ConfigError, match=r"^take: .*allocate takes them"):
                cache.engine_slots.take(name, 1)
    with (
        opened(COMPONENTS["full"], tenants={"a": {"namespaces": ["a"]}}) as cache,
        pytest.raises(ConfigError, match=r"^take: .*leave tenants out"),
    ):
        cache.engine_slots.take("full", 1)
    cache = opened(COMPONENTS["full"])
    request = running(cache, TOKENS)
    with pytest.raises(LeaseError, match="this call needs it leased"):
        cache.engine_slots.admit(request)
    with pytest.raises(ConfigError, match="is not in this cache"):
        cache.engine_slots.take("other", 1)
    with pytest.raises(ConfigError, match="give a whole number"):
        cache.engine_slots.take("full", -1)
    cache.abort(request)
    ended(cache)


@pytest.mark.rule("N2")
def test_a_request_begun_before_a_clear_resumes_from_nothing_however_it_is_admitted() -> None:
    cache = opened(COMPONENTS["full"])
    compute(cache, first := running(cache, TOKENS))
    cache.finish(first)
    requests = [cache.begin(TokenKey([*TOKENS, number])) for number in range(2)]
    cache.clear()
    assert cache.admit(requests[0]).admitted
    cache.engine_slots.admit(requests[1])
    assert [each.anchor_tokens for each in requests] == [0, 0]
    for each in requests:
        cache.abort(each)
    ended(cache)


@pytest.mark.rule("N2")
def test_taking_slots_copies_what_leaves_to_host() -> None:
    cache = opened(COMPONENTS["full"], n_pages=16, host_tokens=64 * PAGE, load=None)
    compute(cache, first := running(cache, TOKENS))
    cache.finish(first)
    slots = cache.engine_slots.take("full", 13)
    assert cache.drain()
    assert len(slots) == 13
    host = cache.stats().components["full"].host
    assert host is not None
    assert host.evictable >= 7
    cache.engine_slots.give_back("full", slots)
    ended(cache)


@pytest.mark.rule("N2")
def test_an_engines_request_allocates_out_of_the_headroom() -> None:
    cache = opened(COMPONENTS["full"])
    request = running(cache, TOKENS)
    assert cache.allocate(request, 8)
    cache.computed(request, 8)
    cache.abort(request)
    ended(cache)


@pytest.mark.rule("N2")
def test_pages_that_the_window_reaches_are_not_left_out() -> None:
    cache = opened(COMPONENTS["full+swa"])
    request = running(cache, TOKENS)
    slots = taken(cache, 10)
    for n_pages in (0, 2):
        with pytest.raises(ConfigError, match=r"slots of 'swa' for pages \[0, 10\); give 10 or at"):
            cache.engine_slots.adopt(request, 10, {**slots, "swa": slots["swa"][10 - n_pages :]})
    cache.engine_slots.adopt(request, 10, slots)
    cache.abort(request)
    ended(cache)


@pytest.mark.parametrize("given", [[0.5], [True], [[0, 1]], None, "01", [1 << 32]], ids=str)
@pytest.mark.rule("N2")
def test_slots_that_are_no_sequence_of_numbers_are_refused(given: Any) -> None:
    cache = opened(COMPONENTS["full"])
    slots = cache.engine_slots.take("full", 4)
    with pytest.raises((ConfigError, LeaseError), match=r"^give_back: "):
        cache.engine_slots.give_back("full", given)
    cache.engine_slots.give_back("full", [])
    assert cache.engine_slots.n_taken("full") == 4
    cache.engine_slots.give_back("full", slots)
    ended(cache)


@pytest.mark.parametrize("chunk", [PAGE, 12, 400])
@pytest.mark.parametrize("name", [*COMPONENTS, "hybrid", "home on host"])
@pytest.mark.rule("N2", "I3", "D5")
def test_data_from_elsewhere_gets_the_slots_that_its_end_needs(name: str, chunk: int) -> None:
    more: dict[str, dict[str, dict[str, Any]]] = {
        "hybrid": {"full": {}, "swa": {"window": 10}, "mamba": {"states": 8}},
        "home on host": {"hisparse": {"hot_tokens": 8, "max_running": 2}},
    }
    cache = opened({**COMPONENTS, **more}[name], host_tokens=64 * PAGE)
    request = cache.begin(TokenKey([*range(100)]), reserve=8, chunk=chunk)
    assert cache.admit(request).admitted
    assert cache.engine_slots.allocate_at(request, 90)
    for each in cache.tree.components:
        if each.is_state:
            assert cache.state_slot(request, each.name) >= 0
            continue
        table = cache.table(request, each.name)
        first = 0 if each.window_pages is None else 22 - each.window_pages
        assert (table >= 0).tolist() == [page >= first for page in range(23)]
    cache.computed(request, 88)
    assert cache.checkpoint(request)
    other = cache.begin(TokenKey([*range(90)]))
    assert other.anchor_tokens == 88
    cache.abort(other)
    assert cache.allocate(request, 12)
    cache.computed(request, 12)
    cache.finish(request)
    ended(cache)


@pytest.mark.rule("N2")
def test_slots_for_data_from_elsewhere_are_refused_like_allocated_ones() -> None:
    cache = opened(COMPONENTS["full"], n_pages=8)
    request = cache.begin(TokenKey(TOKENS[:20]))
    with pytest.raises(LeaseError, match="call admit first"):
        cache.engine_slots.allocate_at(request, 4)
    assert cache.admit(request).admitted
    with pytest.raises(LeaseError, match="no number of tokens"):
        cache.engine_slots.allocate_at(request, -1)
    assert cache.engine_slots.allocate_at(request, 0)
    assert not cache.engine_slots.allocate_at(request, 400)
    cache.abort(request)
    ended(cache)
