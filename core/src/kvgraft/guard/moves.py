"""What is handed to the transfer engine, and when it is published (B1, B2, B3, L8, R2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvgraft.errors import ContractViolation
from kvgraft.guard.hooks import HookGuard
from kvgraft.slots import SLOT_BYTES
from kvgraft.transfers import Fence, Journal, Transfer
from kvgraft.tree.node import Node
from kvgraft.tree.operations import Operation
from kvgraft.types import Direction

if TYPE_CHECKING:
    from kvgraft.cache import Cache

__all__ = ["Moves"]


class Moves:
    """Watches a cache's transfers.

    Args:
        cache: the cache.
        hooks: the wrappers around its components' hooks.
        is_looking: whether the operation that runs is looked at.
    """

    def __init__(
        self, cache: Cache, hooks: Sequence[HookGuard], is_looking: Callable[[], bool]
    ) -> None:
        self.tree = cache.tree
        self.hooks = hooks
        self.is_looking = is_looking
        self._journal = cache.journal
        setattr(cache.journal, "submit", self.submit)  # noqa: B010 - on this instance alone
        setattr(cache.journal, "_end", self.end)  # noqa: B010

    def submit(
        self, operation: Operation, direction: Direction, fence: Fence | None = None
    ) -> Transfer:
        """`Journal.submit`, once the operation is sound."""
        if self.is_looking():
            self._check_pins(operation, direction)
            if operation.to_host and operation.receipt is not None:
                self._check_backup(operation.nodes[0])
        for hook in self.hooks:
            hook.moves_begin()
        try:
            return Journal.submit(self._journal, operation, direction, fence)
        except BaseException:
            for hook in self.hooks:
                hook.moves_failed()
            raise

    def end(self, transfer: Transfer) -> None:
        """`Journal._end`, if the copies have ended; then what it published."""
        operation = transfer.operation
        if not self.is_looking() or operation is None:
            Journal._end(self._journal, transfer)
            return
        if not transfer.ticket.done:
            raise ContractViolation(
                "B3",
                None,
                f"a {transfer.direction.value} is acknowledged with "
                f"{transfer.ticket.layers_done} of {len(transfer.ticket.layers)} layers copied",
            )
        nodes = list(operation.nodes) if operation.to_host else []
        Journal._end(self._journal, transfer)
        for node in nodes:
            self._check_published(node)

    def _check_pins(self, operation: Operation, direction: Direction) -> None:
        """It holds pins of its own, or the slots themselves (L8)."""
        leaving = {track.index for track, _ in operation.detached}
        for pair in operation.pairs:
            if len(pair.device) != len(pair.host):
                raise ContractViolation(
                    "B3",
                    pair.track.name,
                    f"a {direction.value} pairs {len(pair.device) // SLOT_BYTES} DEVICE slots with "
                    f"{len(pair.host) // SLOT_BYTES} on HOST",
                )
            if operation.receipt is None and pair.track.index not in leaving:
                raise ContractViolation(
                    "L8",
                    pair.track.name,
                    f"a {direction.value} holds neither pins nor its "
                    f"{len(pair.device) // SLOT_BYTES} DEVICE slots",
                )
        if operation.receipt is not None and operation.receipt.released:
            raise ContractViolation(
                "L8",
                None,
                f"a {direction.value} of {len(operation.nodes)} nodes holds a released receipt",
            )

    def _check_backup(self, node: Node) -> None:
        """No component's data stays behind (B2)."""
        for track in self.tree.tracks:
            cell = node.cells[track.index]
            mirrored = track.host is not None and cell.device is not None
            if mirrored and cell.host is None and cell.incoming is None:
                raise ContractViolation(
                    "B2", track.name, f"{node!r} is backed up without this component's data"
                )

    def _check_published(self, node: Node) -> None:
        """What was backed up does not hang below a gap (B1)."""
        parent = node.parent
        if parent is None or parent.parent is None or not self.tree.prefix_closed_host:
            return
        for track in self.tree.everything:
            above, cell = parent.cells[track.index], node.cells[track.index]
            if cell.host is not None and above.host is None:
                raise ContractViolation(
                    "B1", track.name, f"{node!r} is on HOST and {parent!r} above it is not"
                )
