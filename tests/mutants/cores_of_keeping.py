"""Cores with one defect each in what keeps data beside the policy: clearing, pins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvgraft.cache import Cache
from kvgraft.requests.leases import Leases
from kvgraft.requests.request import Request
from kvgraft.tree import pinning
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree
from kvgraft.types import Tier
from kvgraft_density.policy import DensityOrder
from kvgraft_observe.events import Recorder
from kvgraft_retention import clearing
from kvgraft_retention.clearing import Sweeper
from kvgraft_retention.pins import Pin, Pins

from .cores import Patch, mutant
from .cores_held_out import edited

__all__: list[str] = []


@mutant("everything", "M1", "B3", "T3", "E2", "V2")
def cleared_data_is_found_still(patch: Patch) -> None:
    """The namespace has data again that nothing was inserted or copied for (B3)."""
    detach_roots = Tree.detach_roots

    def keep(self: Tree, namespaces: Sequence[object]) -> list[Node]:
        roots = detach_roots(self, namespaces)
        for root in roots:
            if root in self.cleared and root.children is not None:
                self.roots[self.cleared.pop(root)] = root
        return roots

    patch.setattr(Tree, "detach_roots", keep)


@mutant("everything", "E1", "L1", "M7", "T8")
def clearing_takes_held_data(patch: Patch) -> None:
    def drop(tree: Tree, node: Node) -> None:
        for component in tree.components:
            cell = node.cells[component.index]
            if cell.device is not None:
                if cell.device_pins:
                    component.devices[node.tenant].pinned -= len(cell.device) // 4
                    component.devices[node.tenant].evictable += len(cell.device) // 4
                    cell.device_pins = 0
                tree.drop(node, component, Tier.DEVICE, "cleared")
            if tree.is_candidate(node, component, Tier.HOST):
                tree.drop(node, component, Tier.HOST, "cleared")
        tree.prune(node)

    patch.setattr(clearing, "_drop", drop)


@mutant("everything", "T3")
def cleared_data_stays_when_it_is_let_go_of(patch: Patch) -> None:
    for name in ("resume", "finish"):
        sweep = getattr(Sweeper, name)

        def unless_others(self: Sweeper, sweep: Any = sweep) -> None:
            if not self.tree.roots:
                sweep(self)

        patch.setattr(Sweeper, name, unless_others)


@mutant("everything", "V1", "V2")
def readers_are_not_notified_of_clearing(patch: Patch) -> None:
    patch.setattr(Recorder, "cleared", lambda self, roots: None)


@mutant("everything", "M1", "I6", "V2")
def a_cleared_request_shares_its_data(patch: Patch) -> None:
    finish = Cache.finish

    def share(self: Cache, request: Request, *given: object) -> int:
        cleared, self.tree.cleared = self.tree.cleared, {}
        try:
            return finish(self, request, *given)  # type: ignore[arg-type]
        finally:
            self.tree.cleared = cleared

    patch.setattr(Cache, "finish", share)


@mutant("everything", "L3", "M1", "A9", "T11")
def a_waiting_request_keeps_a_cleared_match(patch: Patch) -> None:
    admit = Cache.admit

    def old(self: Cache, request: Request) -> object:
        cleared, self.tree.cleared = self.tree.cleared, {}
        try:
            return admit(self, request)
        finally:
            self.tree.cleared = cleared

    patch.setattr(Cache, "admit", old)


# -- pins


@mutant("everything", "K6")
def pins_go_beyond_their_bound(patch: Patch) -> None:
    patch.setattr(Pins, "bound", lambda self, ledger: ledger.capacity)


@mutant("everything", "A12", "A7", "K6")
def a_pin_takes_promised_slots(patch: Patch) -> None:
    pin = Leases._acquire

    def force(self: Leases, anchor: Any, host_from: int | None, *, touch: bool = True) -> Any:
        if touch:
            return pin(self, anchor, host_from)
        return pinning.acquire(self.tree, anchor, host_from=host_from, touch=False, enforce=False)

    patch.setattr(Leases, "_acquire", force)


@mutant("everything", "K6", "L1", "L2")
def an_eviction_takes_pinned_data(patch: Patch) -> None:
    evict = Cache.evict

    def careless(self: Cache, *given: Any) -> int:
        for pin in self.pins:
            if not pin.receipt.released:
                pinning.release(self.tree, pin.receipt)
        return evict(self, *given)

    patch.setattr(Cache, "evict", careless)


@mutant("everything+window", "L1", "T8", "K6", "M1")
def an_unpin_leaves_a_pin(patch: Patch) -> None:
    end = Pins._end

    def partly(self: Pins, pin: Pin) -> None:
        pin.receipt.segments[0] = ()
        end(self, pin)

    patch.setattr(Pins, "_end", partly)


@mutant("everything", "K6")
def a_pin_stops_a_page_early(patch: Patch) -> None:
    keep = Leases.keep
    patch.setattr(Leases, "keep", lambda self, key, limit: keep(self, key, max(0, limit - 1)))


@mutant("everything+window+drawn", "K2", "E6", "T7")
def density_forgets_candidates_whose_cost_it_did_not_ask_for(patch: Patch) -> None:
    edited(DensityOrder.pop, "self._ask(cost)", "pass")(patch)
