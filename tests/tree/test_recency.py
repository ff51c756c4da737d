"""Candidates leave in the order of their stamps, for any order of arrival."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft.policies.recency import RecencyQueue
from kvgraft.tree.node import Node

calls = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 400)),
        st.tuples(st.just("push near the end"), st.integers(0, 3)),
        st.tuples(st.just("pop"), st.just(0)),
        st.tuples(st.just("withdraw"), st.integers(0, 400)),
    ),
    max_size=200,
)


@given(calls)
def test_the_smallest_stamp_leaves_first(calls: list[tuple[str, int]]) -> None:
    queue = RecencyQueue()
    model: list[tuple[int, int]] = []
    nodes: dict[int, Node] = {}
    latest = 0
    for verb, number in calls:
        if verb == "pop":
            model.sort()
            popped = queue.pop()
            assert (popped is None) == (not model)
            if popped is not None:
                assert (popped[0], popped[1].ident) == model.pop(0)
        elif verb == "withdraw" and nodes:
            node = nodes[number % len(nodes)]
            entered = [entry for entry in model if entry[1] == node.ident]
            if entered:
                queue.withdraw(entered[0][0], node)
                model.remove(entered[0])
            else:
                with pytest.raises(LookupError, match=f"not entered with stamp {number}"):
                    queue.withdraw(number, node)
        elif verb == "withdraw":
            pass
        else:
            stamp = number if verb == "push" else latest + number
            latest = max(latest, stamp)
            node = nodes[len(nodes)] = Node(b"", None, 0, 0, len(nodes))
            queue.push(stamp, node)
            model.append((stamp, node.ident))
        assert len(queue) == len(model)
        assert sorted((stamp, node.ident) for stamp, node in queue) == sorted(model)
