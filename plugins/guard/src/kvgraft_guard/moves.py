"""Checks of copies handed to the transfer engine and published (B1, B2, B3, B4, L8, R2)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from kvgraft.config import WritePolicy
from kvgraft.errors import ContractViolation
from kvgraft.policies.policy import is_left_behind
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.pools.component import PlaneCopy
from kvgraft.transfers import Fence, Ticket, Transfer, TransferEngine
from kvgraft.transfers.engine import fences_of
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.node import CLEAN, Node
from kvgraft.tree.operations import Operation
from kvgraft.tree.pinning import Receipt
from kvgraft.types import Direction
from kvgraft_guard.hooks import HookGuard
from kvgraft_guard.integrity import check_transfers
from kvgraft_guard.watched import Watched

__all__ = ["Moves"]

Submit = Callable[[Operation, Direction, Fence | None], Transfer]

BACKS_UP = {
    WritePolicy.WRITE_THROUGH: frozenset({"checkpoint", "finish", "begin", "admit", "restart"}),
    WritePolicy.WRITE_THROUGH_SELECTIVE: frozenset({"begin", "admit", "restart"}),
    WritePolicy.WRITE_BACK: frozenset({"poll"}),
}
"""Operations in which data that stays on DEVICE is copied to HOST."""


class _SeenEngine:
    """Hands copies on, and remembers the point that they are to wait for."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self.fence: Fence | None = None

    def submit(self, copies: Sequence[PlaneCopy], fence: Fence | None = None) -> Ticket:
        self.fence = fence
        return self._engine.submit(copies, fence)

    def close(self) -> None:
        self._engine.close()


