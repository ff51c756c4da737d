"""Write-back copies the next victims ahead, so that eviction does not wait (E4, B6)."""

from __future__ import annotations

import pytest

from kvgraft import Tier, TokenKey, WritePolicy
from kvgraft.cache import Cache
from kvgraft.config import GuardMode
from kvgraft.requests.backup import RESERVE_SHARE, STEPS

from ..serving.engines import PromptEngine
from ..serving.server import Server
from ..serving.setups import SETUPS
from .gates import pages_on

MIRRORED = [name for name in sorted(SETUPS) if name not in ("hisparse", "hisparse+sinks")]
PAGES = 128
SHARE = PAGES // RESERVE_SHARE


def opened(
    name: str = "full",
    policy: WritePolicy = WritePolicy.WRITE_BACK,
    host_tokens: int = 4 * PAGES,
    eviction: str = "lru",
) -> Cache:
    return SETUPS[name].open(
        device_tokens=2 * PAGES,
        host_tokens=host_tokens,
        policy=policy,
        eviction=eviction,
        engine=PromptEngine(),
        guard=GuardMode.ON,
    )


def prompt(number: int, n_pages: int = 16) -> list[int]:
    return [1000 * number + at for at in range(2 * n_pages)]


def filled(cache: Cache) -> Server:
    """Eight prompts fill DEVICE; nothing was polled with it full."""
    server = Server(cache)
    for number in range(8):
        server.serve(prompt(number))
    return server


def fill_reserve(cache: Cache) -> None:
    """So many steps fill an empty reserve; the copies end between them."""
    for _ in range(STEPS + 1):
        cache.poll()
        cache.drain()


def waits(cache: Cache) -> int:
    return cache.stats().backups.waits


def test_eviction_finds_its_victims_copied_and_waits_for_nothing() -> None:
    with opened() as cache:
        server = filled(cache)
        fill_reserve(cache)
        assert pages_on(cache, prompt(0), "full", Tier.HOST) != []
        assert pages_on(cache, prompt(1), "full", Tier.HOST) == []
        assert cache.evict("full", SHARE) >= SHARE
        assert waits(cache) == 0
        assert cache.evict("full", PAGES) > 0
        assert waits(cache) == 1
        server.start([*prompt(0), 1, 2])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MIRRORED)
