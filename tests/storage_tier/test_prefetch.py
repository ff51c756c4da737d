"""A prefetch overlaps with everything, ends by its policy, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvgraft import ConfigError, LeaseError, TokenKey
from kvgraft_storage.tier.tier import fingerprint_of

from ..serving.server import Server, ledgers
from ..serving.setups import SETUPS, Setup, installed
from .shelf import Shelf, addresses, drained, open_cache, settings, stocked, tier_of, until

PROMPT = list(range(100, 133))
PAGES = (len(PROMPT) - 1) // 2
HYBRID = installed("full", "swa", "mamba")


@contextmanager
def serving(setup: Setup, shelf: Shelf, **given: object) -> Iterator[Server]:
    """A cache over a store, closed with all books balanced."""
    cache = open_cache(setup, shelf, settings(**given), device_tokens=256, host_tokens=512)
    try:
        yield Server(cache)
        shelf.gate.set()
        assert cache.drain()
        assert tier_of(cache).prefetching.nbytes_in_flight == 0
        cache.check_integrity()
    finally:
        shelf.gate.set()
        cache.close()


def finish(server: Server, request: object) -> None:
    cache = server.cache
    assert cache.admit(request).admitted
    server.load_back(request)  # type: ignore[arg-type]
    server.prefill(request)  # type: ignore[arg-type]
    cache.finish(request)  # type: ignore[arg-type]


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_one_process_hits_data_that_another_stored(setup: Setup) -> None:
    shelf = stocked(setup, PROMPT)
    with serving(setup, shelf) as server:
        key = TokenKey(PROMPT)
        prefetch = drained(server.cache, tier_of(server.cache).prefetch(key))
        request = server.cache.begin(key, prefetch=prefetch)
        assert request.anchor_tokens == request.storage_tokens == 2 * PAGES
        finish(server, request)


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_requests_run_while_a_store_hangs(setup: Setup) -> None:
    shelf = stocked(setup, PROMPT)
    with serving(setup, shelf) as server:
        shelf.gate.clear()
        prefetch = tier_of(server.cache).prefetch(TokenKey(PROMPT))
        until(lambda: shelf.n_calls, server.cache)
        for turn in range(3):
            request = server.start(range(500, 520 + turn))
            server.prefill(request)
            server.cache.poll()
            server.cache.finish(request)
        assert not prefetch.ready
        assert tier_of(server.cache).prefetching.nbytes_in_flight > 0
        shelf.gate.set()
        assert drained(server.cache, prefetch).gained_tokens == 2 * PAGES


def test_best_effort_begins_with_the_fetched_pages_and_frees_the_rest_once() -> None:
    shelf = stocked(HYBRID, PROMPT, synchronous=True)
    with serving(HYBRID, shelf, prefetch="best-effort") as server:
        before = ledgers(server.cache)
        shelf.gate.clear()
        key = TokenKey(PROMPT)
        prefetch = tier_of(server.cache).prefetch(key)
        until(lambda: shelf.n_calls, server.cache)
        assert prefetch.ready
        request = server.cache.begin(key, prefetch=prefetch)
        assert request.anchor_tokens == request.storage_tokens == 0
        assert prefetch.ended
        server.cache.abort(request)
        server.cache.check_integrity()
        assert ledgers(server.cache) != before, "slots the store may still write to are not free"
        shelf.gate.set()
        assert server.cache.drain()
        assert ledgers(server.cache) == before


def test_best_effort_publishes_the_pages_that_have_come() -> None:
    setup = installed("full")
    shelf = stocked(setup, PROMPT)
    with serving(setup, shelf, prefetch="best-effort") as server:
        cache = server.cache
        key = TokenKey(PROMPT)
        shelf.gate.clear()
        prefetch = tier_of(cache).prefetch(key)
        until(lambda: tier_of(cache).prefetching.nbytes_in_flight, cache)
        (fetch,) = tier_of(cache).prefetching.in_flight.values()
        ticket = fetch._ticket
        assert ticket is not None
        shelf.gate.set()
        until(lambda: ticket.decided)
        request = cache.begin(key, prefetch=prefetch)
        assert request.storage_tokens == 2 * PAGES
        finish(server, request)


def test_a_timeout_lets_the_request_begin_and_is_not_a_miss() -> None:
    shelf = stocked(HYBRID, PROMPT)
    with serving(HYBRID, shelf, prefetch="timeout", prefetch_timeout_s=0.05) as server:
        shelf.gate.clear()
        key = TokenKey(PROMPT)
        prefetch = tier_of(server.cache).prefetch(key)
        assert not prefetch.ready
        until(lambda: prefetch.ready)
        assert not prefetch.ended
        assert str(prefetch) == (
            "0 tokens beyond 0: timed out after 0.05 s; the request may begin without the rest"
        )
        server.cache.abort(server.cache.begin(key, prefetch=prefetch))
        assert str(prefetch) == "0 tokens beyond 0: the request began before all had come"
        shelf.gate.set()
        assert server.cache.drain()
        again = drained(server.cache, tier_of(server.cache).prefetch(key))
        assert again.gained_tokens == 2 * PAGES


def test_a_cancelled_prefetch_publishes_nothing_and_begins_nothing() -> None:
    shelf = stocked(HYBRID, PROMPT)
    with serving(HYBRID, shelf) as server:
        before = ledgers(server.cache)
        shelf.gate.clear()
        prefetch = tier_of(server.cache).prefetch(TokenKey(PROMPT))
        until(lambda: shelf.n_calls, server.cache)
        tier_of(server.cache).cancel(prefetch)
        with pytest.raises(LeaseError, match="cancelled"):
            server.cache.begin(TokenKey(PROMPT), prefetch=prefetch)
        shelf.gate.set()
        assert server.cache.drain()
        assert ledgers(server.cache) == before
        assert server.cache.tree.n_nodes == 0
        assert not server.cache.tree.roots


def test_requests_of_one_prefix_share_a_fetch() -> None:
    longer = [*PROMPT, *range(900, 916)]
    shelf = stocked(HYBRID, PROMPT, longer)
    with serving(HYBRID, shelf) as server:
        tier = tier_of(server.cache)
        shelf.gate.clear()
        first = tier.prefetch(TokenKey(PROMPT))
        until(lambda: shelf.n_calls, server.cache)
        twin, other = tier.prefetch(TokenKey(PROMPT)), tier.prefetch(TokenKey(longer))
        assert (first.shared, twin.shared, other.shared) == (False, True, True)
        assert tier.prefetching.n_in_flight == 1
        shelf.gate.set()
        assert server.cache.drain()
        assert first.gained_tokens == twin.gained_tokens == 2 * PAGES
        assert other.gained_tokens == len(longer) - 1
        assert len(shelf.asked) == len({*shelf.asked})


def test_a_request_that_begins_leaves_the_fetch_to_those_that_wait() -> None:
    shelf = stocked(HYBRID, PROMPT)
    with serving(HYBRID, shelf, prefetch="best-effort") as server:
        tier = tier_of(server.cache)
        shelf.gate.clear()
        first, twin = tier.prefetch(TokenKey(PROMPT)), tier.prefetch(TokenKey(PROMPT))
        until(lambda: shelf.n_calls, server.cache)
        server.cache.abort(server.cache.begin(TokenKey(PROMPT), prefetch=first))
        assert first.ended
        assert not twin.ended
        shelf.gate.set()
        assert drained(server.cache, twin).gained_tokens == 2 * PAGES


@pytest.mark.one_in(6)
@pytest.mark.parametrize("lost", range(PAGES))
def test_a_missing_page_shortens_it_to_a_boundary_that_all_components_accept(lost: int) -> None:
    """The store says it has the page; other pages asked for are of use, or freed once (S4)."""
    shelf = stocked(HYBRID, PROMPT, chunk=4)
    with serving(HYBRID, shelf) as server:
        (gone,) = addresses(server.cache, PROMPT, "full")[lost]
        header, payload = shelf.stored[gone.key]
        shelf.stored[gone.key] = header, bytes([payload[0] ^ 1]) + payload[1:]
        key = TokenKey(PROMPT)
        prefetch = drained(server.cache, tier_of(server.cache).prefetch(key))
        # states stand at every second page, and where the first two chunks would be repeated
        states = [*range(0, PAGES + 1, 2), 1, 3]
        assert prefetch.tokens == 2 * max(page for page in states if page <= lost)
        assert gone.key not in shelf.stored, "damaged data is removed"
        assert tier_of(server.cache).counts()["get.corrupt"] == 1
        finish(server, server.cache.begin(key, prefetch=prefetch))


def test_namespaces_and_weights_share_nothing() -> None:
    setup = installed("full")
    shelf = stocked(setup, PROMPT)
    with serving(setup, shelf) as server:
        other = TokenKey(PROMPT, namespace="tenant")
        assert not drained(server.cache, tier_of(server.cache).prefetch(other)).gained_tokens
    with serving(setup, shelf, weights="w2") as server:
        key = TokenKey(PROMPT)
        assert not drained(server.cache, tier_of(server.cache).prefetch(key)).gained_tokens


@pytest.mark.parametrize("namespace", [object(), ("a", frozenset({1})), int])
def test_a_namespace_without_a_name_in_storage_is_refused(namespace: object) -> None:
    with serving(installed("full"), Shelf()) as server:
        for call in (server.cache.begin, tier_of(server.cache).prefetch):
            with pytest.raises(ConfigError, match="no canonical bytes"):
                call(TokenKey(PROMPT, namespace=namespace))
        assert not server.cache.tree.roots


def test_below_the_threshold_the_store_is_not_asked() -> None:
    shelf = stocked(HYBRID, PROMPT)
    with serving(HYBRID, shelf, threshold_tokens=34) as server:
        prefetch = tier_of(server.cache).prefetch(TokenKey(PROMPT))
        assert prefetch.ended
        assert "below the threshold of 34" in prefetch.reason
        assert not tier_of(server.cache).counts().get("exists.ok")


@pytest.mark.parametrize("pages", [1, 5, 9])
def test_prefetches_together_hold_no_more_of_host_than_they_may(pages: int) -> None:
    setup = installed("full")
    other = list(range(700, 733))
    shelf = stocked(setup, PROMPT, other)
    size = setup.open().mounted[0].component.host.slab_nbytes  # type: ignore[union-attr]
    with serving(setup, shelf, prefetch_nbytes=pages * size) as server:
        tier = tier_of(server.cache)
        shelf.gate.clear()
        both = [tier.prefetch(TokenKey(PROMPT)), tier.prefetch(TokenKey(other))]
        until(lambda: shelf.n_calls, server.cache)
        until(lambda: both[1].waits, server.cache)
        assert tier.prefetching.nbytes_in_flight == pages * size
        assert "left for prefetches" in both[1].reason
        assert tier.counts()["exists.ok"] == 2 * pages, "nor is more asked for"
        shelf.gate.set()
        for each in both:
            assert drained(server.cache, each).gained_tokens == 2 * pages


def test_explaining_a_match_names_the_pages_from_storage() -> None:
    shelf = stocked(HYBRID, PROMPT)
    with serving(HYBRID, shelf) as server:
        key = TokenKey(PROMPT)
        prefetch = drained(server.cache, tier_of(server.cache).prefetch(key))
        told = server.cache.explain(key, prefetch)
        assert told.anchor == 2 * PAGES
        assert told.storage == f"{2 * PAGES} tokens beyond 0: complete"
        assert str(told).endswith(f"storage: {told.storage}")
        miss = TokenKey(range(800, 833))
        prefetch = drained(server.cache, tier_of(server.cache).prefetch(miss))
        told = server.cache.explain(miss, prefetch)
        assert "nothing of full, swa, mamba is stored" in told.storage


def test_detaching_a_store_ends_its_calls_and_another_takes_its_place() -> None:
    shelf, other = stocked(HYBRID, PROMPT), Shelf()
    with serving(HYBRID, shelf) as server:
        tier = tier_of(server.cache)
        shelf.gate.clear()
        prefetch = tier.prefetch(TokenKey(PROMPT))
        until(lambda: shelf.n_calls, server.cache)
        ticket = tier.detach()
        assert prefetch.ended
        assert "detached" in prefetch.reason
        shelf.gate.set()
        until(lambda: ticket.done, server.cache)
        assert server.cache.drain()
        assert tier.prefetch(TokenKey(PROMPT)).reason == "no store is attached"
        server.serve(PROMPT)
        tier.attach(other)
        server.serve([*PROMPT, 1])
        assert server.cache.drain()
        assert other.stored.keys() >= shelf.stored.keys()


def test_a_prefetch_is_for_the_sequence_and_the_cache_it_was_started_for() -> None:
    shelf = stocked(HYBRID, PROMPT)
    with serving(HYBRID, shelf) as server, serving(HYBRID, shelf.copy()) as other:
        shelf.gate.clear()
        prefetch = tier_of(server.cache).prefetch(TokenKey(PROMPT))
        with pytest.raises(LeaseError, match="another sequence, of 33 tokens"):
            server.cache.begin(TokenKey(PROMPT[1:]), prefetch=prefetch)
        with pytest.raises(LeaseError, match="another sequence"):
            server.cache.begin(TokenKey(PROMPT, namespace=1), prefetch=prefetch)
        for call in (
            lambda: other.cache.begin(TokenKey(PROMPT), prefetch=prefetch),
            lambda: tier_of(other.cache).cancel(prefetch),
        ):
            with pytest.raises(LeaseError, match="another cache"):
                call()
        shelf.gate.set()
        assert drained(server.cache, prefetch).gained_tokens == 2 * PAGES
        longer = server.cache.begin(TokenKey([*PROMPT, 1, 2]), prefetch=prefetch)
        assert longer.storage_tokens == 2 * PAGES
        server.cache.abort(longer)


def test_a_component_that_reaches_otherwise_shares_nothing() -> None:
    """Layers above a window were computed from that window's tokens."""
    shelf = stocked(HYBRID, PROMPT)
    wider = open_cache(HYBRID, shelf, device_tokens=256, host_tokens=512, swa={"window": 8})
    assert not drained(wider, tier_of(wider).prefetch(TokenKey(PROMPT))).gained_tokens
    wider.close()