class Moves:
    """Watches a cache's transfers.

    Args:
        watched: the cache.
        hooks: the wrappers around its components' hooks.
        is_looking: whether the running operation is checked.
    """

    def __init__(
        self, watched: Watched, hooks: Sequence[HookGuard], is_looking: Callable[[], bool]
    ) -> None:
        cache = watched.cache
        self.watched = watched
        self.tree = cache.tree
        self.hooks = hooks
        self.is_looking = is_looking
        self._left: list[tuple[Node, TreeComponent, bool]] = []
        self._points: tuple[Fence, ...] = ()
        self._named: weakref.WeakSet[Fence] = weakref.WeakSet()

    def leaves(self, node: Node, component: TreeComponent) -> None:
        """A cell will lose its DEVICE slots: note whether HOST has its data, or gets it."""
        cell = node.cells[component.index]
        # Left behind and used by nobody since, it is not worth a copy (I9).
        self._left.append((node, component, cell.is_backed or is_left_behind(cell.stamp)))

    def submit(
        self,
        submit: Submit,
        operation: Operation,
        direction: Direction,
        fence: Fence | None,
    ) -> Transfer:
        """`Journal.submit`, once the operation is sound."""
        if self.is_looking():
            self._check_pins(operation, direction)
            check_transfers(self.tree, (), [operation])
            if operation.to_host:
                self._check_policy(operation)
                self._check_demoted(operation)
                self._check_hangs(operation)
            if operation.to_host and operation.receipt is not None:
                self._check_backup(operation.nodes[0])
        self._left.clear()
        for hook in self.hooks:
            hook.moves_begin()
        journal = self.watched.cache.journal
        engine = journal.engine
        journal.engine = seen = _SeenEngine(engine)
        try:
            transfer = submit(operation, direction, fence)
        except BaseException:
            for hook in self.hooks:
                hook.moves_failed()
            raise
        finally:
            journal.engine = engine
        self._check_fence(direction, fence, seen.fence)
        if self.is_looking():
            self.watched.contents.submitted(transfer)
        return transfer

    def end(self, acknowledge: Callable[[Transfer], None], transfer: Transfer) -> None:
        """`Journal.acknowledge`, if the copies have ended; then check the published data."""
        operation = transfer.operation
        if not self.is_looking() or operation is None:
            self.watched.contents.forget(transfer)
            acknowledge(transfer)
            return
        if not transfer.ticket.done:
            raise ContractViolation(
                "B3",
                None,
                f"a {transfer.direction.value} is acknowledged with "
                f"{transfer.ticket.layers_done} of {len(transfer.ticket.layers)} layers copied",
            )
        self.watched.contents.ending(transfer)
        if operation.receipt is not None:
            check_transfers(self.tree, (), [operation])
        nodes = list(operation.nodes)
        arriving = [
            (node, component)
            for node in nodes
            for component, cell in zip(self.tree.components, node.cells)
            if cell.incoming is not None and cell.incoming.operation == id(operation)
        ]
        acknowledge(transfer)
        for node in nodes if operation.to_host else ():
            self._check_published(node)
        for node, component in () if operation.to_host or transfer.failed else arriving:
            if node.cells[component.index].device is None:
                raise ContractViolation(
                    "R5",
                    component.name,
                    f"a load-back of {len(nodes)} nodes ended and {node!r} is not on DEVICE",
                )

    # -- points of the computation

    @contextmanager
    def naming(self, fence: object) -> Iterator[None]:
        """An operation got a fence: its copies wait for that."""
        if fence is None or not callable(getattr(fence, "wait", None)):
            yield
            return
        self._name(cast("Fence", fence))
        try:
            yield
        except Exception:
            self._points = fences_of(self.watched.cache.journal.fence)  # it may be refused
            raise

    def _name(self, fence: Fence) -> None:
        """A new point covers those before it, one that is named again need not."""
        if any(each is fence for each in self._points):
            return
        try:
            known = fence in self._named
            self._named.add(fence)
        except TypeError:
            known = False
        self._points = (*self._points, fence) if known else (fence,)

    def _check_fence(self, direction: Direction, asked: Fence | None, given: Fence | None) -> None:
        """The engine is to copy behind the computation of the data (B4)."""
        wanted = fences_of(asked)
        if direction is Direction.BACKUP and asked is None:
            wanted = self._points
        told = fences_of(given)
        missing = [each for each in wanted if all(each is not point for point in told)]
        if missing:
            raise ContractViolation(
                "B4",
                None,
                f"a {direction.value} waits for {len(told)} points of the computation, and not for "
                f"{len(missing)} of the {len(wanted)} named ones that its data may need",
            )

    def _check_pins(self, operation: Operation, direction: Direction) -> None:
        """It holds pins of its own, or the slots themselves (L8)."""
        leaving = {index for index, _ in operation.detached}
        for pair in operation.pairs:
            name = self.tree.components[pair.component].name
            if len(pair.device) != len(pair.host):
                raise ContractViolation(
                    "B3",
                    name,
                    f"a {direction.value} pairs {len(pair.device) // SLOT_BYTES} DEVICE slots with "
                    f"{len(pair.host) // SLOT_BYTES} on HOST",
                )
            if operation.receipt is None and pair.component not in leaving:
                raise ContractViolation(
                    "L8",
                    name,
                    f"a {direction.value} holds neither pins nor its "
                    f"{len(pair.device) // SLOT_BYTES} DEVICE slots",
                )
        if operation.receipt is not None and not operation.to_host:
            self._check_sources(operation, operation.receipt)
        if operation.receipt is not None and operation.receipt.released:
            raise ContractViolation(
                "L8",
                None,
                f"a {direction.value} of {len(operation.nodes)} nodes holds a released receipt",
            )

    def _check_sources(self, operation: Operation, receipt: Receipt) -> None:
        """A load-back pins the HOST data that it reads, whatever becomes of its request (L8)."""
        first = min(node.end for node in operation.nodes)
        if receipt.host_from is None or receipt.host_from >= first:
            raise ContractViolation(
                "L8",
                None,
                f"a load-back of {len(operation.nodes)} nodes, the first up to page {first}, pins "
                f"HOST from page {receipt.host_from} on",
            )

    def _check_policy(self, operation: Operation) -> None:
        """Data is copied when the policy says: shared, hit, evicted or the next to be (B6)."""
        name, leaves = self.watched.operation, operation.receipt is None
        if self.watched.write_back:
            node = operation.nodes[0]
            if leaves or (name in BACKS_UP[self.watched.policy] and self._next_to_go(node)):
                return
        elif not leaves and name in BACKS_UP[self.watched.policy]:
            return
        raise ContractViolation(
            "B6",
            None,
            f"{operation.n_slots()} slots are backed up in {name}, "
            f"{'as they leave DEVICE' if leaves else 'where they stay'}, under "
            f"{self.watched.policy.value}",
        )

    def _next_to_go(self, node: Node) -> bool:
        """Whether a node is in the clean reserve that is being filled."""
        filled = self.watched.filled
        return filled is not None and bool(node.cells[filled.index].queued & CLEAN)

    def _check_demoted(self, operation: Operation) -> None:
        """Data that leaves DEVICE with a victim is copied first, windows and states too (E4)."""
        copied = {pair.component for pair in operation.pairs}
        for node, component, on_host in self._left:
            if (
                operation.receipt is None
                and node in operation.nodes
                and component.host is not None
                and not on_host
                and component.index not in copied
            ):
                raise ContractViolation(
                    "E4",
                    component.name,
                    f"{node!r} leaves DEVICE with a copy of {len(copied)} components, and without "
                    "one of this component's data",
                )

    def _check_hangs(self, operation: Operation) -> None:
        """The node above has a copy on HOST, or one on its way (B1)."""
        parent = operation.nodes[0].parent
        if parent is None or parent.parent is None or not self.tree.prefix_closed_host:
            return
        for component in self.tree.prefix_closed:
            cell = parent.cells[component.index]
            coming = cell.incoming is not None and cell.incoming.to_host
            if component.host is not None and cell.host is None and not coming:
                raise ContractViolation(
                    "B1",
                    component.name,
                    f"{operation.nodes[0]!r} is backed up before {parent!r} above it",
                )

    def _check_backup(self, node: Node) -> None:
        """No component's data stays behind that leaves with the copied data (B2).

        A copy for one pool's reserve is of what that pool's shortage takes; other data of the node
        may have arrived since it was copied for another pool, or have found no room on HOST then.
        """
        filled = self.watched.filled
        for component in self.tree.components:
            if filled is not None and component.index not in filled.narrower:
                continue
            cell = node.cells[component.index]
            mirrored = component.host is not None and cell.device is not None
            mirrored = mirrored and not is_left_behind(cell.stamp)
            if mirrored and cell.host is None and cell.incoming is None:
                raise ContractViolation(
                    "B2", component.name, f"{node!r} is backed up without this component's data"
                )

    def _check_published(self, node: Node) -> None:
        """Backed-up data does not lie below a gap (B1)."""
        parent = node.parent
        if parent is None or parent.parent is None or not self.tree.prefix_closed_host:
            return
        for component in self.tree.prefix_closed:
            above, cell = parent.cells[component.index], node.cells[component.index]
            if cell.host is not None and above.host is None:
                raise ContractViolation(
                    "B1", component.name, f"{node!r} is on HOST and {parent!r} above it is not"
                )
