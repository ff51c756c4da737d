"""F5: a prefetch that did not fit was given up whole; it shrinks instead (S3)."""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest

from kvgraft import ContractViolation, GuardMode, TokenKey
from kvgraft.requests.eviction import Evictor
from kvgraft.tree.component import TreeComponent
from kvgraft.types import Tier
from kvgraft_storage.tier.fetching import Fetch
from kvgraft_storage.tier.inventory import ANY, Bounds, Plan

from ..serving.own_parts import override, own_parts
from ..serving.server import Server, ledgers
from ..serving.setups import CHUNKED, QUARTERED, SINKS, SSM, Setup, installed, mixed
from ..storage_tier.shelf import drained, open_cache, settings, stocked, tier_of, until

PAGE = 2
PROMPT = list(range(100, 141))
"""20 pages; states stand at every second one."""
HELD = 9
"""Pages of HOST that somebody else pins, of 20."""
LONGEST = 10
"""The longest prefix that fits the other 11 and, with states, ends where one stands."""

CASES = [
    installed("full", "mamba"),
    installed("full", "swa", "mamba"),
    mixed(("full",), SSM),
    mixed(("full",), QUARTERED, SSM),
    mixed(("full",), SINKS, SSM),
    mixed(("full",), CHUNKED, SSM),
]
IDS = [setup.name for setup in CASES]


def prefetch_with_host_short(
    setup: Setup,
    put_bug_in: Callable[[], None] = lambda: None,
    threshold: int = 1,
    guard: GuardMode = GuardMode.ON,
    queue_timeout_s: float = 30.0,
) -> int:
    """The field's scenario: HOST holds 20 pages, of which a running request keeps 9 and 6 are old.

    Returns the tokens that came.
    """
    shelf = stocked(setup, PROMPT, chunk=2 * PAGE)
    cache = open_cache(
        setup,
        shelf,
        settings(threshold_tokens=threshold * PAGE, queue_timeout_s=queue_timeout_s),
        device_tokens=256,
        host_tokens=20 * PAGE,
        guard=guard,
        parts=own_parts,
    )
    server = Server(cache)
    try:
        server.serve(range(500, 500 + HELD * PAGE))
        server.empty_device()
        pinned = cache.begin(TokenKey(range(500, 501 + HELD * PAGE)))
        assert pinned.anchor_tokens == HELD * PAGE
        server.serve(range(800, 800 + 6 * PAGE))
        evictions: list[tuple[str, int]] = []
        ensure_free = Evictor.ensure_free

        def on_host(
            self: Evictor, component: TreeComponent, tier: Tier, n_slots: int, tenant: int | None
        ) -> bool:
            before = component.host.free if component.host else 0
            done = ensure_free(self, component, tier, n_slots, tenant)
            if component.host and component.host.free > before:
                evictions.append((component.name, component.host.free - before))
            return done

        override(cache.evictor, ensure_free=on_host)
        before = ledgers(cache)
        put_bug_in()
        key = TokenKey(PROMPT)
        prefetch = tier_of(cache).prefetch(key)
        until(lambda: prefetch.ended, cache)
        drained(cache, prefetch)
        override(cache.evictor, ensure_free=ensure_free)
        names = [name for name, _ in evictions]
        assert len(names) == len({*names}), "HOST was evicted more than once"
        if not prefetch.gained_tokens:
            assert "HOST memory is short" in prefetch.reason
            assert not tier_of(cache).prefetching.n_in_flight
            held = [terms[3:] for terms in before.values()]
            assert [terms[3:] for terms in ledgers(cache).values()] == held
        request = cache.begin(key, prefetch=prefetch)
        assert request.anchor_tokens == prefetch.tokens, "its data cannot be resumed from"
        assert cache.admit(request).admitted
        server.load_back(request)
        server.prefill(request)
        cache.finish(request)
        cache.abort(pinned)
        cache.drain()
        cache.check_integrity()
        return prefetch.gained_tokens
    finally:
        cache.close()


def comes_whole(
    setup: Setup,
    put_bug_in: Callable[[], None] = lambda: None,
    guard: GuardMode = GuardMode.ON,
) -> None:
    assert prefetch_with_host_short(setup, put_bug_in, guard=guard) == LONGEST * PAGE


@pytest.mark.one_in(2)
@pytest.mark.parametrize("setup", CASES, ids=IDS)
def test_a_prefetch_that_does_not_fit_shrinks_to_a_boundary_that_all_components_accept(
    setup: Setup,
) -> None:
    comes_whole(setup)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("setup", CASES, ids=IDS)
def test_below_the_threshold_it_gives_up_without_a_trace(setup: Setup) -> None:
    """Where a running request keeps HOST it may wait for that first; it does not end here."""
    assert prefetch_with_host_short(setup, threshold=LONGEST + 1, queue_timeout_s=0.05) == 0


Bug = Callable[[pytest.MonkeyPatch], None]
Planning = Generator[None, None, Plan | None]


def give_up_whole(patch: pytest.MonkeyPatch) -> None:
    """The field bug: a prefetch that does not fit whole is given up."""

    def first_plan(self: Fetch) -> Planning:
        wanted = yield from self._plan(ANY, self._least)
        assert wanted is not None
        for component, n_slots in zip(self.context.tree.components, wanted.n_slots):
            if not self.context.evictor.ensure_free(component, Tier.HOST, n_slots, None):
                self.reason = "HOST memory is short"
                return None
        return wanted

    patch.setattr(Fetch, "_first_plan", first_plan)


def shrink_to_what_no_state_ends(patch: pytest.MonkeyPatch) -> None:
    """The gap in the original fix: a length that a component cannot resume from."""

    plan_of = Fetch._plan

    def shrunk(self: Fetch, bounds: Bounds, least: int) -> Planning:
        plan = yield from plan_of(self, ANY, least)
        if plan is None or self._fits(plan, bounds):
            return plan
        for boundary in range(plan.boundary, least, -1):
            pages = [each[: boundary - self.start] for each in plan.pages]
            n_slots = [
                int(each.sum()) * (1 if t.is_state else t.slots_per_page)
                for each, t in zip(pages, self.context.tree.components)
            ]
            shorter = Plan(boundary, pages, n_slots)
            if self._fits(shorter, bounds):
                return shorter
        return None

    patch.setattr(Fetch, "_plan", shrunk)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("setup", CASES, ids=IDS)
@pytest.mark.parametrize("bug", [give_up_whole, shrink_to_what_no_state_ends])
def test_with_the_bug_less_comes_or_nothing(
    setup: Setup, bug: Bug, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError):
        comes_whole(setup, lambda: bug(monkeypatch), GuardMode.OFF)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("setup", CASES, ids=IDS)
def test_the_guard_names_boundaries_that_cannot_be_resumed_from(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fetch, "_accepted", lambda self, boundary: True)
    with pytest.raises(ContractViolation, match=r"^S4"):
        prefetch_with_host_short(setup, lambda: shrink_to_what_no_state_ends(monkeypatch))
