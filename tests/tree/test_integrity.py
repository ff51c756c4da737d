"""`check_integrity` finds a corruption of every rule it stands for, by that rule's id.

Each test damages one field of a sound tree, as a bug would, and expects the rule it breaks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from kvgraft import IntegrityError, Tier
from kvgraft.tree import eviction, operations, pinning
from kvgraft.tree.ledger import SlotOwner
from kvgraft.tree.node import ON_DEVICE, Node
from kvgraft.tree.tree import Tree
from kvgraft_guard.integrity import check_integrity

from .books import grown, insert, open_tree, path

Damage = Callable[[Tree, list[Node]], object]


def moved_root(tree: Tree, nodes: list[Node]) -> None:
    tree.roots[None].end = 1


def root_below_a_node(tree: Tree, nodes: list[Node]) -> None:
    tree.roots["other"] = nodes[-1]


def miscounted_nodes(tree: Tree, nodes: list[Node]) -> None:
    tree.n_nodes += 1


def unlisted_child(tree: Tree, nodes: list[Node]) -> None:
    parent = nodes[-1].parent
    assert parent is not None
    if isinstance(parent.children, dict):
        first = nodes[-1].key[: tree.page_bytes]
        parent.children[bytes(tree.page_bytes)] = parent.children.pop(first)
    else:
        parent.children = None


def torn_key(tree: Tree, nodes: list[Node]) -> None:
    nodes[-1].key = nodes[-1].key[:-4] + b"\0" * (tree.page_bytes + 2)


def gap_between_parent_and_child(tree: Tree, nodes: list[Node]) -> None:
    nodes[-1].start += 1


def node_that_holds_nothing(tree: Tree, nodes: list[Node]) -> None:
    tree.grow(b"\7" * tree.page_bytes, nodes[-1], nodes[-1].end, nodes[-1].end + 1)


def narrower_data_where_the_base_is_gone(tree: Tree, nodes: list[Node]) -> None:
    tree.drop(nodes[-1], tree.by_name["full"], Tier.DEVICE, "deleted")


def host_data_where_the_base_is_gone(tree: Tree, nodes: list[Node]) -> None:
    tree.drop(nodes[-1], tree.by_name["full"], Tier.HOST, "deleted")


def child_on_device_below_a_gap(tree: Tree, nodes: list[Node]) -> None:
    tree.drop(nodes[0], tree.by_name["full"], Tier.DEVICE, "deleted")
    tree.drop(nodes[0], tree.by_name["window"], Tier.DEVICE, "deleted")


def child_on_host_below_a_gap(tree: Tree, nodes: list[Node]) -> None:
    tree.drop(nodes[0], tree.by_name["full"], Tier.HOST, "deleted")
    tree.drop(nodes[0], tree.by_name["window"], Tier.HOST, "deleted")


def negative_pins(tree: Tree, nodes: list[Node]) -> None:
    nodes[-1].cells[0].host_pins = -1


def more_pins_than_the_base(tree: Tree, nodes: list[Node]) -> None:
    nodes[-1].cells[1].device_pins += 1


def miscounted_live_data(tree: Tree, nodes: list[Node]) -> None:
    nodes[0].live_device += 1


def victim_that_is_no_candidate(tree: Tree, nodes: list[Node]) -> None:
    tree.by_name["full"].device.queue.withdraw(nodes[-1])


def candidate_entered_twice(tree: Tree, nodes: list[Node]) -> None:
    component = tree.by_name["full"]
    nodes[-1].cells[component.index].queued &= ~ON_DEVICE
    component.device.queue.push(nodes[-1])


def flag_without_an_entry(tree: Tree, nodes: list[Node]) -> None:
    component = tree.by_name["full"]
    component.device.queue.withdraw(nodes[-1])
    nodes[-1].cells[component.index].queued |= ON_DEVICE


def entry_ahead_of_its_stamp(tree: Tree, nodes: list[Node]) -> None:
    nodes[-1].cells[0].stamp = -1


def cell_of_the_wrong_size(tree: Tree, nodes: list[Node]) -> None:
    slots = nodes[-1].cells[0].device
    assert slots is not None
    nodes[-1].cells[0].device = slots + slots


def books_that_differ_from_the_tree(tree: Tree, nodes: list[Node]) -> None:
    (ledger,) = tree.by_name["full"].devices
    ledger.evictable -= 1
    ledger.pinned += 1


def host_books_that_differ_from_the_tree(tree: Tree, nodes: list[Node]) -> None:
    (ledger,) = tree.by_name["window"].hosts
    assert ledger is not None
    ledger.in_flight += 1


def slot_with_two_cells(tree: Tree, nodes: list[Node]) -> None:
    nodes[0].cells[0].device = (nodes[-1].cells[0].device or b"") * 2


def slot_that_is_free_and_in_the_tree(tree: Tree, nodes: list[Node]) -> None:
    tree.by_name["full"].device.allocator.free(nodes[-1].cells[0].device or b"")


def slot_that_leaked(tree: Tree, nodes: list[Node]) -> None:
    tree.by_name["full"].device.allocator.allocate(1)


def promise_that_cannot_be_kept(tree: Tree, nodes: list[Node]) -> None:
    (ledger,) = tree.by_name["window"].devices
    ledger.promised = ledger.headroom + 1


DAMAGES: list[tuple[str, Damage]] = [
    ("T1", moved_root),
    ("T1", root_below_a_node),
    ("T2", miscounted_nodes),
    ("T2", unlisted_child),
    ("T2", torn_key),
    ("T2", gap_between_parent_and_child),
    ("T3", node_that_holds_nothing),
    ("T4", narrower_data_where_the_base_is_gone),
    ("T4", host_data_where_the_base_is_gone),
    ("T5", child_on_device_below_a_gap),
    ("T5", child_on_host_below_a_gap),
    ("T6", negative_pins),
    ("T6", more_pins_than_the_base),
    ("T7", miscounted_live_data),
    ("T7", victim_that_is_no_candidate),
    ("T7", candidate_entered_twice),
    ("T7", flag_without_an_entry),
    ("T7", entry_ahead_of_its_stamp),
    ("T8", cell_of_the_wrong_size),
    ("T8", books_that_differ_from_the_tree),
    ("T8", host_books_that_differ_from_the_tree),
    ("T8", slot_that_leaked),
    ("T9", slot_with_two_cells),
    ("T9", slot_that_is_free_and_in_the_tree),
    ("A12", promise_that_cannot_be_kept),
]


@pytest.mark.parametrize(
    ("rule", "damage"), DAMAGES, ids=[f"{rule}-{damage.__name__}" for rule, damage in DAMAGES]
)
def test_a_damaged_tree_is_found_out_by_the_rule_it_breaks(rule: str, damage: Damage) -> None:
    tree, nodes = grown("full", "window")
    check_integrity(tree)
    damage(tree, nodes)
    with pytest.raises(IntegrityError) as caught:
        check_integrity(tree)
    assert caught.value.rule == rule
    assert str(caught.value).startswith(f"{rule}: ")
    assert "\n" not in str(caught.value)


def test_device_data_without_its_home_copy_breaks_t4() -> None:
    tree = open_tree("homed")
    node = insert(tree, [1, 2, 3, 4])
    check_integrity(tree)
    tree.drop(node, tree.by_name["homed"], Tier.HOST, "deleted")
    with pytest.raises(IntegrityError, match=r"T4: component 'homed'.*without its home copy"):
        check_integrity(tree)


def test_a_cell_that_waits_for_an_operation_its_node_lacks_breaks_t10() -> None:
    tree = open_tree("full")
    node = insert(tree, [1, 2, 3, 4])
    assert operations.begin_backup(tree, node, operations.needs_backup(tree, node)) is not None
    check_integrity(tree)
    node.operations = None
    with pytest.raises(IntegrityError, match="T10: component 'full'"):
        check_integrity(tree)


def test_a_slot_of_a_request_that_is_also_in_the_tree_breaks_t9() -> None:
    tree = open_tree("full")
    node = insert(tree, [1, 2])
    slots = node.cells[0].device
    assert slots is not None
    with pytest.raises(IntegrityError, match=r"T9: component 'full'.* and the request of 2 tokens"):
        check_integrity(tree, [SlotOwner("full", Tier.DEVICE, "the request of 2 tokens", slots)])


def test_a_slot_that_was_never_taken_and_has_an_owner_breaks_t9() -> None:
    tree = open_tree("full", capacity=10_000)
    slots = tree.by_name["full"].devices[0].take_private(1)
    assert slots is not None
    check_integrity(tree, [SlotOwner("full", Tier.DEVICE, "a request", slots)])
    last = array("i", [9_999]).tobytes()
    with pytest.raises(IntegrityError, match="slot 9999 belongs to a request and the free list"):
        check_integrity(tree, [SlotOwner("full", Tier.DEVICE, "a request", last)])


def test_a_private_slot_no_request_answers_for_breaks_t8() -> None:
    tree = open_tree("full")
    slots = tree.by_name["full"].devices[0].take_private(1)
    assert slots is not None
    check_integrity(tree, [SlotOwner("full", Tier.DEVICE, "a request", slots)])
    with pytest.raises(IntegrityError, match="T8: component 'full'"):
        check_integrity(tree)


def test_write_back_lets_host_data_hang_below_a_gap() -> None:
    """T5 on HOST holds unless the policy is write-back."""
    tree = open_tree("full", closed_host=False)
    insert(tree, [1, 2, 3, 4])
    leaf = insert(tree, [1, 2, 5, 6])
    top, below = path(leaf)
    operation = operations.begin_backup(tree, below, operations.needs_backup(tree, below))
    assert operation is not None
    assert operations.commit(tree, operation)
    assert top.cells[0].host is None
    check_integrity(tree)


def test_an_empty_pinned_node_is_not_dead() -> None:
    tree = open_tree("full")
    leaf = insert(tree, [1, 2, 3, 4])
    receipt = pinning.acquire(tree, leaf)
    assert receipt is not None
    check_integrity(tree)
    pinning.release(tree, receipt)
    eviction.evict_device(tree, tree.by_name["full"], 2)
    assert tree.n_nodes == 0
    check_integrity(tree)
