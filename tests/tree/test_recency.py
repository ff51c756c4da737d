"""Candidates leave in the order of their stamps, for any order of arrival."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from kvgraft.policies.recency import RecencyQueue
from kvgraft.tree.node import Node

calls = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 400)),
        st.tuples(st.just("push near the end"), st.integers(0, 3)),
        st.tuples(st.just("pop"), st.just(0)),
        st.tuples(st.just("keep"), st.integers(2, 4)),
    ),
    max_size=200,
)


def not_a_multiple_of(number: int) -> Callable[[Node], int]:
    return lambda node: node.ident % number


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
        elif verb == "keep":
            queue.keep(not_a_multiple_of(number))
            model = [entry for entry in model if entry[1] % number]
        else:
            stamp = number if verb == "push" else latest + number
            latest = max(latest, stamp)
            node = nodes[len(nodes)] = Node(b"", None, 0, 0, len(nodes))
            queue.push(stamp, node)
            model.append((stamp, node.ident))
        assert len(queue) == len(model)
        assert sorted((stamp, node.ident) for stamp, node in queue) == sorted(model)
