"""The core with one defect each, and the rules a report may name for it.

A mutant replaces one function of the core by one with a plausible mistake. It is looked for among
the smallest set of components that shows it, written as the kinds of `references`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from kvgraft import Span, TokenKey, reach
from kvgraft.admission import promises
from kvgraft.admission.decision import default_demand
from kvgraft.requests.slots import PageSlots, StateSlots
from kvgraft.transfers import Journal, Ticket
from kvgraft.tree import eviction, matching, operations, pinning
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree
from kvgraft.types import Demand, Tier

__all__ = ["CORES", "CoreMutant", "recency_is_not_lifted"]

Patch = pytest.MonkeyPatch
Defect = Callable[[Patch], None]


class CoreMutant(NamedTuple):
    """A core with a defect.

    Attributes:
        kinds: the components it shows with: "everything", "window", "state"; and "share", where
            their pools share one budget, or "drawn", where tenants, budgets and terms are drawn.
        rules: rules a report may name; the first is the one meant.
        put_in: puts it in, until the patch is undone.
        examples: how many the search may take.
    """

    kinds: tuple[str, ...]
    rules: tuple[str, ...]
    put_in: Defect
    examples: int = 250


CORES: dict[str, CoreMutant] = {}


def mutant(kinds: str, *rules: str, examples: int = 250) -> Callable[[Defect], Defect]:
    """Register a defect."""

    def register(function: Defect) -> Defect:
        CORES[function.__name__] = CoreMutant(tuple(kinds.split("+")), rules, function, examples)
        return function

    return register


@mutant("everything+window", "M1", "L3", "L6", "M9", "R5")
def a_window_is_one_page_short(patch: Patch) -> None:
    init, width = reach.PageReach.__init__, reach.PageReach.width

    def short(self: reach.PageReach, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        if self.window_pages is not None:
            self.window_pages = max(1, self.window_pages - 1)

    def whole(self: reach.PageReach, boundary: int) -> int:
        """The grid of resume points and budgets go by the width, which is right."""
        most = self.reach.width(boundary, self.page_size)
        return most if self.window_pages is not None else width(self, boundary)

    patch.setattr(reach.PageReach, "__init__", short)
    patch.setattr(reach.PageReach, "width", whole)


@mutant("everything", "L1", "T6", "T8")
def a_release_unpins_one_page_too_few(patch: Patch) -> None:
    unpin = pinning._unpin_path

    def forgetful(tree: Any, component: Any, anchor: Node, span: Span) -> None:
        unpin(tree, component, anchor, Span(min(1, span.end), span.end) if anchor.start else span)

    patch.setattr(pinning, "_unpin_path", forgetful)


@mutant("everything", "T10", "T6", "T8", "L3", "L1")
def a_split_forgets_pins(patch: Patch) -> None:
    split = Tree.split

    def forgetful(self: Tree, node: Node, at: int) -> Node:
        upper = split(self, node, at)
        for component, cell in zip(self.components, upper.cells):
            if cell.device_pins and cell.device is not None:
                slots = len(cell.device) // 4
                component.devices[node.tenant].pinned -= slots
                component.devices[node.tenant].evictable += slots
            cell.device_pins = 0
        return upper

    patch.setattr(Tree, "split", forgetful)


@mutant("everything", "B3", "R5")
def a_transfer_is_published_before_it_ran(patch: Patch) -> None:
    poll, done = Journal.poll, Ticket.done

    def hasty(self: Journal) -> int:
        Ticket.done = property(lambda ticket: True)  # type: ignore[assignment]
        try:
            return poll(self)
        finally:
            Ticket.done = done  # type: ignore[method-assign]

    patch.setattr(Journal, "poll", hasty)


@mutant("window", "E1", "L5", "T6", "L3", "L1")
def an_eviction_ignores_pins(patch: Patch) -> None:
    choose = eviction.next_device_victim

    def careless(tree: Tree, component: Any) -> Any:
        for node in tree.nodes():
            cell = node.cells[component.index]
            if cell.device is not None and cell.device_pins:
                cell.device_pins = 0
                slots = len(cell.device) // 4
                component.devices[node.tenant].pinned -= slots
                component.devices[node.tenant].evictable += slots
                return eviction.Victim(node, component, [component], False)
        return choose(tree, component)

    patch.setattr(eviction, "next_device_victim", careless)


@mutant("everything", "E2")
def an_eviction_takes_one_victim_too_many(patch: Patch) -> None:
    evict = eviction.evict_device

    def greedy(tree: Tree, component: Any, n_slots: int) -> int:
        before = component.device.free
        evict(tree, component, n_slots)
        victim = eviction.next_device_victim(tree, component)
        if victim is not None:
            eviction.evict_victim(tree, victim)
        freed: int = component.device.free - before
        return freed

    patch.setattr(eviction, "evict_device", greedy)


@mutant("window", "T7", "I9")
def the_latest_used_goes_first(patch: Patch) -> None:
    choose = eviction.next_device_victim

    def backwards(tree: Tree, component: Any) -> Any:
        nodes = [node for node in tree.nodes() if tree.is_candidate(node, component, Tier.DEVICE)]
        if not nodes:
            return choose(tree, component)
        node = max(nodes, key=lambda each: each.cells[component.index].stamp)
        return eviction.Victim(node, component, [component], False)

    patch.setattr(eviction, "next_device_victim", backwards)


@mutant("everything", "M4", "R1", "R5")
def a_load_back_forgets_a_node(patch: Patch) -> None:
    plan = operations.load_plan

    def forgetful(receipt: Any, components: Any) -> list[list[Node]]:
        return [nodes[1:] for nodes in plan(receipt, components)]

    patch.setattr(operations, "load_plan", forgetful)


@mutant("everything+window", "A3", "A7", "A12")
def a_budget_forgets_the_load_back(patch: Patch) -> None:
    def forgetful(component: Any, query: Any) -> Demand:
        found = default_demand(component, query)
        return found._replace(now=found.now - query.host_slots)

    patch.setattr(promises, "default_demand", forgetful)


@mutant("window", "I9", "A7", "L6", "I3")
def pages_behind_the_window_are_kept(patch: Patch) -> None:
    patch.setattr(PageSlots, "left_behind", lambda self, request, page: 0)


@mutant("state", "M8")
def a_state_is_shared_instead_of_copied(patch: Patch) -> None:
    patch.setattr(StateSlots, "copy", lambda self, component, source, target: None)


@mutant("everything+window", "M1", "M3")
def a_match_ignores_gaps(patch: Patch) -> None:
    patch.setattr(matching, "_first_gap", lambda *given, **named: None)


@mutant("everything", "T11", "M1")
def namespaces_share_a_tree(patch: Patch) -> None:
    init = TokenKey.__init__
    patch.setattr(TokenKey, "__init__", lambda self, tokens=(), namespace=None: init(self, tokens))


@mutant("everything", "B1", "T5")
def a_backup_is_published_without_its_parent(patch: Patch) -> None:
    patch.setattr(operations, "parent_on_host", lambda *given, **named: True)


@mutant("everything", "T5", "T4", "B1", examples=1000)
def a_transfer_is_published_where_the_data_it_depends_on_is_missing(patch: Patch) -> None:
    patch.setattr(operations, "holds_up", lambda *given, **named: True)


def recency_is_not_lifted(patch: Patch) -> None:
    """T7, too seldom to be looked for at random; see `tests/model/test_mutation_sanity.py`."""

    def forgetful(tree: Tree, node: Node, parent: Node) -> None:
        if parent.parent is not None:
            tree.queue_candidates(parent)

    patch.setattr(eviction, "lift_recency", forgetful)
