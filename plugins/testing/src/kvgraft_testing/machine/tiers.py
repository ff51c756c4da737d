"""One tier of two snapshots, as eviction there sees it."""

from __future__ import annotations

from collections.abc import Callable

from kvgraft_testing.machine.brute_force import BruteForce, Prefix
from kvgraft_testing.machine.judging import Judge
from kvgraft_testing.machine.observing import NodeView, Snapshot

__all__ = ["TierChange", "cut_nodes", "vanished"]


def cut_nodes(
    nodes: list[NodeView],
    ends: set[Prefix],
    keep: Callable[[NodeView], bool] = lambda view: False,
) -> list[NodeView]:
    """Nodes cut at the ends of nodes after the operation, except those to `keep` whole."""
    cut: list[NodeView] = []
    position: list[int] = []
    for view in nodes:
        parent = position[view.parent] if view.parent >= 0 else -1
        here = set() if keep(view) else ends
        start = 0
        for end, page in enumerate(view.pages, 1):
            if page in here or end == len(view.pages):
                cut.append(NodeView(view.pages[start:end], parent))
                parent, start = len(cut) - 1, end
        position.append(parent)
    return cut


def vanished(view: NodeView, before: Snapshot, after: Snapshot) -> bool:
    """Whether all data of a node is gone or moved."""
    return not any(
        page in there and there[page] == now.get(page)
        for name, held in before.held.items()
        for there, now in (
            (held.device, after.held[name].device),
            (held.host, after.held[name].host),
        )
        for page in view.pages
    )


class TierChange:
    """One tier of two snapshots, as eviction there sees it.

    Attributes:
        model, before, after, tier: as given.
        parts: the components by name.
        lost: per component, pages that left the tier.
    """

    def __init__(self, model: BruteForce, before: Snapshot, after: Snapshot, tier: str) -> None:
        self.model, self.before, self.after, self.tier = model, before, after, tier
        self.parts = {each.name: each for each in model.components}
        self.lost = {
            name: set(self._cells(before, name)) - set(self._cells(after, name))
            for name in self.parts
        }

    def _cells(self, snapshot: Snapshot, name: str) -> dict[Prefix, tuple[int, ...]]:
        held = snapshot.held[name]
        return held.device if self.tier == "device" else held.host

    def cells_of(self, view: NodeView, name: str) -> tuple[Prefix, ...]:
        """The pages of a component's cell on a node."""
        return view.pages[-1:] if self.parts[name].is_state else view.pages

    def n_slots(self, view: NodeView, name: str) -> int:
        """Slots of a component's cell on a node."""
        parts = self.parts[name]
        return 1 if parts.is_state else len(view.pages) * parts.slots_per_page

    def losers(self, view: NodeView, judge: Judge) -> list[str]:
        """Components that lost their cell on a node of the first snapshot."""
        losers = []
        for name, lost in self.lost.items():
            gone = [page in lost for page in self.cells_of(view, name)]
            if any(gone):
                if not all(gone):
                    judge.fail("E3", name, f"lost part of a node on {self.tier}: {view.pages[-1]}")
                losers.append(name)
        return losers

    def holders(self, snapshot: Snapshot, view: NodeView) -> list[str]:
        """Components with a cell on the node."""
        return [
            name
            for name in self.parts
            if self.cells_of(view, name)[-1] in self._cells(snapshot, name)
        ]

    def remade(self, name: str, view: NodeView) -> bool:
        """Whether the cell left and came back within the operation, or may have.

        On HOST it may have if it left DEVICE: demoted data may get its old slots again.
        """
        page = self.cells_of(view, name)[-1]
        before, after = self.before.held[name], self.after.held[name]
        if self.tier == "host" and page in before.device and page not in after.device:
            return True
        return self._cells(self.before, name).get(page) != self._cells(self.after, name).get(page)

    def live_below(self, stays: Callable[[str, Prefix], bool]) -> set[Prefix]:
        """Last pages of first-snapshot nodes above a held cell that `stays`."""
        live: set[Prefix] = set()
        nodes = self.before.nodes
        for view in reversed(nodes):
            held = any(
                page in self._cells(self.before, name) and stays(name, page)
                for name in self.parts
                for page in self.cells_of(view, name)[-1:]
            )
            if (held or view.pages[-1] in live) and view.parent >= 0:
                live.add(nodes[view.parent].pages[-1])
        return live

    def live_before(self) -> set[Prefix]:
        """Nodes above held cells."""
        return self.live_below(lambda name, page: True)

    def live_throughout(self) -> set[Prefix]:
        """Nodes above cells that were held all the time: never leaves meanwhile."""
        return self.live_below(lambda name, page: not self.remade(name, NodeView((page,), -1)))

    def pinned(self, snapshot: Snapshot, name: str, view: NodeView) -> bool:
        """Whether the component's cell on the node is held."""
        held, last = snapshot.held[name], view.pages[-1]
        if self.tier == "device":
            return last in held.device_pinned
        return last in held.host_pinned or (
            self.parts[name].home_is_host and last in held.device_pinned
        )

    def candidates(self, name: str) -> list[NodeView]:
        """Nodes that were victims of the component throughout the operation and remain."""
        live = self.live_before()
        return [
            view
            for view in self.before.nodes
            if self.cells_of(view, name)[-1] in self._cells(self.before, name)
            and not self.remade(name, view)
            and not self.pinned(self.before, name, view)
            and not self.pinned(self.after, name, view)
            and not (self.parts[name].is_prefix_closed and view.pages[-1] in live)
        ]
