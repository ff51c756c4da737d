"""A burst of prefetches on a small HOST: they wait in order, and data stays until used (S3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvgraft import Reach, Tier, TokenKey, Trailing, WritePolicy
from kvgraft.cache import Cache
from kvgraft_storage.tier import Prefetch, fetching, inventory
from kvgraft_storage.tier.fetching import Fetch

from ..serving.components import PagedPackage
from ..serving.own_parts import clocked_parts
from ..serving.server import Server, ledgers
from ..serving.setups import Setup, installed, mixed, one_of_each_kind
from .shelf import (
    AT_ONCE,
    Shelf,
    drained,
    open_cache,
    settings,
    step_by_step,
    stocked,
    tier_of,
    until,
)
from .troubles import Clock

FULL = installed("full")
PROMPTS = [list(range(1000 * number, 1000 * number + 33)) for number in range(1, 9)]
"""Of 16 pages that can be resumed from, 32 tokens."""
SMALL: dict[str, Any] = {"device_tokens": 256, "host_tokens": 80}
"""Room on HOST for two of them and a half."""


def opened(setup: Setup = FULL, *prompts: Sequence[int], **options: Any) -> Cache:
    given = {**SMALL, **options}
    shelf = stocked(setup, *(prompts or PROMPTS), chunk=16)
    return open_cache(setup, shelf, settings(threshold_tokens=8), **given)


def asked(cache: Cache, *prompts: Sequence[int]) -> list[Prefetch]:
    return [tier_of(cache).prefetch(TokenKey(prompt)) for prompt in prompts]


def filled(cache: Cache) -> list[Prefetch]:
    """Two have come, the third a part; nobody has begun."""
    came = asked(cache, *PROMPTS[:3])
    until(lambda: all(each.ended for each in came), cache)
    return came


def run(server: Server, prefetch: Prefetch) -> int:
    """A request's life after its prefetch; the tokens that came from the store."""
    cache = server.cache
    request = cache.begin(prefetch.key, prefetch=prefetch)
    until(lambda: cache.admit(request).admitted, cache)  # stores may hold room yet
    server.load_back(request)
    tokens = request.storage_tokens
    server.prefill(request)
    cache.finish(request)
    return tokens


