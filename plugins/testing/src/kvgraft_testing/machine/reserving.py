"""The clean reserve under write-back: copied ahead, in order, and no more than its share (B6, E4).

The model notes when a node was entered in a component's reserve and the last use of its data then.
Unless it is used again it leaves before all data outside of the reserve.
"""

from __future__ import annotations

from kvgraft_testing.machine.brute_force import BruteForce, Gone, ModelComponent, Prefix
from kvgraft_testing.machine.judging import Judge
from kvgraft_testing.machine.observing import NodeView, Snapshot
from kvgraft_testing.machine.recency import Recency
from kvgraft_testing.machine.tiers import TierChange

__all__ = ["SHARE", "Reserving"]

SHARE = 3
"""One in this many DEVICE slots is copied ahead here, so that small pools have a reserve, too."""


class Reserving:
    """The clean reserves of one cache, as the model saw them filled."""

    def __init__(self, model: BruteForce, recency: Recency, judge: Judge) -> None:
        self.model, self.recency, self.judge = model, recency, judge

    def note(self, before: Snapshot, after: Snapshot) -> None:
        """Forget data that left the reserve; note the place of new data."""
        for component in self.model.components:
            name = component.name
            reserved, now = self.recency.reserved[name], after.held[name].reserved
            used = self.recency.used[name]
            for page in reserved.keys() - now.keys():
                del reserved[page]
            for page in now.keys() - before.held[name].reserved.keys():
                reserved[page] = used.get(page, 0)

    def check_filled(self, before: Snapshot, after: Snapshot, *, failed: bool) -> int:
        """The cells that a step took into the reserve are next, copied, and not too many.

        Returns how many cells that were.

        Args:
            before: the cache before the step.
            after: and behind it.
            failed: whether a copy could not begin, or failed.
        """
        found = 0
        for component in self.model.components:
            held, was = after.held[component.name], before.held[component.name].reserved
            entered = [
                view
                for view in after.nodes
                if view.pages[-1] in held.reserved and view.pages[-1] not in was
            ]
            found += len(entered)
            if not entered:
                continue
            self._check_order(component, before, after, entered)
            self._check_size(component, after, held.reserved)
            for view in entered if not failed else ():
                self._check_copied(component, after, view)
        return found

    def _check_order(
        self, component: ModelComponent, before: Snapshot, after: Snapshot, entered: list[NodeView]
    ) -> None:
        """Of the data that might have left before it, none was to leave before (T7)."""
        name, recency = component.name, self.recency
        tier = TierChange(self.model, before, after, "device")
        held = after.held[name]
        for view in entered:
            page = view.pages[-1]
            first = recency.earliest(component, "device", tier.cells_of(view, name))
            for other in tier.candidates(name):
                last = other.pages[-1]
                if last in held.reserved or last not in held.device:
                    continue
                cells = tier.cells_of(other, name)
                rank = recency.last(component, "device", cells)
                may_be_left = recency.earliest(component, "device", cells)[-1] < 0
                if not may_be_left and rank < first:
                    self.judge.fail(
                        "T7", name, f"{page} is taken into the clean reserve before {last}"
                    )

    def _check_size(
        self, component: ModelComponent, after: Snapshot, reserved: dict[Prefix, int]
    ) -> None:
        """Without the node that was entered last it is below its share (B6)."""
        name, per_page = component.name, 1 if component.is_state else component.slots_per_page
        capacity = after.books[name, "device"].capacity
        last = max(reserved.values())
        n_slots = sum(place != last for place in reserved.values()) * per_page
        if n_slots >= -(-capacity // SHARE):
            said = f"{n_slots} of {capacity} slots are in the clean reserve, and one node more"
            self.judge.fail("B6", name, said)

    def _check_copied(self, component: ModelComponent, after: Snapshot, view: NodeView) -> None:
        """With room on HOST, and pins that break no promise, it is on HOST or on its way (E4)."""
        page, name = view.pages[-1], component.name
        held = after.held[name]
        gone = page not in held.device or isinstance(page[0], Gone)
        if gone or page in held.host or page in held.backing_up:
            return
        length = self.model.page_of(page) + 1
        for other in self.model.components:
            if page not in after.held[other.name].device:
                continue
            slots = 1 if other.is_state else length * other.slots_per_page
            host = after.books.get((other.name, "host"))
            if host is None or host.free < slots:
                return
            # a canonical copy on HOST stays there as long as a copy pins its component on DEVICE
            pinned = [after.books[other.name, "device"], *([host] if other.home_is_host else [])]
            if any(books.headroom < slots for books in pinned):
                return
        self.judge.fail("E4", name, f"{page} is in the clean reserve and nobody copies it to HOST")
