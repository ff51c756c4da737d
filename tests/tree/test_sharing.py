"""Sharing between requests: nodes of one namespace, pins that survive, pages counted once."""

from __future__ import annotations

import gc
from array import array

import pytest

from kvgraft import LeaseError, TokenKey
from kvgraft.tree import eviction, inserting, matching, operations, pinning
from kvgraft.tree.inserting import Holding, Run
from kvgraft.tree.node import Node
from kvgraft.tree.pinning import Receipt
from kvgraft.tree.tree import Tree
from kvgraft_guard.integrity import check_integrity

from .books import PAGE, back_up, insert, open_tree, path, queued

SEQUENCE = list(range(1, 13))


def ledgers(tree: Tree) -> list[dict[str, int]]:
    found = []
    for component in tree.components:
        assert component.host is not None
        found += [component.device.counts(), component.host.counts()]
    return found


def pinned(tree: Tree, anchor: Node, *, host_from: int | None = None) -> Receipt:
    receipt = pinning.acquire(tree, anchor, host_from=host_from)
    assert receipt is not None
    return receipt


# -- namespaces (T11)


def test_equal_tokens_of_two_namespaces_share_no_node_and_no_slot() -> None:
    tree = open_tree("full", "window", "state")
    mine = insert(tree, SEQUENCE, namespace="mine")
    assert matching.match(tree, TokenKey(SEQUENCE, "theirs"), 6).anchor == 0
    theirs = insert(tree, SEQUENCE, namespace="theirs")
    assert matching.match(tree, TokenKey(SEQUENCE, "theirs"), 6).anchor == 6
    assert not {id(node) for node in path(mine)} & {id(node) for node in path(theirs)}
    for one, two in zip(mine.cells, theirs.cells, strict=True):
        assert not set(array("i", one.device or b"")) & set(array("i", two.device or b""))
    check_integrity(tree)


# -- matching (M6)


def test_a_match_changes_no_book_and_no_pin() -> None:
    tree = open_tree("full", "window", "state")
    node = insert(tree, SEQUENCE)
    before = ledgers(tree), tree.n_nodes, tree.clock, [cell.stamp for cell in node.cells]
    matching.match(tree, TokenKey([*SEQUENCE, 99, 98]), 7)
    assert before == (ledgers(tree), tree.n_nodes, tree.clock, [c.stamp for c in node.cells])


# -- splits (T10)


def test_a_split_keeps_books_pins_hits_recency_and_transfers_for_both_parts() -> None:
    tree = open_tree("full", "window")
    node = insert(tree, SEQUENCE)
    back_up(tree, *path(node))
    eviction.evict_device(tree, tree.by_name["full"], 6)
    receipt = pinned(tree, node, host_from=0)
    operation = operations.begin_load_back(tree, receipt)
    assert operation is not None
    before = ledgers(tree)
    whole = node
    assert whole.end - whole.start > 1
    assert whole.hits
    assert all(cell.stamp for cell in whole.cells)
    slots = {id(cell): (cell.host, cell.incoming) for cell in whole.cells}
    upper = tree.split(whole, whole.start + 1)
    assert ledgers(tree) == before
    check_integrity(tree)
    for above, below in zip(upper.cells, whole.cells, strict=True):
        assert (above.device_pins, above.host_pins) == (below.device_pins, below.host_pins)
        assert above.stamp == below.stamp
        host, incoming = slots[id(below)]
        assert (above.host or b"") + (below.host or b"") == (host or b"")
        if incoming is not None:
            assert above.incoming is not None
            assert below.incoming is not None
            assert above.incoming.slots + below.incoming.slots == incoming.slots
    assert upper.hits == whole.hits
    assert operations.commit(tree, operation)
    pinning.release(tree, receipt)
    check_integrity(tree)
    assert matching.match(tree, TokenKey(SEQUENCE), 6).device_anchor == 6


def test_a_state_stays_at_its_boundary_when_its_node_is_split() -> None:
    tree = open_tree("full", "state")
    node = insert(tree, SEQUENCE)
    upper = tree.split(node, 2)
    state = tree.by_name["state"].index
    assert upper.cells[state].device is None
    assert node.cells[state].device is not None
    check_integrity(tree)


# -- receipts (L1 to L7)


def test_a_receipt_is_released_once_and_on_its_own_tree() -> None:
    tree, other = open_tree("full"), open_tree("full", "window")
    receipt = pinned(tree, insert(tree, SEQUENCE))
    with pytest.raises(LeaseError, match="components are missing"):
        pinning.release(other, receipt)
    pinning.release(tree, receipt)
    with pytest.raises(LeaseError, match="already released"):
        pinning.release(tree, receipt)
    check_integrity(tree)


