"""What a request computed becomes the tree's, pinned and backed up (I1 to I8)."""

from __future__ import annotations

from kvgraft.errors import LeaseError
from kvgraft.leasing import Leasing, Locks
from kvgraft.mirroring import Mirroring
from kvgraft.private import PrivateSlots
from kvgraft.request import Request
from kvgraft.transfers import Fence, Journal
from kvgraft.tree import inserting
from kvgraft.tree.tree import Tree

__all__ = ["Sharing"]


class Sharing:
    """Moves a request's private data into the tree."""

    def __init__(
        self,
        tree: Tree,
        slots: PrivateSlots,
        leasing: Leasing,
        mirroring: Mirroring,
        journal: Journal,
    ) -> None:
        self.tree = tree
        self.slots = slots
        self.leasing = leasing
        self.mirroring = mirroring
        self.journal = journal

    def insert(self, request: Request, page: int, fence: Fence | None) -> inserting.Inserted:
        """Offer private data up to boundary `page`; what the tree has already is freed (I1).

        `fence` is when that data exists. Whatever is copied to HOST later waits for the latest one:
        computation happens in order, so it covers all that was inserted before (B4).
        """
        self._check_key(request, page)
        if fence is not None:
            self.journal.fence = fence
        holdings = self.slots.take_out(request, page)
        result = inserting.insert(self.tree, request.receipt.anchor, request.key, page, holdings)
        request.key.trail = result.anchor
        for track, holding in zip(self.tree.tracks, holdings):
            for slots in holding.states.values():
                track.device.give_private(slots)
        return result

    def share(self, request: Request, page: int, fence: Fence | None, locks: Locks | None) -> None:
        """Insert up to boundary `page`, pin it there before the old pins go (I5), back it up.

        `locks` is what `Leasing.lock` answered for the boundary: components are asked what to pin
        first, so that nothing has changed if one fails (I8).
        """
        inserted = self.insert(request, page, fence)
        held = request.receipt
        self.leasing.repin(request, inserted.anchor, locks)
        try:
            self.mirroring.inserted(inserted.nodes, fence)
        finally:
            self.leasing.unpin(held)

    def _check_key(self, request: Request, page: int) -> None:
        """Refuse to publish data under tokens it was not computed for."""
        tokens = page * self.tree.page_size
        if request.key.edits != request.key_edits or tokens > request.key.n_tokens:
            raise LeaseError(
                f"request computed {request.computed} tokens but its key was cut or holds only "
                f"{request.key.n_tokens}; append decoded tokens first and cut keys after it ended"
            )
