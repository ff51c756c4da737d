"""Load-backs: copies from HOST that a request needs before it can run (R1 to R7)."""

from __future__ import annotations

from kvgraft.compiled import mypyc_attr
from kvgraft.errors import ContractViolation
from kvgraft.requests.eviction import Evictor
from kvgraft.requests.leases import Leases
from kvgraft.requests.request import Request
from kvgraft.transfers import Fence, Journal, Transfer
from kvgraft.tree import operations
from kvgraft.tree.tree import Tree
from kvgraft.types import Direction

__all__ = ["LoadBacks"]


@mypyc_attr(allow_interpreted_subclasses=True)
class LoadBacks:
    """Starts the transfers of admitted requests, and shares those in flight already."""

    def __init__(self, tree: Tree, journal: Journal, evictor: Evictor, leases: Leases) -> None:
        self.tree = tree
        self.journal = journal
        self.evictor = evictor
        self.leases = leases

    def start(self, request: Request, fence: Fence | None) -> list[Transfer]:
        """Reserve DEVICE slots for the missing part of the request's reach and start copying it.

        Room is made per pool, for its own shortfall (R3); all slots are reserved or none (R4). An
        error leaves the request as it was, so that it may ask again (I8).
        """
        components = self.tree.components
        waits = [
            self.journal.find(operation)
            for operation in operations.waits_for(request.receipt, components)
        ]
        n_shared = len(waits)
        plan = operations.load_plan(request.receipt, components)
        if any(plan):
            for component, nodes in zip(components, plan):
                if nodes:
                    n_slots = sum(component.n_slots(node) for node in nodes)
                    self.evictor.make_room(component, n_slots, request.root.tenant, n_slots)
            operation = operations.begin_load_back(self.tree, request.receipt)
            if operation is None:
                n_nodes = sum([len(each) for each in plan])
                raise ContractViolation(
                    "A7",
                    None,
                    f"load-back of an admitted request found no room for {n_nodes} nodes",
                )
            waits.append(self.journal.submit(operation, Direction.LOAD_BACK, fence))
        for part in request.parts:
            part.account.loaded()
        self.leases.shared_loads += n_shared
        request.waits, request.load_started = waits, True
        return waits