def test_planes_that_lie_elsewhere_in_a_slot_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes, and other ones at each place: another version may lay them out so."""
    cache = installed("full").open(storage=settings(), device_tokens=256, host_tokens=512)
    (mounted,) = cache.mounted
    mirror = mounted.component.host
    assert mirror is not None
    before = fingerprint_of(settings(), cache.tree, cache.mounted)
    assert before.digest == tier_of(cache).fingerprint.digest
    monkeypatch.setattr(mirror, "offsets", mirror.offsets[::-1])
    after = fingerprint_of(settings(), cache.tree, cache.mounted)
    assert after.digest != before.digest
    cache.close()


@pytest.mark.parametrize("thing", [None, "x", 5, PROMPT])
def test_wrong_keys_prefetches_and_stores_are_refused_in_a_line(thing: object) -> None:
    with serving(installed("full"), Shelf()) as server:
        tier = tier_of(server.cache)
        with pytest.raises(ConfigError, match="is no TokenKey; give TokenKey"):
            tier.prefetch(thing)  # type: ignore[arg-type]
        with pytest.raises(LeaseError, match="is no prefetch; give the one that"):
            tier.cancel(thing)  # type: ignore[arg-type]
        if thing is not None:
            with pytest.raises(LeaseError, match="is no prefetch; give the one that"):
                server.cache.begin(TokenKey(PROMPT), prefetch=thing)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="is an open StorageBackend, not a"):
            tier.attach(thing)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="is a list, which cannot be hashed"):
            server.cache.begin(TokenKey(PROMPT, namespace=[1]))


@pytest.mark.parametrize("state", ["came", "under way"])
def test_a_prefetch_is_given_to_begin_once(state: str) -> None:
    """A deferred request that is begun again has its data in the tree, and does not count twice."""
    shelf = stocked(HYBRID, PROMPT)
    with serving(HYBRID, shelf) as server:
        cache, key = server.cache, TokenKey(PROMPT)
        shelf.gate.clear()
        prefetch = tier_of(cache).prefetch(key)
        if state == "came":
            shelf.gate.set()
            drained(cache, prefetch)
        cache.abort(cache.begin(key, prefetch=prefetch))
        with pytest.raises(LeaseError, match="with this prefetch before; begin without it, or"):
            cache.begin(key, prefetch=prefetch)
        finish(server, cache.begin(key))
        tier_of(cache).cancel(prefetch)


@pytest.mark.parametrize("second", [0, 1], ids=["one key", "two keys"])
def test_a_prompt_that_is_prefetched_twice_counts_by_the_tier_it_comes_from(second: int) -> None:
    shelf = stocked(HYBRID, PROMPT)
    with serving(HYBRID, shelf) as server:
        cache, keys = server.cache, [TokenKey(PROMPT), TokenKey(PROMPT)]
        both = [tier_of(cache).prefetch(keys[at]) for at in (0, second)]
        for each in both:
            told = str(drained(cache, each))
            assert told == f"{2 * PAGES} tokens beyond 0: complete"
        found = []
        for each in both:
            request = cache.begin(each.key, prefetch=each)
            found.append((request.anchor_tokens, request.device_tokens, request.storage_tokens))
            finish(server, request)
        assert found == [(2 * PAGES, 0, 2 * PAGES), (2 * PAGES, 2 * PAGES, 0)]
        tokens = cache.stats().tokens
        assert (tokens.device, tokens.host, tokens.storage) == (2 * PAGES, 0, 2 * PAGES)
