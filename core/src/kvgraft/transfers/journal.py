"""Transfers in flight: submitted, acknowledged in order, then committed or aborted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from operator import attrgetter

from kvgraft.errors import TransferError
from kvgraft.packages.dispatch import Mounted
from kvgraft.pools import SLOT_BYTES
from kvgraft.pools.component import PlaneCopy, pair_planes
from kvgraft.stats import TransferStats
from kvgraft.transfers.engine import Fence, Fences, Ticket, TransferEngine
from kvgraft.tree import operations
from kvgraft.tree.operations import Operation
from kvgraft.tree.tree import Tree
from kvgraft.types import Direction, TransferQuery


class Transfer:
    """One journaled transfer.

    Attributes:
        operation: the tree's reservation for it; None once it ended.
        ticket: the engine's progress.
        direction: which way it moves data.
        submitted_s: when it was handed to the engine, by `time.monotonic`.
        late: whether a wait for it timed out.
        failed: whether it ended without delivering (R5).
    """

    __slots__ = ("direction", "failed", "late", "operation", "queries", "submitted_s", "ticket")

    def __init__(
        self,
        operation: Operation,
        ticket: Ticket,
        direction: Direction,
        queries: list[tuple[Mounted, TransferQuery]],
    ) -> None:
        self.operation: Operation | None = operation
        self.ticket = ticket
        self.direction = direction
        self.queries = queries
        self.submitted_s = time.monotonic()
        self.late = self.failed = False

    @property
    def ended(self) -> bool:
        """Whether it was acknowledged to the tree, even if it failed."""
        return self.operation is None


class Counters:
    """Transfers of one direction since the cache was made; slots per component.

    Attributes:
        waits: how often a caller waited for some to end.
    """

    __slots__ = ("completed", "failed", "slots", "started", "waits")

    def __init__(self, names: Sequence[str]) -> None:
        self.started = self.completed = self.failed = self.waits = 0
        self.slots = dict.fromkeys(names, 0)


class Journal:
    """Submits operations to an engine and commits or aborts them in the tree (B3, R2).

    Acknowledgements of one direction are taken in the order of submission, so a child's backup is
    never published before its parent's (B1).

    Attributes:
        queues: transfers in flight, by direction, in the order of submission.
        counters: transfers so far, by direction.
    """

    def __init__(self, tree: Tree, mounted: Sequence[Mounted], engine: TransferEngine) -> None:
        self.tree = tree
        self.engine = engine
        self.fence: Fence | None = None
        """The point of the computation that copies to HOST wait for (B4)."""
        self._fences = Fences()
        self._mounted = mounted
        self.queues: dict[Direction, deque[Transfer]] = {
            Direction.BACKUP: deque(),
            Direction.LOAD_BACK: deque(),
        }
        names = [each.name for each in mounted]
        self.counters = {direction: Counters(names) for direction in self.queues}

    def set_fence(self, fence: Fence | None) -> None:
        """The engine named a point of its computation, unless it is None.

        All later copies to HOST wait for it, and for newer points named before (B4).
        """
        if fence is not None and fence is not self.fence:
            self._fences.name(fence)
            self.fence = self._fences.ahead

    def submit(
        self, operation: Operation, direction: Direction, fence: Fence | None = None
    ) -> Transfer:
        """Hand a reserved operation to the engine; aborts it if its copies cannot be built (I8)."""
        if fence is None and direction is Direction.BACKUP:
            fence = self.fence
        queries: list[tuple[Mounted, TransferQuery]] = []
        copies: list[PlaneCopy] = []
        counters = self.counters[direction]
        try:
            for pair in operation.pairs:
                mounted = self._mounted[pair.component]
                query = TransferQuery(direction, pair.device, pair.host)
                built = None
                if mounted.transfer_hooks is not None:
                    built = mounted.transfer_hooks.build(query)
                queries.append((mounted, query))
                copies += pair_planes(mounted.component, query) if built is None else built
            copies.sort(key=attrgetter("layer"))
            ticket = self.engine.submit(copies, fence)
        except BaseException:
            operations.abort(self.tree, operation)
            counters.failed += 1
            _notify_aborted(queries)
            raise
        for mounted, query in queries:
            counters.slots[mounted.name] += len(query.device_slots) // SLOT_BYTES
        counters.started += 1
        transfer = Transfer(operation, ticket, direction, queries)
        self.queues[direction].append(transfer)
        return transfer

    def poll(self) -> int:
        """Process finished transfers; returns how many ended. Never waits."""
        ended = 0
        for queue in self.queues.values():
            while queue and queue[0].ticket.done:
                self.acknowledge(queue.popleft())
                ended += 1
        return ended

    def drain(self, timeout_s: float) -> bool:
        """Wait for everything in flight, at most `timeout_s` seconds in all; whether it ended."""
        deadline = time.monotonic() + timeout_s
        for queue in self.queues.values():
            while queue and queue[0].ticket.wait(max(0.0, deadline - time.monotonic())):
                self.acknowledge(queue.popleft())
        return not self.n_in_flight

    def settle(self, transfers: Sequence[Transfer], timeout_s: float) -> None:
        """Wait for some transfers and those before them, at most `timeout_s` seconds in all.

        Only one call waits for copies that never end.
        """
        deadline = time.monotonic() + timeout_s
        for transfer in transfers:
            queue = self.queues[transfer.direction]
            while not transfer.ended and queue:
                first = queue[0]
                if first.late and not first.ticket.done:
                    break
                if not first.ticket.wait(max(0.0, deadline - time.monotonic())):
                    first.late = True
                    break
                self.acknowledge(queue.popleft())

    def is_stalled(self, direction: Direction) -> bool:
        """Whether a wait for the next transfer timed out, and it has not ended since."""
        queue = self.queues[direction]
        return bool(queue) and queue[0].late and not queue[0].ticket.done

    def n_overdue(self, timeout_s: float) -> int:
        """Transfers in flight that did not end within `timeout_s` seconds, the first in line."""
        due_s = time.monotonic() - timeout_s
        found = 0
        for queue in self.queues.values():
            for each in queue:
                if not each.late and each.submitted_s > due_s:
                    break
                found += not each.ticket.done
        return found

    def stats(self, direction: Direction) -> TransferStats:
        """A copy of the counts of one direction."""
        counters, in_flight = self.counters[direction], len(self.queues[direction])
        return TransferStats(
            counters.started,
            counters.completed,
            counters.failed,
            in_flight,
            dict(counters.slots),
            counters.waits,
        )

    @property
    def n_in_flight(self) -> int:
        """Transfers not acknowledged yet."""
        return sum(len(queue) for queue in self.queues.values())

    def operations(self) -> list[Operation]:
        """Operations in flight between DEVICE and HOST, for integrity checks."""
        transfers = [transfer for queue in self.queues.values() for transfer in queue]
        return [each.operation for each in transfers if each.operation is not None]

    def find(self, operation: Operation) -> Transfer:
        """The transfer that carries an operation."""
        for queue in self.queues.values():
            for transfer in queue:
                if transfer.operation is operation:
                    return transfer
        raise TransferError("an operation of the tree has no transfer; report this")

    def acknowledge(self, transfer: Transfer) -> None:
        """A transfer of its queue ended: commit it, or abort it if it failed (R2)."""
        operation, transfer.operation = transfer.operation, None
        assert operation is not None
        counters = self.counters[transfer.direction]
        if transfer.ticket.error is None and operations.commit(self.tree, operation):
            counters.completed += 1
            _notify_committed(transfer.queries)
            return
        if transfer.ticket.error is not None:
            operations.abort(self.tree, operation)
        transfer.failed = True
        counters.failed += 1
        _notify_aborted(transfer.queries)


def _notify_committed(queries: Sequence[tuple[Mounted, TransferQuery]]) -> None:
    """Call every component's commit hook, even if another's raises (I8)."""
    with ExitStack() as calls:
        for mounted, query in reversed(queries):
            if mounted.transfer_hooks is not None:
                calls.callback(mounted.transfer_hooks.commit, query)


def _notify_aborted(queries: Sequence[tuple[Mounted, TransferQuery]]) -> None:
    """Call every component's abort hook, even if another's raises (I8)."""
    with ExitStack() as calls:
        for mounted, query in reversed(queries):
            if mounted.transfer_hooks is not None:
                calls.callback(mounted.transfer_hooks.abort, query)