def test_data_of_every_component_is_copied_ahead(name: str) -> None:
    with opened(name) as cache:
        server = filled(cache)
        fill_reserve(cache)
        for component in cache.tree.components:
            short = -(-component.device.capacity // RESERVE_SHARE) - component.device.free
            cache.evict(component.name, max(0, short))
        assert waits(cache) == 0
        assert any(cache.evict(each.name, 1) for each in cache.tree.components)
        for number in range(8):
            server.serve([*prompt(number), 1, 2])


def test_a_conversation_is_copied_from_its_end_upwards() -> None:
    with opened() as cache:
        server = Server(cache)
        turns = prompt(0, n_pages=1)
        for number in range(1, 9):
            turns += prompt(number, n_pages=1)
            server.serve(turns)
        for number in range(10, 17):
            server.serve(prompt(number))
        server.serve(prompt(20, n_pages=7))
        fill_reserve(cache)
        copied = pages_on(cache, turns, "full", Tier.HOST)
        assert len(copied) >= SHARE
        assert copied == list(range(9))[-len(copied) :]


@pytest.mark.parametrize("why", ["it was held", "its priority is lower"])
def test_data_that_is_next_meanwhile_goes_before_what_is_above_the_reserve(why: str) -> None:
    with opened() as cache:
        server = Server(cache)
        server.serve(prompt(20))
        held = server.begin([*prompt(20), 1, 2])
        turns: list[int] = []
        for number in range(8):
            turns += prompt(number, n_pages=1)
            server.serve(turns)
        for number in range(10, 16):
            server.serve(prompt(number))
        server.serve(prompt(21, n_pages=7))
        cache.poll()
        assert pages_on(cache, turns, "full", Tier.HOST) == []
        cache.drain()
        assert pages_on(cache, turns, "full", Tier.HOST) == [6, 7]
        if why == "it was held":
            cache.abort(held)
        else:
            cache.admit(held)
            server.prefill(held)
            cache.finish(held, priority=-1)
        cache.poll()
        cache.drain()
        assert pages_on(cache, prompt(20), "full", Tier.HOST) == list(range(16))
        assert pages_on(cache, turns, "full", Tier.HOST) == [6, 7]


def test_data_above_that_was_used_later_itself_is_not_copied_ahead() -> None:
    """A tail leaves before others' data; the head that it follows was used after that."""
    with opened() as cache:
        server = Server(cache)
        head = prompt(0, n_pages=6)
        server.serve([*head, *prompt(1, n_pages=1)])
        server.serve(prompt(2, n_pages=1))
        server.serve([*head, 7])
        for number in range(10, 17):
            server.serve(prompt(number))
        server.serve(prompt(17, n_pages=PAGES - 7 * 16 - 6 - 2))
        cache.poll()
        cache.drain()
        assert pages_on(cache, prompt(2, n_pages=1), "full", Tier.HOST) == [0]
        assert pages_on(cache, [*head, *prompt(1, n_pages=1)], "full", Tier.HOST) == [6]
        cache.check_integrity()


def test_data_that_host_holds_better_in_place_of_is_not_copied_ahead() -> None:
    """It leaves DEVICE first, by its priority, and HOST is full of data of a higher one."""
    with opened(eviction="density", host_tokens=2 * 32) as cache:
        server = Server(cache)

        def serve(number: int, priority: int) -> None:
            request = server.start(prompt(number))
            server.prefill(request)
            cache.finish(request, priority=priority)
            cache.drain()

        for number in range(12):
            serve(number, 8)
        (full,) = cache.tree.components
        assert full.host is not None
        assert (full.host.free, full.host_level) == (0, 8)
        serve(20, 0)
        there = [pages_on(cache, prompt(number), "full", Tier.HOST) for number in range(12)]
        fill_reserve(cache)
        assert pages_on(cache, prompt(20), "full", Tier.HOST) == []
        after = [pages_on(cache, prompt(number), "full", Tier.HOST) for number in range(12)]
        assert after == there
        assert cache.evict("full", SHARE) >= SHARE
        assert len(pages_on(cache, prompt(20), "full", Tier.DEVICE)) < 16


@pytest.mark.parametrize("name", ["full", "full+swa+mamba"])
def test_a_deferred_request_waits_for_the_copies_of_one_step_alone(name: str) -> None:
    """An engine that polls in every step and asks again, as copies end a step later (A8)."""
    with opened(name) as cache:
        engine = cache.journal.engine
        assert isinstance(engine, PromptEngine)
        server, turns = Server(cache), list[int]()
        for number in range(42):
            turns += prompt(number, n_pages=3)
            server.serve(turns)
        waited = 0
        for _ in range(2 * STEPS):
            cache.poll()
            request = server.begin(prompt(90, n_pages=100))
            decision = cache.admit(request)
            cache.abort(request)
            engine.run_all()
            if not decision.admitted:
                assert decision.waits_for is not None
                assert decision.waits_for.transfers
                waited += 1
                cache.poll()
                request = server.begin(prompt(90, n_pages=100))
                assert cache.admit(request).admitted
                cache.abort(request)
                engine.run_all()
        assert waited


def test_data_that_is_used_again_leaves_the_reserve() -> None:
    with opened() as cache:
        server = filled(cache)
        fill_reserve(cache)
        request = server.begin([*prompt(0), 1, 2])
        cache.abort(request)
        assert cache.evict("full", SHARE) >= SHARE
        assert len(pages_on(cache, prompt(0), "full", Tier.DEVICE)) == 16
        assert pages_on(cache, prompt(1), "full", Tier.DEVICE) == []


def test_a_step_begins_a_bounded_number_of_copies() -> None:
    with opened() as cache:
        server = Server(cache)
        for number in range(PAGES):
            request = server.begin(prompt(number, n_pages=1))
            assert server.admit(request).admitted
            server.prefill(request)
            cache.finish(request)
        (full,) = cache.tree.components
        assert full.clean.n_slots == 0
        for step in range(1, STEPS + 1):
            cache.poll()
            assert full.clean.n_slots == step * SHARE // STEPS
        cache.poll()
        assert full.clean.n_slots == SHARE


def test_nothing_is_copied_ahead_while_slots_are_free() -> None:
    with opened() as cache:
        server = Server(cache)
        for number in range(7):
            server.serve(prompt(number))
        fill_reserve(cache)
        assert cache.stats().backups.started == 0


@pytest.mark.parametrize(
    "policy", [each for each in WritePolicy if each is not WritePolicy.WRITE_BACK]
)
def test_other_write_policies_have_no_reserve(policy: WritePolicy) -> None:
    with opened(policy=policy) as cache:
        filled(cache)
        started = cache.stats().backups.started
        fill_reserve(cache)
        assert cache.stats().backups.started == started
        assert waits(cache) == 0


def test_a_reserve_that_could_not_be_copied_blocks_nothing() -> None:
    with opened() as cache:
        server = filled(cache)
        engine = cache.journal.engine
        assert isinstance(engine, PromptEngine)
        engine.failing = True
        fill_reserve(cache)
        assert cache.evict("full", SHARE) >= SHARE
        engine.failing = False
        assert cache.begin(TokenKey([*prompt(0), 1, 2])).anchor_tokens == 0
        server.serve(prompt(9))
        cache.check_integrity()
