"""Which data is evicted, in which order, and what goes along (E1, E3, E6, I9, T7).

Victims are compared with a list of its own, drawn up from the tree's cells when room is made, and
not with the queues of candidates.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from kvgraft.errors import ContractViolation
from kvgraft.tree.node import Node
from kvgraft.tree.track import Track
from kvgraft.tree.tree import Tree

if TYPE_CHECKING:
    from kvgraft.tree.ledger import Ledger

__all__ = ["Order"]

NODES_A_LOOK = 1024
"""Nodes for which room is looked at one time in so many: what it costs per call is bounded."""

_Entry = tuple[int, int, int, Node]


class Order:
    """Looks at victims while room is made in one pool."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._track: Track | None = None
        self._on_device = True
        self._exact = True
        self._queue: list[_Entry] = []
        self._held: dict[int, list[bool]] = {}
        self._pinned: set[int] = set()
        self._above: list[Node] = []
        self._leaving: Node | None = None
        self._lifted: tuple[Node, Node, list[int]] | None = None
        self._calls = 0
        self._everything_home = any(track.home_is_host for track in tree.tracks)

    @property
    def watching(self) -> bool:
        """Whether the next victim is looked at."""
        return self._track is not None

    def held(self, node: Node) -> list[bool]:
        """Per component, whether a node had data when room began to be made."""
        return self._held.get(id(node), [])

    def begin(self, track: Track, *, on_device: bool, exact: bool) -> None:
        """Room is being made in a pool of `track`.

        Args:
            track: whose pool is short.
            on_device: on which tier.
            exact: whether each victim is evicted where it is chosen; else only the first one's
                place in line is looked at.
        """
        self._calls += 1
        self._track = self._lifted = None
        if self._everything_home or self._calls % (1 + self.tree.n_nodes // NODES_A_LOOK):
            return
        self._track, self._on_device, self._exact = track, on_device, exact
        self._above = []
        self._held = {}
        self._pinned = set()
        self._queue = []
        for node in self.tree.nodes():
            if any(self._pins(node, each) for each in self.tree.tracks):
                self._pinned.add(id(node))
            self._held[id(node)] = [
                (cell.device if on_device else cell.host) is not None for cell in node.cells
            ]
            if self._is_legal(node, track):
                self._queue.append((node.cells[track.index].stamp, node.end, node.ident, node))
        heapify(self._queue)

    def end(self, ledger: Ledger, target: int) -> None:
        """Room was made, or nothing was left to take (E6)."""
        track, self._track = self._track, None
        self._check_lifted()
        if track is None or not self._exact or ledger.free >= target:
            return
        self._track = track
        left = self._next()
        self._track = None
        if left is not None:
            raise ContractViolation(
                "E6",
                track.name,
                f"making room for {target} slots ended with {ledger.free} free and "
                f"{left[3]!r} left to take",
            )

    def take(self, node: Node, tracks: list[Track] | None, *, on_device: bool) -> None:
        """A victim: `tracks` lose their data; None where that shows only later."""
        track = self._track
        if track is None or on_device is not self._on_device:
            return
        was = self._held.get(id(node))
        if was is None or not was[track.index]:
            self._track = track if self._exact else None
            return  # what made way for another pool's victim
        for each in tracks or (track,):
            if self._pins(node, each):
                raise ContractViolation(
                    "E1", each.name, f"{node!r} is evicted with {self._pins(node, each)} pins"
                )
        self._leaving = node
        self._check_turn(track, node)
        self._leaving = None
        if tracks is not None:
            self._check_along(track, node, was, tracks)
        self._check_lifted()
        if node.parent is not None:
            self._lifted = (node, node.parent, [cell.stamp for cell in node.cells])
        self._above.append(node)
        if not self._exact:
            self._track = None

    def went(self, node: Node) -> None:
        """Data of a node went along with a victim above it."""
        if self._track is not None:
            self._above.append(node)

    # -- inside

    def _check_lifted(self) -> None:
        """A use of a node was a use of its prefix: the parent of a victim inherits it (T7)."""
        if self._lifted is None:
            return
        node, parent, stamps = self._lifted
        self._lifted = None
        if parent.parent is None:
            return
        for track in self.tree.everything:
            used, above = stamps[track.index], parent.cells[track.index].stamp
            if above < used:
                raise ContractViolation(
                    "T7",
                    track.name,
                    f"{node!r}, used at {used}, was evicted and {parent!r} above it counts as used "
                    f"at {above}",
                )

    def _has(self, node: Node, track: Track) -> bool:
        if node is self._leaving:  # its cells are empty by now
            return self._held[id(node)][track.index]
        cell = node.cells[track.index]
        return (cell.device if self._on_device else cell.host) is not None

    def _pins(self, node: Node, track: Track) -> int:
        cell = node.cells[track.index]
        return cell.device_pins if self._on_device else cell.host_pins

    def _leads_on(self, node: Node) -> bool:
        """Whether a node below has data on the tier."""
        stack = list(node.each_child())
        while stack:
            below = stack.pop()
            if any(self._has(below, track) for track in self.tree.tracks):
                return True
            stack.extend(below.each_child())
        return False

    def _is_legal(self, node: Node, track: Track) -> bool:
        """Whether evicting `track` on `node` is allowed and can be done (E1, T5, L5)."""
        if not self._has(node, track) or self._pins(node, track):
            return False
        at_leaf = None
        if track.is_everything:
            at_leaf = not self._leads_on(node)
            if not at_leaf:
                return False
        taken = [each for each in self.tree.tracks if self._has(node, each)]
        if at_leaf is None:
            taken = [each for each in taken if each.index in track.narrower]
        return not any(self._pins(node, each) for each in taken)

    def _next(self) -> _Entry | None:
        """The least recently used of those that may go."""
        track = self._track
        assert track is not None
        while self._above:
            node = self._above.pop()
            parent = node.parent
            if parent is not None and parent.parent is not None and self._is_legal(parent, track):
                stamp = parent.cells[track.index].stamp
                heappush(self._queue, (stamp, parent.end, parent.ident, parent))
        while self._queue:
            stamp, _, _, node = self._queue[0]
            if node.parent is None or not self._is_legal(node, track):
                heappop(self._queue)
                continue
            if node.cells[track.index].stamp != stamp:
                heappop(self._queue)
                stamp = node.cells[track.index].stamp
                heappush(self._queue, (stamp, node.end, node.ident, node))
                continue
            return self._queue[0]
        return None

    def _check_turn(self, track: Track, node: Node) -> None:
        """It was used no later than any other that could have gone (T7)."""
        cell = node.cells[track.index]
        first = self._next()
        if first is not None and first[0] < cell.stamp:
            if first[0] < 0 and self._on_device:
                raise ContractViolation(
                    "I9",
                    track.name,
                    f"{node!r}, which is {'used' if cell.stamp >= 0 else 'left behind later'}, is "
                    f"evicted before {first[3]!r}, left behind {cell.stamp - first[0]} earlier",
                )
            raise ContractViolation(
                "T7",
                track.name,
                f"{node!r}, used at {cell.stamp}, is evicted from "
                f"{'DEVICE' if self._on_device else 'HOST'} before {first[3]!r}, used at "
                f"{first[0]}",
            )

    def _check_along(self, track: Track, node: Node, was: list[bool], tracks: list[Track]) -> None:
        """At a leaf everything goes, elsewhere what the component contains (E3)."""
        held = {each.index for each in self.tree.tracks if was[each.index]}
        everything = not self._leads_on(node) and not any(
            self._pins(node, self.tree.tracks[index]) for index in held
        )
        wanted = held if everything else held & set(track.narrower)
        gone = {each.index for each in tracks}
        if gone != wanted and id(node) not in self._pinned:
            names = [each.name for each in self.tree.tracks]
            raise ContractViolation(
                "E3",
                track.name,
                f"{node!r} {'is a leaf' if everything else 'leads on'} and loses "
                f"{[names[index] for index in sorted(gone)]}, not "
                f"{[names[index] for index in sorted(wanted)]}",
            )
