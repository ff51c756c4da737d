"""A deferred request asks again and again; that costs no match (N4)."""

from __future__ import annotations

import pytest

from kvgraft import Cache, TokenKey

from ..counting import lines_run
from ..serving import life

PAGE = 4


def lines_of_asking_again(n_pages: int, n_nodes: int) -> int:
    """Lines that run as a deferred request with a prefix of so many pages and nodes asks again."""
    with Cache.open(
        {"full": {}, "swa": {"window": 8}},
        page_size=PAGE,
        device_tokens=4 * n_pages * PAGE,
        payload=False,
    ) as cache:
        step = n_pages // n_nodes * PAGE
        for end in range(step, n_pages * PAGE + 1, step):
            life.serve(cache, [*range(end), 1 << 20])
        running = life.admitted(cache, range(1 << 21, (1 << 21) + 2 * n_pages * PAGE))
        request = cache.begin(TokenKey(range(3 * n_pages * PAGE)))
        assert request.anchor_tokens == n_pages * PAGE
        assert not cache.admit(request).admitted
        lines = lines_run(lambda: cache.admit(request))
        assert not cache.admit(request).admitted
        cache.abort(running)
        assert cache.admit(request).admitted
        cache.abort(request)
    return lines


@pytest.mark.rule("N4")
def test_asking_again_costs_the_same_however_long_the_prefix_is() -> None:
    assert lines_of_asking_again(16, 1) == lines_of_asking_again(512, 64)