def test_a_release_undoes_its_pins_after_any_split_in_between() -> None:
    tree = open_tree("full", "window", "state")
    node = insert(tree, SEQUENCE)
    before = ledgers(tree)
    receipt = pinned(tree, node)
    insert(tree, [*SEQUENCE[:4], 50, 51, 52, 53], without=["state"])
    middle = pinned(tree, path(node)[0])
    pinning.release(tree, receipt)
    pinning.release(tree, middle)
    check_integrity(tree)
    assert [each["pinned"] for each in ledgers(tree)] == [each["pinned"] for each in before]


@pytest.mark.rule("L4")
def test_data_that_arrives_on_a_pinned_node_is_pinned_on_arrival() -> None:
    tree = open_tree("full")
    node = insert(tree, SEQUENCE)
    back_up(tree, node)
    eviction.evict_device(tree, tree.by_name["full"], 6)
    receipt = pinned(tree, node, host_from=0)
    assert tree.by_name["full"].device.pinned == 0
    operation = operations.begin_load_back(tree, receipt)
    assert operation is not None
    assert operations.commit(tree, operation)
    assert tree.by_name["full"].device.pinned == 6
    assert eviction.evict_device(tree, tree.by_name["full"], 1) == 0
    pinning.release(tree, receipt)
    assert tree.by_name["full"].device.evictable == 6
    check_integrity(tree)


def test_a_window_pins_its_window_of_a_long_leaf_and_no_more() -> None:
    tree = open_tree("full", "window")
    node = insert(tree, SEQUENCE)
    receipt = pinned(tree, node)
    assert tree.by_name["full"].device.pinned == 6
    assert tree.by_name["window"].device.pinned == 4 // PAGE
    pinning.release(tree, receipt)
    check_integrity(tree)


# -- inserting (I3)


@pytest.mark.rule("I3")
def test_pages_given_back_behind_a_window_are_not_freed_again() -> None:
    """The window comes with its last pages only; the pages of the base are all adopted."""
    tree = open_tree("full", "window")
    node = insert(tree, SEQUENCE, behind={"window": 4})
    window = tree.by_name["window"]
    assert [each.cells[window.index].device is not None for each in path(node)] == [False, True]
    assert (window.device.evictable, window.device.private) == (2, 0)
    assert tree.by_name["full"].device.evictable == 6
    check_integrity(tree)


def test_an_incoming_duplicate_is_freed_and_the_tree_keeps_its_own() -> None:
    tree = open_tree("full")
    first = insert(tree, SEQUENCE).cells[0].device
    again = insert(tree, SEQUENCE).cells[0].device
    assert again == first
    ledger = tree.by_name["full"].device
    assert (ledger.evictable, ledger.private, ledger.free) == (6, 0, 26)
    check_integrity(tree)


def test_a_holding_that_covers_part_of_a_tombstone_revives_that_part() -> None:
    tree = open_tree("full", "window")
    insert(tree, SEQUENCE, without=["window"])
    window = tree.by_name["window"]
    slots = window.devices[0].take_private(2)
    full = tree.by_name["full"].devices[0].take_private(6)
    assert slots is not None
    assert full is not None
    holdings = [Holding([Run(0, 6, full)], {}), Holding([Run(4, 6, slots)], {})]
    found = inserting.insert(tree, tree.root(None), TokenKey(SEQUENCE), 6, holdings)
    end = queued(tree, found)
    assert end.cells[window.index].device == slots
    assert (end.start, end.end) == (4, 6)
    check_integrity(tree)


# -- nodes with many children


def test_no_request_waits_for_all_children_of_a_node_to_be_moved() -> None:
    """A dictionary of n entries is copied at once when it grows, and the collector visits them."""
    tree = open_tree("full")
    root = tree.root(None)
    for number in range(20_000):
        tree.grow(number.to_bytes(tree.page_bytes, "little"), root, 0, 1)
    assert len(list(root.each_child())) == 20_000
    tables = root.children if isinstance(root.children, list) else [root.children]
    assert max(len(table) for table in tables if isinstance(table, dict)) <= 256
    assert not any(map(gc.is_tracked, tables))


def test_many_children_are_found_cut_and_taken_out_as_few_are() -> None:
    tree = open_tree("full", capacity=3000)
    sequences = [[number, 1, 2, 3] for number in range(1000)]
    for sequence in sequences:
        insert(tree, sequence)
    root = tree.root(None)
    for number in range(0, 1000, 5):
        insert(tree, [number, 1, 4, 5])  # cuts the node of the sequence
    check_integrity(tree)
    found = [matching.match(tree, TokenKey(each), 2).anchor for each in sequences]
    assert found == [2] * 1000
    assert eviction.evict_device(tree, tree.components[0], 2100) == 2100
    check_integrity(tree)
    assert tree.n_nodes == len(list(tree.nodes()))
    eviction.evict_device(tree, tree.components[0], 3000)
    assert root.children is None
    assert not tree.n_nodes
