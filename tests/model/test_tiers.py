"""Nodes of two snapshots side by side: split by an operation, or evicted before it split them."""

from __future__ import annotations

from kvgraft_testing.machine.brute_force import Prefix
from kvgraft_testing.machine.observing import ComponentView, NodeView, Snapshot
from kvgraft_testing.machine.tiers import cut_nodes, vanished

PAGES: list[Prefix] = [(None, tuple(range(end))) for end in (4, 8, 12)]
BELOW: Prefix = (None, (*range(12), 99, 99, 99, 99))
WHOLE = NodeView(tuple(PAGES), -1)
CHILD = NodeView((BELOW,), 0)
ENDS = {PAGES[1], PAGES[2], BELOW}


def snapshot(device: dict[int, int], host: dict[int, int]) -> Snapshot:
    """Pages by number, each with its slot."""
    held = ComponentView(
        device={PAGES[page]: (slot,) for page, slot in device.items()},
        host={PAGES[page]: (slot,) for page, slot in host.items()},
    )
    return Snapshot({"window": held}, [WHOLE, CHILD], {})


def test_a_node_is_cut_where_nodes_end_now_and_its_children_follow_the_last_part() -> None:
    cut = cut_nodes([WHOLE, CHILD], ENDS)
    assert cut == [
        NodeView(tuple(PAGES[:2]), -1),
        NodeView(tuple(PAGES[2:]), 0),
        NodeView((BELOW,), 1),
    ]


def test_a_node_that_is_kept_is_one_and_others_are_cut() -> None:
    assert cut_nodes([WHOLE, CHILD], ENDS, lambda view: view == WHOLE) == [WHOLE, CHILD]
    assert cut_nodes([WHOLE], ENDS, lambda view: view == CHILD) == cut_nodes([WHOLE], ENDS)


def test_a_node_has_vanished_if_nothing_is_where_it_was() -> None:
    before = snapshot({0: 5}, {1: 6, 2: 7})
    assert vanished(WHOLE, before, snapshot({}, {}))
    assert vanished(WHOLE, before, snapshot({1: 6, 2: 7}, {0: 5})), "it is on the other tier"
    assert vanished(WHOLE, before, snapshot({0: 9}, {1: 8})), "others' data took its place"
    assert not vanished(WHOLE, before, snapshot({0: 5}, {}))
    assert not vanished(WHOLE, before, snapshot({}, {2: 7}))
