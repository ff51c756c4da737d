"""A request may share its data and keep its slots, for engines whose tables only grow (N1)."""

from __future__ import annotations

from typing import Any

import pytest

from kvgraft import Cache, ConfigError, Request, TokenKey

from ..serving import life

PAGE = 4
TOKENS = [*range(100, 140)]
COMPONENTS: dict[str, dict[str, dict[str, Any]]] = {
    "full": {"full": {}},
    "full+swa": {"full": {}, "swa": {"window": 10}},
    "swa": {"swa": {"window": 10}},
}


def opened(components: dict[str, dict[str, Any]], n_pages: int = 64) -> Cache:
    return Cache.open(
        components, page_size=PAGE, device_tokens=n_pages * PAGE, payload=False, guard="on"
    )


def tables(cache: Cache, request: Request) -> list[list[int]]:
    return [cache.table(request, each.name).tolist() for each in cache.mounted]


def chunk_of(cache: Cache, request: Request) -> None:
    n_tokens = cache.next_chunk(request, 16)
    assert cache.allocate(request, n_tokens)
    cache.computed(request, n_tokens)


def compute(cache: Cache, request: Request) -> None:
    """The whole prompt, shared chunk by chunk; no slot that it still has is another's."""
    while request.computed < request.prompt:
        chunk_of(cache, request)
        before = tables(cache, request)
        cache.checkpoint(request, keep_slots=True)
        for was, now in zip(before, tables(cache, request)):
            assert all(slot in (-1, old) for old, slot in zip(was, now))
        cache.check_integrity()


@pytest.mark.parametrize("components", COMPONENTS.values(), ids=COMPONENTS)
@pytest.mark.rule("N1")
def test_tables_stay_where_others_shared_the_same_tokens_before(
    components: dict[str, dict[str, Any]],
) -> None:
    cache = opened(components)
    first, second = life.admitted(cache, TOKENS), life.admitted(cache, [*TOKENS[:30], *range(12)])
    compute(cache, first)
    compute(cache, second)
    for tokens, resumed in ((TOKENS, 40), ([*TOKENS[:30], *range(12)], 40)):
        request = cache.begin(TokenKey([*tokens, 7]))
        assert request.anchor_tokens == resumed
        cache.abort(request)
    cache.finish(second)
    cache.finish(first)
    cache.check_integrity()
    for each in cache.stats().components.values():
        assert not each.device.pinned
        assert not each.device.private
    cache.close()


@pytest.mark.rule("N1")
def test_duplicates_are_the_requests_own_until_it_ends_and_are_freed_once() -> None:
    cache = opened(COMPONENTS["full"])
    for request in [life.admitted(cache, TOKENS) for _ in range(2)]:
        compute(cache, request)
    pool = cache.stats().components["full"].device
    assert (pool.pinned, pool.private) == (10, 10)
    for request in list(cache.requests.values()):
        cache.finish(request)
    assert cache.stats().components["full"].device.evictable == 10
    cache.close()


@pytest.mark.rule("N1")
def test_a_checkpoint_without_room_for_both_copies_is_declined() -> None:
    """Beside its own pages it would pin the tree's, which others were promised (A12)."""
    cache = opened(COMPONENTS["full"], n_pages=31)
    second = life.admitted(cache, TOKENS)
    first = life.admitted(cache, TOKENS)
    compute(cache, first)
    cache.finish(first)
    third = life.admitted(cache, range(200, 240))
    while second.computed < second.prompt:
        chunk_of(cache, second)
    declined = cache.publisher.declined_checkpoints
    assert not cache.checkpoint(second, keep_slots=True)
    assert cache.publisher.declined_checkpoints == declined + 1
    compute(cache, third)
    cache.finish(third)
    assert cache.finish(second) == 40
    cache.check_integrity()
    cache.close()


def test_a_table_is_read_from_a_page_on() -> None:
    cache = opened(COMPONENTS["full+swa"])
    request = life.admitted(cache, TOKENS)
    compute(cache, request)
    for name in ("full", "swa"):
        whole = cache.table(request, name).tolist()
        assert all(cache.table(request, name, page).tolist() == whole[page:] for page in range(11))
    cache.finish(request)
    cache.close()


@pytest.mark.rule("N1")
def test_slots_are_not_kept_where_a_component_has_states() -> None:
    with opened({"full": {}, "mamba": {"states": 8}}) as cache:
        request = cache.begin(TokenKey(TOKENS))
        assert cache.admit(request).admitted
        chunk_of(cache, request)
        before = cache.stats()
        with pytest.raises(ConfigError, match=r"^checkpoint: keep_slots is for pages, and .*mamba"):
            cache.checkpoint(request, keep_slots=True)
        assert cache.stats() == before
        while request.computed < request.prompt:
            chunk_of(cache, request)
        assert cache.finish(request) == len(TOKENS)


def test_a_table_is_read_from_a_page_of_the_request_on() -> None:
    with opened(COMPONENTS["full"]) as cache:
        request = cache.begin(TokenKey(TOKENS))
        assert cache.admit(request).admitted
        chunk_of(cache, request)
        whole = cache.table(request, "full").tolist()
        assert len(whole) == 4
        for start in (0, 3, 4, 5, 1 << 40):
            assert cache.table(request, "full", start).tolist() == whole[start:]
        no_page: Any
        for no_page in (-1, "1", None, 2.0):
            with pytest.raises(ConfigError, match=r"^table: start .*; give a whole number, 0 or m"):
                cache.table(request, "full", no_page)
