"""What a request computed becomes the tree's, pinned and backed up (I1 to I8)."""

from __future__ import annotations

from kvgraft.leasing import Leasing
from kvgraft.mirroring import Mirroring
from kvgraft.private import PrivateSlots
from kvgraft.request import Request
from kvgraft.transfers import Fence
from kvgraft.tree import inserting
from kvgraft.tree.tree import Tree

__all__ = ["Sharing"]


class Sharing:
    """Moves a request's private data into the tree."""

    def __init__(
        self, tree: Tree, slots: PrivateSlots, leasing: Leasing, mirroring: Mirroring
    ) -> None:
        self.tree = tree
        self.slots = slots
        self.leasing = leasing
        self.mirroring = mirroring

    def insert(self, request: Request, page: int) -> inserting.Inserted:
        """Offer private data up to boundary `page`; what the tree has already is freed (I1)."""
        holdings = self.slots.take_out(request, page)
        result = inserting.insert(self.tree, request.receipt.anchor, request.key, page, holdings)
        request.key.trail = result.anchor
        for track, holding in zip(self.tree.tracks, holdings):
            for slots in holding.states.values():
                track.device.give_private(slots)
        return result

    def share(self, request: Request, page: int, fence: Fence | None) -> None:
        """Insert up to boundary `page`, pin it there before the old pins go (I5), back it up.

        Components are asked what to pin first: if one fails, nothing has changed (I8).
        """
        locks = self.leasing.lock(page)
        inserted = self.insert(request, page)
        held = request.receipt
        self.leasing.repin(request, inserted.anchor, locks)
        try:
            self.mirroring.inserted(inserted.nodes, fence)
        finally:
            self.leasing.unpin(held)
