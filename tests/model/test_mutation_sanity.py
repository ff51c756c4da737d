"""The state machine notices defects: each is put into the core and must be found.

A mutant replaces one function of the core by one with a plausible mistake. Shrinking is off and the
examples are the same each time, so what is tested is whether the checks bite, and how soon.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvgraft import TokenKey, reach
from kvgraft.admission import budget
from kvgraft.errors import KvgraftError
from kvgraft.private import PrivateSlots
from kvgraft.transfers import Journal, Ticket
from kvgraft.tree import eviction, matching, operations, pinning
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree
from kvgraft.types import Demand, Span, Tier

from .driver import Driver
from .machine import machine_for
from .setups import SETUPS, Sizes

pytestmark = pytest.mark.long

FOUND = (AssertionError, KvgraftError)
SEARCH = settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=250,
    stateful_step_count=50,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)

Patch = pytest.MonkeyPatch
MUTANTS: dict[str, tuple[str, Callable[[Patch], None]]] = {}


def mutant(setup: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register a defect and the component set it is looked for in."""

    def register(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS[function.__name__] = (setup, function)
        return function

    return register


@mutant("full+swa")
def a_window_is_one_page_short(patch: Patch) -> None:
    spans = reach.PageReach.spans

    def short(self: reach.PageReach, boundary: int) -> tuple[Span, ...]:
        found = spans(self, boundary)
        if self.window_pages is None or not found or found[0].start + 1 >= found[0].end:
            return found
        return (Span(found[0].start + 1, found[0].end),)

    patch.setattr(reach.PageReach, "spans", short)


@mutant("full+swa")
def a_release_unpins_one_page_too_few(patch: Patch) -> None:
    unpin = pinning._unpin

    def forgetful(tree: Any, track: Any, anchor: Node, segment: tuple[Span, ...]) -> None:
        low = max(0, anchor.start) if track.is_everything else None
        if low:
            segment = tuple(Span(min(1, span.end), span.end) for span in segment)
        unpin(tree, track, anchor, segment)

    patch.setattr(pinning, "_unpin", forgetful)


@mutant("full")
def a_split_forgets_pins(patch: Patch) -> None:
    split = Tree.split

    def forgetful(self: Tree, node: Node, at: int) -> Node:
        upper = split(self, node, at)
        for track, cell in zip(self.tracks, upper.cells):
            if cell.device_pins and cell.device is not None:
                slots = len(cell.device) // 4
                track.device.pinned -= slots
                track.device.evictable += slots
            cell.device_pins = 0
        return upper

    patch.setattr(Tree, "split", forgetful)


@mutant("full")
def a_transfer_is_published_before_it_ran(patch: Patch) -> None:
    poll, done = Journal.poll, Ticket.done

    def hasty(self: Journal) -> int:
        Ticket.done = property(lambda ticket: True)  # type: ignore[assignment]
        try:
            return poll(self)
        finally:
            Ticket.done = done  # type: ignore[method-assign]

    patch.setattr(Journal, "poll", hasty)


@mutant("swa")
def an_eviction_ignores_pins(patch: Patch) -> None:
    choose = eviction.next_device_victim

    def careless(tree: Tree, track: Any) -> Any:
        for node in tree.nodes():
            cell = node.cells[track.index]
            if cell.device is not None and cell.device_pins:
                cell.device_pins = 0
                slots = len(cell.device) // 4
                track.device.pinned -= slots
                track.device.evictable += slots
                return eviction.Victim(node, track, [track], False)
        return choose(tree, track)

    patch.setattr(eviction, "next_device_victim", careless)


@mutant("full")
def an_eviction_takes_one_victim_too_many(patch: Patch) -> None:
    evict = eviction.evict_device

    def greedy(tree: Tree, track: Any, n_slots: int) -> int:
        before = track.device.free
        evict(tree, track, n_slots)
        victim = eviction.next_device_victim(tree, track)
        if victim is not None:
            eviction.evict_victim(tree, victim)
        freed: int = track.device.free - before
        return freed

    patch.setattr(eviction, "evict_device", greedy)


@mutant("swa")
def the_latest_used_goes_first(patch: Patch) -> None:
    choose = eviction.next_device_victim

    def backwards(tree: Tree, track: Any) -> Any:
        nodes = [node for node in tree.nodes() if tree.is_device_candidate(node, track)]
        if not nodes:
            return choose(tree, track)
        node = max(nodes, key=lambda each: each.cells[track.index].stamp)
        return eviction.Victim(node, track, [track], False)

    patch.setattr(eviction, "next_device_victim", backwards)


@mutant("full")
def a_load_back_forgets_a_node(patch: Patch) -> None:
    plan = operations.load_plan

    def forgetful(receipt: Any, tracks: Any) -> list[list[Node]]:
        return [nodes[1:] for nodes in plan(receipt, tracks)]

    patch.setattr(operations, "load_plan", forgetful)


@mutant("swa")
def a_budget_forgets_the_load_back(patch: Patch) -> None:
    demand = budget.default_demand

    def forgetful(track: Any, query: Any) -> Demand:
        found = demand(track, query)
        return found._replace(now=found.now - query.host_slots)

    patch.setattr(budget, "default_demand", forgetful)


@mutant("swa")
def pages_behind_the_window_are_kept(patch: Patch) -> None:
    patch.setattr(PrivateSlots, "give_back_behind", lambda self, request, page: None)


@mutant("mamba")
def a_state_is_shared_instead_of_copied(patch: Patch) -> None:
    patch.setattr(PrivateSlots, "_copy", lambda self, track, source, target: None)


@mutant("full+swa")
def a_match_ignores_gaps(patch: Patch) -> None:
    patch.setattr(matching, "_first_gap", lambda *given, **named: -1)


@mutant("full")
def namespaces_share_a_tree(patch: Patch) -> None:
    init = TokenKey.__init__
    patch.setattr(TokenKey, "__init__", lambda self, tokens=(), namespace=None: init(self, tokens))


@mutant("full")
def a_backup_is_published_without_its_parent(patch: Patch) -> None:
    patch.setattr(operations, "_parent_on_host", lambda tree, node: True)


@mutant("full+mamba")
def a_node_is_backed_up_in_part(patch: Patch) -> None:
    patch.setattr(operations, "_holds_up", lambda *given, **named: True)


def use_a_prefix_through_its_continuation() -> None:
    """Evict where a page was last used only as the prefix of a longer match.

    Random calls get there too seldom: whoever is older must have been pinned in between.
    """
    driver = Driver(SETUPS["full"], Sizes(page_size=1, device=12))

    def serve(*tokens: int) -> None:
        live = driver.begin(None, tokens, 0, None)
        assert driver.admit(live).admitted
        driver.load_back(live)
        driver.prefill(live, None)
        driver.finish(live)
        driver.drain()

    serve(1, 1)
    serve(1, 1, 2, 2)
    serve(2, 2, 2)
    pinned = driver.begin(None, (2, 2, 2, 1), 0, None)
    driver.abort(driver.begin(None, (1, 1, 2, 2, 1), 0, None))
    (full,) = driver.model.components
    driver.evict(full, 1, Tier.DEVICE)
    driver.abort(pinned)
    driver.evict(full, 1, Tier.DEVICE)
    driver.close()


def test_a_use_of_a_node_is_a_use_of_its_prefix() -> None:
    use_a_prefix_through_its_continuation()


def test_recency_that_is_not_lifted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(tree: Tree, node: Node, parent: Node) -> None:
        if parent.parent is not None:
            tree.queue_candidates(parent)

    monkeypatch.setattr(eviction, "lift_recency", forgetful)
    with pytest.raises(AssertionError, match="least recent False"):
        use_a_prefix_through_its_continuation()


@pytest.mark.parametrize("name", MUTANTS)
def test_the_state_machine_finds_the_defect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setup, put_in = MUTANTS[name]
    put_in(monkeypatch)
    with pytest.raises(FOUND):
        run_state_machine_as_test(machine_for(SETUPS[setup]), settings=SEARCH)
