"""More cores with one defect each: leases, load-backs, admission, left-behind data."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvgraft.admission import promises
from kvgraft.admission.decision import Decision, Outcome, default_demand
from kvgraft.requests.components import Account, RequestComponent
from kvgraft.requests.eviction import Evictor
from kvgraft.requests.leases import Leases
from kvgraft.requests.slots import StateSlots
from kvgraft.serving import Serving
from kvgraft.tree import eviction, inserting, matching, operations, pinning
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.eviction import Victim
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree
from kvgraft.types import Direction, Tier
from kvgraft_observe import explaining

from .cores import Patch, mutant

__all__: list[str] = []

# -- the field's failures


@mutant("everything+window", "L3", "L1", "T6", "M7")
def a_pin_stops_at_an_evicted_node(patch: Patch) -> None:
    """F2: the pin of a window ends where data is missing."""
    pin = pinning._pin_span

    def short(tree: Tree, component: Any, anchor: Node, span: Any, stamp: int) -> int:
        if component.is_prefix_closed:
            return pin(tree, component, anchor, span, stamp)
        node, low = anchor, span.start
        while node.parent is not None and node.end > span.start:
            if node.cells[component.index].device is None:
                low = max(low, node.end)
                break
            node = node.parent
        return pin(tree, component, anchor, span._replace(start=min(low, span.end)), stamp)

    patch.setattr(pinning, "_pin_span", short)


@mutant("everything+window", "M1", "M3", "R1", "R5", "M4")
def a_load_back_starts_from_the_anchor_of_the_base_alone(patch: Patch) -> None:
    """F2: the anchor is where the base has data, even if the window has none."""
    deepest = matching._deepest

    def base_only(
        components: Sequence[TreeComponent], node: Node, boundary: int, *, device_only: bool
    ) -> Any:
        if device_only:
            return deepest(components, node, boundary, device_only=True)
        while node.parent is not None and node.start >= boundary:
            node = node.parent
        return node, boundary

    patch.setattr(matching, "_deepest", base_only)


@mutant("everything+window", "E2", "R3")
def room_is_made_in_a_pool_that_was_not_short(patch: Patch) -> None:
    """F3: the window's shortage evicts the base."""
    ensure_free = Evictor.ensure_free

    def wide(self: Evictor, component: Any, tier: Tier, n_slots: int, tenant: int | None) -> bool:
        base = self.tree.components[0]
        if tier is Tier.DEVICE and component is not base and n_slots > component.device.free:
            ensure_free(self, base, tier, base.device.free + 1, tenant)
        return ensure_free(self, component, tier, n_slots, tenant)

    patch.setattr(Evictor, "ensure_free", wide)


@mutant("everything+window", "A5")
def a_chunk_is_forced_although_it_does_not_fit(patch: Patch) -> None:
    """F4: a continuing chunk ignores the pools' headroom."""
    patch.setattr(promises.Budget, "fitting_chunk", lambda self, request, tokens: tokens)


# -- matches and leases


