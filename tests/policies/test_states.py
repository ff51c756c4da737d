"""States: a hit counts as a use of the one it resumes from, and of no other on the way there."""

from __future__ import annotations

import pytest

from kvgraft import Cache, TokenKey
from kvgraft.requests.request import Request
from kvgraft.tree.node import Node

from ..serving import life

PAGE = 16
SHARED, OWN = 40 * PAGE, 20 * PAGE


def run(cache: Cache, request: Request) -> None:
    assert cache.admit(request).admitted
    life.prefill(cache, request)
    cache.finish(request)


def states(cache: Cache) -> dict[int, tuple[Node, int]]:
    """Nodes with a state, and its stamp, by the boundary."""
    index = cache.tree.component("mamba").index
    found = {}
    for node in cache.tree.nodes():
        cell = node.cells[index]
        if cell.device is not None:
            found[node.end * PAGE] = node, cell.stamp
    return found


@pytest.mark.parametrize("policy", ["lru", "density"])
def test_a_hit_is_a_use_of_the_state_it_resumes_from_alone(policy: str) -> None:
    with Cache.open(
        {"full": {}, "mamba": {"states": 32}},
        device_tokens=4096,
        page_size=PAGE,
        payload=False,
        policy=policy,
    ) as cache:
        key = TokenKey([1] * SHARED)
        for turn in (2, 3, 4):  # each goes on where the one before ended
            key.extend([turn] * OWN)
            run(cache, cache.begin(key))
        before = states(cache)
        ends = [SHARED + turns * OWN for turns in (1, 2, 3)]
        assert set(ends) <= set(before)
        again = cache.begin(TokenKey([*[1] * SHARED, *[2] * OWN, *[3] * OWN, 9]))
        assert again.anchor_tokens == ends[1]
        run(cache, again)
        after = states(cache)
        moved = [end for end, (_, stamp) in before.items() if after[end][1] != stamp]
        assert moved == [ends[1]]
        cache.check_integrity()


def test_states_are_kept_where_prompts_end_and_where_they_part() -> None:
    with Cache.open(
        {"full": {}, "mamba": {"states": 32}}, device_tokens=4096, page_size=PAGE, payload=False
    ) as cache:
        for own in (2, 3, 4):
            run(cache, cache.begin(TokenKey([*[1] * SHARED, *[own] * (OWN + 1)])))
        assert set(states(cache)) == {SHARED, SHARED + OWN}
        assert cache.begin(TokenKey([*[1] * SHARED, 5])).anchor_tokens == SHARED
