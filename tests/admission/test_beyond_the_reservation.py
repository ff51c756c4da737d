"""Decoding past the reservation: slots come from the headroom, or not at all (A12, A13)."""

from __future__ import annotations

import pytest

from kvgraft import Cache, TokenKey
from kvgraft.requests.request import Request

from ..serving import life
from ..serving.server import Server, ledgers, tree_dump
from ..serving.setups import SETUPS


def decode_until_refused(server: Server, request: Request, most: int) -> int:
    """Decode up to `most` tokens; how many were given."""
    for given in range(most):
        request.key.extend([request.computed + 10_000])
        if not server.cache.allocate(request, 1):
            return given
        server.read(request)
        server.write(request, request.computed + 1)
        server.cache.computed(request, 1)
    return most


@pytest.mark.parametrize("name", sorted(SETUPS))
def test_a_decode_that_outgrows_its_reservation_waits_for_a_retraction(name: str) -> None:
    cache = SETUPS[name].open(device_tokens=48, host_tokens=96)
    server = Server(cache)
    long = server.start(range(8), reserve=2)
    server.prefill(long)
    others: list[Request] = []
    while True:
        other = server.begin(range(1000 * len(others) + 1000, 1000 * len(others) + 1008), reserve=2)
        if not cache.admit(other).admitted:
            cache.abort(other)
            break
        server.prefill(other)
        others.append(other)
    assert others
    given = decode_until_refused(server, long, 200)
    assert given >= 2
    bounded = not cache.tree.prefix_closed
    if bounded:
        # windows recycle their own pages: it decodes for ever, within its peak
        assert given == 200
        cache.close()
        return
    assert given < 200
    before = ledgers(cache), tree_dump(cache), long.computed, long.allocated
    assert not cache.allocate(long, 1)
    assert (ledgers(cache), tree_dump(cache), long.computed, long.allocated) == before
    # requests within their reservation are not hurt
    for other in others:
        server.decode(other, 2)
    cache.retract(others.pop())
    cache.drain()
    assert cache.allocate(long, 1)
    server.write(long, long.computed + 1)
    cache.computed(long, 1)
    cache.check_integrity()
    for other in others:
        cache.finish(other)
    cache.finish(long)
    cache.check_integrity()
    cache.close()


@pytest.mark.parametrize("name", sorted(SETUPS))
def test_a_retracted_request_continues_from_its_computed_tokens(name: str) -> None:
    cache = SETUPS[name].open(device_tokens=96, host_tokens=192)
    server = Server(cache)
    request = server.start(range(8), reserve=8)
    server.prefill(request)
    server.decode(request, 6)
    cached = cache.retract(request)
    assert cached == 14
    request.key.extend([7])  # sampled by the last step, not computed yet
    again = cache.begin(request.key, reserve=2)
    assert again.anchor_tokens == 14
    assert cache.admit(again).admitted
    server.load_back(again)
    server.prefill(again)
    server.decode(again, 2)
    cache.check_integrity()
    cache.close()


def test_a_refused_decode_publishes_no_state_either() -> None:
    components = {"full": {}, "swa": {"window": 3}, "mamba": {"states": 7}}
    cache = Cache.open(components, page_size=1, device_tokens=12)
    request = cache.begin(TokenKey(range(11)))
    assert cache.admit(request).admitted
    while request.computed < request.prompt:
        n_tokens = cache.next_chunk(request, 5)
        assert cache.allocate(request, n_tokens)
        cache.computed(request, n_tokens)
    request.key.extend([11, 12])
    assert cache.allocate(request, 1)
    cache.computed(request, 1)
    before = ledgers(cache), tree_dump(cache)
    assert not cache.allocate(request, 1)
    assert (ledgers(cache), tree_dump(cache)) == before
    cache.check_integrity()


@pytest.mark.parametrize(("n_pages", "fits"), [(9, True), (10, True), (16, True), (17, False)])
def test_publishing_states_takes_no_room_from_the_pages_that_are_asked_for(
    n_pages: int, *, fits: bool
) -> None:
    """Another request's copy of the same pages is evictable: it goes, rather than to be pinned."""
    components = {"full": {}, "mamba": {"states": 8}}
    with Cache.open(components, page_size=2, device_tokens=48, guard="on") as cache:
        key = TokenKey(range(16))
        request, other = cache.begin(key, reserve=2), cache.begin(TokenKey(range(16)))
        assert cache.admit(request).admitted
        assert cache.admit(other).admitted
        life.prefill(cache, request)
        life.prefill(cache, other)
        cache.finish(other)
        pool = cache.tree.component("full").device
        before = pool.counts(), pool.promised
        assert (pool.free, pool.evictable, pool.headroom) == (8, 8, 14), "and 2 are promised to it"
        assert cache.allocate(request, 2 * n_pages) is fits
        if not fits:
            assert (pool.counts(), pool.promised) == before
        cache.check_integrity()
        cache.abort(request)