@mutant("everything", "M2", "A12")
def a_match_leaves_no_token_to_compute(patch: Patch) -> None:
    """A page more may take what others are promised (A12), where the right boundary does not."""
    patch.setattr(Serving, "_limit", lambda self, request: request.prompt // self.tree.page_size)


@mutant("everything+state", "M3", "M1", "R1", "L3", "M7", "K6")
def the_device_anchor_counts_data_on_host(patch: Patch) -> None:
    deepest = matching._deepest
    patch.setattr(
        matching,
        "_deepest",
        lambda components, node, boundary, device_only: deepest(
            components, node, boundary, device_only=False
        ),
    )


@mutant("everything", "M4", "A7", "A12")
def host_hits_are_counted_in_tokens(patch: Patch) -> None:
    lease = Serving._lease

    def miscounted(self: Serving, request: Any, limit: int) -> None:
        lease(self, request, limit)
        for part in request.components:
            part.host_slots *= 3

    patch.setattr(Serving, "_lease", miscounted)


@mutant("everything", "M9")
def an_explanation_forgets_the_host(patch: Patch) -> None:
    explain = explaining.explain

    def shallow(tree: Tree, key: Any, limit: int) -> Any:
        found = explain(tree, key, limit)
        return found._replace(anchor=found.device_anchor)

    patch.setattr(explaining, "explain", shallow)


@mutant("state", "R8", "M1")
def a_load_that_brings_a_state_is_skipped(patch: Patch) -> None:
    recompute = Leases._recompute
    patch.setattr(
        Leases,
        "_recompute",
        lambda self, found, n: found.device_anchor < found.anchor or recompute(self, found, n),
    )


@mutant("everything", "L2", "L1", "T6", "T8", "I8", "T3")
def an_ended_request_keeps_its_pins(patch: Patch) -> None:
    patch.setattr(pinning, "release", lambda tree, receipt: None)


# -- data that requests leave behind


@mutant("everything", "I1", "T9", "T8")
def a_duplicate_is_freed_twice(patch: Patch) -> None:
    adopt = inserting._adopt

    def twice(tree: Tree, node: Node, component: Any, holding: Any) -> bool:
        adopted = adopt(tree, node, component, holding)
        if not adopted and holding.runs and node.cells[component.index].device is not None:
            run = holding.runs[0]
            if run.first < node.end and run.end > node.start:
                part = run.cut(max(run.first, node.start), min(run.end, node.end))
                component.device.allocator.free(part.device)
        return adopted

    patch.setattr(inserting, "_adopt", twice)


@mutant("everything", "I2", "I4")
def an_insert_replaces_slots_of_the_tree(patch: Patch) -> None:
    adopt = inserting._adopt

    def replacing(tree: Tree, node: Node, component: Any, holding: Any) -> bool:
        cell = node.cells[component.index]
        if cell.device is not None and holding.runs and not component.is_state:
            run = holding.runs[0]
            if run.first <= node.start and run.end >= node.end:
                part = run.cut(node.start, node.end)
                cell.device, old = part.device, cell.device
                component.device.give_private(old)
                return False
        return adopt(tree, node, component, holding)

    patch.setattr(inserting, "_adopt", replacing)


@mutant("state", "I6", "I7")
def a_finished_request_donates_no_state(patch: Patch) -> None:
    patch.setattr(StateSlots, "offered_page", lambda self, request, part: 0)


@mutant("state", "I7", "B3", "M8", "R5", "I1", "I6")
def a_state_is_captured_a_page_too_late(patch: Patch) -> None:
    offer = StateSlots._offer

    def late(self: Any, part: Any, page: int, slot: bytes) -> None:
        offer(self, part, max(1, page - 1), slot)

    patch.setattr(StateSlots, "_offer", late)


@mutant("everything", "H8", "T8", "T9")
def an_aborted_request_keeps_its_slots(patch: Patch) -> None:
    def forgetful(self: Any) -> None:
        self.runs = []

    patch.setattr(RequestComponent, "give_back", forgetful)


# -- eviction


@mutant("everything+window", "E3", "T4")
def a_cascade_takes_a_wider_component(patch: Patch) -> None:
    choose = eviction.next_device_victim

    def wide(tree: Tree, component: Any) -> Victim | None:
        victim = choose(tree, component)
        if victim is None or victim.at_leaf:
            return victim
        held = [
            other
            for other in tree.components
            if (cell := victim.node.cells[other.index]).device is not None and not cell.device_pins
        ]
        victim.components[:] = held
        return victim

    patch.setattr(eviction, "next_device_victim", wide)
    patch.setattr("kvgraft.requests.eviction.eviction.next_device_victim", wide)


@mutant("window", "T7", "T12")
def recency_comes_from_a_clock_of_seconds(patch: Patch) -> None:
    acquire, start = pinning.acquire, int(time.time())

    def clocked(tree: Tree, anchor: Node, **named: Any) -> Any:
        tree.clock = (int(time.time()) - start) // 3600
        return acquire(tree, anchor, **named)

    patch.setattr(pinning, "acquire", clocked)


@mutant("everything", "E6", "E2")
def an_eviction_claims_to_have_freed_every_slot_asked_for(patch: Patch) -> None:
    patch.setattr(Evictor, "evict", lambda self, component, n_slots, tier: n_slots)


@mutant("everything", "E5", "T7", "T8", "T6", "E1", "B3", "L5", "M7", "L3", "R1", "R5")
def host_eviction_takes_the_source_of_a_load_back(patch: Patch) -> None:
    """A node that is pinned becomes a victim, and nothing enters it as a candidate (T7)."""
    candidate = Tree.is_candidate

    def careless(self: Tree, node: Node, component: Any, tier: Tier) -> bool:
        cell = node.cells[component.index]
        if tier is Tier.DEVICE:
            return candidate(self, node, component, tier)
        pins, cell.host_pins = cell.host_pins, 0
        try:
            return candidate(self, node, component, tier)
        finally:
            cell.host_pins = pins

    patch.setattr(Tree, "is_candidate", careless)
    patch.setattr(eviction, "_host_idle", lambda node, component: True)


# -- transfers


@mutant("everything", "R5", "B3", "M7")
def a_failed_load_back_is_published(patch: Patch) -> None:
    def published(tree: Tree, operation: Any) -> None:
        operations.commit(tree, operation)

    patch.setattr("kvgraft.transfers.journal.operations.abort", published)


@mutant("everything", "R6", "M4", "T8", "T9", "R1")
def two_requests_load_the_same_pages(patch: Patch) -> None:
    def greedy(receipt: Any, components: Sequence[Any]) -> list[list[Node]]:
        if receipt.host_from is None:
            return [[] for _ in components]
        return [
            [
                node
                for node in operations.segment_nodes(component, receipt)
                if node.cells[component.index].device is None
                and node.cells[component.index].host is not None
            ]
            for component in components
        ]

    patch.setattr(operations, "load_plan", greedy)


@mutant("everything", "R2", "T8", "R5", "I8")
def an_aborted_load_back_keeps_its_slots(patch: Patch) -> None:
    cancel = Ledger.cancel

    def keeps(self: Ledger, slots: bytes) -> None:
        cancel(self, slots[:-4])

    patch.setattr(Ledger, "cancel", keeps)


@mutant("everything", "R5", "R1", "B3")
def a_load_back_writes_its_pages_in_reverse(patch: Patch) -> None:
    from kvgraft.transfers import journal, pair_planes

    def reverse(component: Any, query: Any) -> Any:
        copies = pair_planes(component, query)
        if query.direction is Direction.LOAD_BACK:
            copies = [copy._replace(source_rows=copy.source_rows.flip(0)) for copy in copies]
        return copies

    patch.setattr(journal, "pair_planes", reverse)


# -- admission


@mutant("everything", "A7", "A12")
def everybody_is_admitted(patch: Patch) -> None:
    patch.setattr(promises.Budget, "_shortages", lambda self, request: ())


@mutant("everything", "A8")
def a_request_that_must_wait_never_fits(patch: Patch) -> None:
    patch.setattr(promises.Budget, "_nevers", lambda self, request, shortages: shortages)


@mutant("everything", "A9", "A12")
def a_rejection_keeps_a_promise(patch: Patch) -> None:
    decide = promises.Budget.decide

    def leaky(self: Any, request: Any) -> Decision:
        decision = decide(self, request)
        if decision.outcome is Outcome.DEFERRED:
            self.tree.components[0].device.promised += 1
        return decision

    patch.setattr(promises.Budget, "decide", leaky)


@mutant("everything", "A12", "T8")
def an_ended_request_keeps_its_promise(patch: Patch) -> None:
    patch.setattr(Account, "close", lambda self: None)


@mutant("state", "A10", "A7", "M8", "I12")
def a_states_budget_forgets_the_copy(patch: Patch) -> None:
    def forgetful(component: Any, query: Any) -> Any:
        found = default_demand(component, query)
        return (
            found._replace(now=query.host_slots, later=query.checkpoints)
            if component.is_state
            else found
        )

    patch.setattr(promises, "default_demand", forgetful)


@mutant("everything", "A6", "A8")
def a_chunk_shrinks_although_it_only_had_to_wait(patch: Patch) -> None:
    decide = promises.Budget.decide

    def hasty(self: Any, request: Any) -> Decision:
        decision = decide(self, request)
        if decision.outcome is Outcome.DEFERRED and request.chunk > self.tree.page_size:
            request.chunk = 1
            return decide(self, request)
        return decision

    patch.setattr(promises.Budget, "decide", hasty)