@pytest.mark.one_in(3)
@pytest.mark.parametrize("write", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
@pytest.mark.parametrize("setup", one_of_each_kind())
def test_prompts_that_are_asked_for_at_once_come_mostly_from_the_store(
    setup: Setup, write: WritePolicy
) -> None:
    cache = opened(setup, policy=write)
    server, before = Server(cache), ledgers(cache)
    waiting, storing = deque(asked(cache, *PROMPTS)), tier_of(cache).storing
    tokens = 0
    while waiting:
        until(lambda: waiting[0].ready, cache)
        tokens += run(server, waiting.popleft())
        until(lambda: not (storing.n_in_flight or cache.journal.n_in_flight), cache)
        cache.check_integrity()
    assert cache.drain()
    # requests whose data is at home on HOST take the room that prefetches wait for
    least = 0.25 if any(each.home_is_host for each in cache.tree.components) else 0.7
    assert tokens >= least * 32 * len(PROMPTS), tier_of(cache).counts()
    for component in cache.tree.components:
        for tier in (Tier.DEVICE, Tier.HOST):
            cache.evict(component.name, 1000, tier)
    assert ledgers(cache) == before
    cache.close()


def test_data_that_came_is_not_evicted_before_its_request_begins() -> None:
    cache = opened()
    server, (prefetch,) = Server(cache), asked(cache, PROMPTS[0])
    drained(cache, prefetch)
    for start in range(5000, 5900, 100):
        server.serve(range(start, start + 40))  # its backup takes all of HOST that it can get
    assert run(server, prefetch) == 32
    assert cache.evict("full", 1000, Tier.HOST) >= 16, "it is data as any other now"
    cache.close()


def test_prefetches_get_room_in_the_order_in_which_they_came() -> None:
    cache = opened()
    server = Server(cache)
    came = filled(cache)
    long, short = asked(cache, PROMPTS[3], PROMPTS[4][:13])
    until(lambda: long.waits and short.waits, cache)
    assert "waits for room: HOST memory is short: full needs" in str(long)
    assert "others that came before wait for room" in str(short)
    assert not cache.drain(), "they have not ended, and nothing is waited for"
    run(server, came[0])
    until(lambda: long.ended, cache)
    assert (long.gained_tokens, short.waits) == (32, True)
    run(server, came[1])
    until(lambda: short.ended, cache)
    assert short.gained_tokens == 12
    assert tier_of(cache).counts()["prefetch waited for room"] == 2
    cache.close()


def test_data_kept_for_a_request_makes_room_for_one_that_came_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine begins them in order: the first would wait for the second, and that for it."""
    monkeypatch.setattr(fetching, "PIECE_PAGES", 2)
    monkeypatch.setattr(fetching, "ASKED_PAGES", 2)  # so the short one is planned first
    cache = opened(host_tokens=12)
    first, second = asked(cache, PROMPTS[0], PROMPTS[1][:13])
    until(lambda: first.ended, cache)
    assert first.gained_tokens == 12
    assert run(Server(cache), first) == 12
    assert second.arrival == 2
    cache.close()


def test_data_kept_for_others_stays_where_room_would_not_help_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Data that a prefetch relies on leaves while room is made for it."""
    monkeypatch.setattr(fetching, "ASKED_PAGES", 2)  # so the short ones are planned first
    monkeypatch.setattr(inventory, "PAGES_AT_ONCE", 8)  # as for long prompts
    setup = mixed(("full",), PagedPackage("wide", Reach(Trailing(12))))
    long, *short = range(81), range(1000, 1021), range(2000, 2021)
    given: dict[str, Any] = {"policy": WritePolicy.WRITE_THROUGH_SELECTIVE, "pace": step_by_step()}
    cache = opened(setup, long, *short, host_tokens=100, **given)
    Server(cache).serve(range(73))  # on DEVICE alone
    first, *_ = asked(cache, long, *short)
    fetch, kept = first.fetch, tier_of(cache).prefetching.deliveries
    assert fetch is not None
    until(lambda: fetch.short_of, cache)
    assert len(kept) == 1, "one has made room"
    assert cache.evict("wide", 1000) == 36
    until(lambda: first.ended or first.waits, cache)
    assert first.reason == "no boundary that is worth it is stored for all components"
    assert not first.waits
    assert len(kept) == 1
    cache.close()


def test_pages_that_nobody_begins_with_are_kept_for_a_while_only() -> None:
    clock = Clock()
    cache = opened(parts=clocked_parts(clock))
    came = filled(cache)
    (waiting,) = asked(cache, PROMPTS[3])
    until(lambda: waiting.waits, cache)
    clock.now += 59
    cache.poll()
    assert waiting.waits
    assert cache.evict("full", 1000, Tier.HOST) == 0
    clock.now += 2
    until(lambda: waiting.ended and all(each.ended for each in came), cache)
    assert cache.evict("full", 1000, Tier.HOST) >= 24
    cache.close()


@pytest.mark.parametrize(
    "moment", [lambda fetch: fetch.planned, lambda fetch: fetch.ended], ids=["planned", "ended"]
)
def test_room_that_comes_while_prefetches_are_found_to_be_short_of_it_counts(
    moment: Callable[[Fetch], object],
) -> None:
    """Nothing is under way then that could free more."""
    cache = opened(pace=step_by_step())
    came = filled(cache)
    first, *others = waiting = asked(cache, *PROMPTS[3:6])
    fetch = first.fetch
    assert fetch is not None
    until(lambda: moment(fetch), cache)
    assert not first.waits
    for each in came:
        tier_of(cache).cancel(each)
    until(lambda: first.ended, cache)
    assert first.gained_tokens == 32, str(first)
    tier_of(cache).cancel(first)
    until(lambda: all(each.ended for each in others), cache)
    assert all(each.gained_tokens for each in others), [*map(str, waiting)]
    cache.close()


def test_a_prefetch_does_not_take_its_own_prefix_for_room_that_came() -> None:
    """It pins what HOST has of its prompt, and gives that up when it ends."""
    cache = opened(host_tokens=76)
    server, tier = Server(cache), tier_of(cache)
    server.serve(PROMPTS[2][:9])
    assert cache.drain()
    cache.evict("full", 1000)
    came = asked(cache, *PROMPTS[:2])
    until(lambda: all(each.ended for each in came), cache)
    (waiting,) = asked(cache, PROMPTS[2])
    until(lambda: waiting.waits, cache)
    looked_up = tier.counts()["exists.ok"]
    for _ in range(50):
        cache.poll()
        assert waiting.waits
    assert tier.counts()["exists.ok"] == looked_up
    run(server, came[0])
    until(lambda: waiting.ended, cache)
    assert waiting.gained_tokens == 24
    cache.close()


def test_a_prefetch_that_no_room_can_come_for_ends_at_once() -> None:
    cache = opened(host_tokens=6)
    (prefetch,) = asked(cache, PROMPTS[0])
    drained(cache, prefetch)
    assert prefetch.reason == "HOST memory is short: full needs 16 slots and has 3"
    cache.close()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("end", ["cancel", "begin", "detach", "clear", "close"])
@pytest.mark.parametrize("stepping", [False, True])
def test_one_that_waits_for_room_ends_with_its_request_store_or_cache(
    end: str, *, stepping: bool
) -> None:
    pace = step_by_step() if stepping else AT_ONCE
    cache = opened(pace=pace)
    tier, before = tier_of(cache), ledgers(cache)
    came = filled(cache)
    waiting = asked(cache, *PROMPTS[3:6])
    until(lambda: all(each.waits for each in waiting), cache)
    if end == "cancel":
        for each in waiting:
            tier.cancel(each)
    elif end == "begin":
        for each in waiting:
            cache.abort(cache.begin(each.key, prefetch=each))
    elif end == "detach":
        tier.detach(1)
        assert [each.reason for each in waiting] == ["the store was detached"] * 3
    elif end == "clear":
        cache.clear()
        assert [each.reason for each in waiting] == ["the cache was cleared"] * 3
    else:
        cache.close()
    assert all(each.ended for each in waiting)
    if end == "close":
        assert not tier.receipts(), "nothing is held"
        return
    assert cache.drain()
    cache.check_integrity()
    for each in came:
        tier.cancel(each)
    cache.evict("full", 1000, Tier.HOST)
    assert ledgers(cache) == before
    cache.close()


def test_two_requests_over_one_prompt_wait_together_and_both_hit() -> None:
    cache = opened()
    server = Server(cache)
    came = filled(cache)
    both = asked(cache, PROMPTS[3], PROMPTS[3])
    until(lambda: all(each.waits for each in both), cache)
    for each in came:
        run(server, each)
    until(lambda: all(each.ended for each in both), cache)
    assert run(server, both[0]) == 32
    cache.close()


def test_a_request_is_admitted_though_all_of_host_is_kept_for_others() -> None:
    """Its own canonical copies need HOST slots, and those behind it do not begin before (A8)."""
    setup = installed("hisparse")
    cache = opened(setup, host_tokens=80)
    server = Server(cache)
    filled(cache)
    request = server.begin(range(7000, 7060))
    assert cache.admit(request).admitted
    server.prefill(request)
    cache.finish(request)
    cache.check_integrity()
    cache.close()


def test_a_running_request_grows_beyond_its_promise_though_all_of_host_is_kept_for_others() -> None:
    setup = installed("hisparse")
    cache = opened(setup, host_tokens=80)
    server = Server(cache)
    request = server.begin(range(7000, 7007))
    assert cache.admit(request).admitted
    server.prefill(request)
    came = asked(cache, *PROMPTS[:3])
    until(lambda: all(each.ended or each.waits for each in came), cache)
    server.decode(request, 40)
    cache.finish(request)
    cache.check_integrity()
    cache.close()


def test_a_store_attached_while_they_wait_is_not_asked_for_those_that_ended() -> None:
    cache = opened()
    tier = tier_of(cache)
    filled(cache)
    (waiting,) = asked(cache, PROMPTS[3])
    until(lambda: waiting.waits, cache)
    ticket = tier.detach(1)
    until(lambda: ticket.done, cache)
    tier.attach(Shelf())
    assert cache.drain()
    assert waiting.ended
    assert waiting.gained_tokens == 0
    cache.close()


def test_a_request_that_does_not_fit_leaves_data_kept_for_others_alone() -> None:
    """Neither at admission nor as it grows beyond its promise (A9)."""
    setup = installed("hisparse")
    cache = opened(setup, host_tokens=64)
    server = Server(cache)
    running = cache.begin(TokenKey(range(5000, 5024)), reserve=0)
    assert cache.admit(running).admitted
    server.prefill(running)
    (came,) = asked(cache, PROMPTS[0])
    until(lambda: came.ended, cache)
    kept = tier_of(cache).prefetching.deliveries
    assert came.gained_tokens
    assert len(kept) == 1
    large = cache.begin(TokenKey(range(6000, 6056)))
    assert not cache.admit(large).admitted
    assert len(kept) == 1
    assert not cache.allocate(running, 60)
    assert len(kept) == 1
    cache.abort(large)
    cache.abort(running)
    assert run(server, came) == came.gained_tokens
    cache.close()
