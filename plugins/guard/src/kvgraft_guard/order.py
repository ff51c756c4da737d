"""Which data is evicted, in which order, and with which other data (E1, E3, E6, I9, T7).

Victims are compared with the guard's own list, made from the tree's cells at each eviction, and not
with the queues of candidates.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING

from kvgraft.errors import ContractViolation
from kvgraft.policies.policy import is_left_behind, use_of
from kvgraft.policies.recency import RecencyQueue
from kvgraft.tree.component import EXPIRED, Candidates, TreeComponent
from kvgraft.tree.node import CLEAN, DOUBLE, Node
from kvgraft.tree.tree import Tree
from kvgraft.types import Tier
from kvgraft_observe.explaining import ranked

if TYPE_CHECKING:
    from kvgraft.tree.ledger import PoolBooks

__all__ = ["Order"]

NODES_A_LOOK = 1024
"""With more nodes only a share of the evictions is checked, to bound the cost."""

_Rank = tuple[float, float, int]
"""Level (priority, expired), the policy's score, and the stamp: the lowest leaves first."""

_Entry = tuple[_Rank, int, int, Node]


class Order:
    """Checks victims while room is made in one pool."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._component: TreeComponent | None = None
        self._on_device = True
        self._exact = True
        self._queue: list[_Entry] = []
        self._clean: dict[int, tuple[int, int]] = {}
        self._doubles: set[int] = set()
        self._held: dict[int, list[bool]] = {}
        self._pinned: set[int] = set()
        self._above: list[Node] = []
        self._leaving: Node | None = None
        self._lifted: tuple[Node, Node, list[tuple[TreeComponent, int]]] | None = None
        self._calls = 0
        self._everything_home = any(component.home_is_host for component in tree.components)

    @property
    def watching(self) -> bool:
        """Whether the next victim is checked."""
        return self._component is not None

    def held(self, node: Node) -> list[bool]:
        """Per component, whether a node had data when the eviction began."""
        return self._held.get(id(node), [])

    def begin(self, component: TreeComponent, *, on_device: bool, exact: bool) -> None:
        """Room is being made in a pool of `component`.

        Args:
            component: whose pool is short.
            on_device: on which tier.
            exact: whether each victim is evicted when it is chosen; otherwise only the rank of the
                first is checked.
        """
        self._calls += 1
        self._component = self._lifted = None
        if self._everything_home or self._calls % (1 + self.tree.n_nodes // NODES_A_LOOK):
            return
        self._component, self._on_device, self._exact = component, on_device, exact
        self._above = []
        self._held = {}
        self._pinned = set()
        self._queue = []
        self._clean, self._doubles = {}, set()
        if on_device:
            entries = enumerate(component.clean)
            self._clean = {id(node): (stamp, place) for place, (stamp, node) in entries}
        for node in self.tree.nodes():
            if any(self._pins(node, each) for each in self.tree.components):
                self._pinned.add(id(node))
            self._held[id(node)] = [
                (cell.device if on_device else cell.host) is not None for cell in node.cells
            ]
            if self._is_double(node, component):
                self._doubles.add(id(node))
            if self._is_legal(node, component):
                self._queue.append((self._rank(node, component), node.end, node.ident, node))
        heapify(self._queue)

    def next_in_line(self, component: TreeComponent) -> _Rank | None:
        """The rank of the next victim behind the clean reserve; None if it is not checked.

        Evict-first data leaves before it, and needs no copy.
        """
        order = component.device.queue
        self.begin(component, on_device=True, exact=False)
        if self._component is None:
            return None
        self._queue = [
            each for each in self._queue if each[0][2] >= 0 and id(each[3]) not in self._clean
        ]
        heapify(self._queue)
        first = self._next()
        self._component = None
        if first is None or (
            order.score(first[0][2]) is None and type(order.first_order) is not RecencyQueue
        ):
            return None
        return first[0]

    def rank(self, component: TreeComponent, stamp: int) -> _Rank:
        """The policy's rank of data on DEVICE with a stamp."""
        self._on_device = True
        return self._ranked(component, stamp)

    def end(self, ledger: PoolBooks, target: int) -> None:
        """Room was made, or no victim was left (E6)."""
        component, self._component = self._component, None
        self._check_lifted()
        if component is None or not self._exact or ledger.free >= target:
            return
        self._component = component
        left = self._next()
        self._component = None
        if left is not None:
            raise ContractViolation(
                "E6",
                component.name,
                f"making room for {target} slots ended with {ledger.free} free and "
                f"{left[3]!r} left to take",
            )

    def take(self, node: Node, components: list[TreeComponent] | None, *, on_device: bool) -> None:
        """A victim was chosen: `components` lose their data; None if that is known only later."""
        component = self._component
        if component is None or on_device is not self._on_device:
            return
        was = self._held.get(id(node))
        if was is None or not was[component.index]:
            self._component = component if self._exact else None
            return  # data that made way for another pool's victim
        for each in components or (component,):
            if self._pins(node, each):
                raise ContractViolation(
                    "E1", each.name, f"{node!r} is evicted with {self._pins(node, each)} pins"
                )
        self._leaving = node
        self._check_turn(component, node)
        self._leaving = None
        if components is not None:
            self._check_along(component, node, was, components)
        self._check_lifted()
        if node.parent is not None and id(node) not in self._doubles:
            self._lifted = (node, node.parent, self._inherited(node, node.parent))
        self._above.append(node)
        if not self._exact:
            self._component = None

    def went(self, node: Node) -> None:
        """Data of a node left along with a victim above it.

        While copies are waited for, it left because its own copy ended: the victim was chosen when
        the node above could not leave.
        """
        if self._component is not None and self._exact:
            self._above.append(node)

    # -- inside

    def _inherited(self, node: Node, parent: Node) -> list[tuple[TreeComponent, int]]:
        """The stamps of a victim that the node above inherits, unless its own is worth more."""
        found: list[tuple[TreeComponent, int]] = []
        for component in self.tree.prefix_closed if parent.parent is not None else ():
            used, own = (each.cells[component.index].stamp for each in (node, parent))
            if used > own and self.tree.lifetimes is None:
                order = component.device.queue
                score, least = (ranked(self.tree, order, each)[1] for each in (used, own))
                if score is not None and least is not None and score < least:
                    continue
            found.append((component, used))
        return found

    def _check_lifted(self) -> None:
        """A use of a node was a use of its prefix: the parent of a victim inherits it (T7)."""
        if self._lifted is None:
            return
        node, parent, inherited = self._lifted
        self._lifted = None
        for component, used in inherited:
            above = parent.cells[component.index].stamp
            if above < used:
                raise ContractViolation(
                    "T7",
                    component.name,
                    f"{node!r}, used at {used}, was evicted and {parent!r} above it counts as used "
                    f"at {above}",
                )

    def _has(self, node: Node, component: TreeComponent) -> bool:
        if node is self._leaving:  # its cells are empty by now
            return self._held[id(node)][component.index]
        cell = node.cells[component.index]
        return (cell.device if self._on_device else cell.host) is not None

    def _pins(self, node: Node, component: TreeComponent) -> int:
        cell = node.cells[component.index]
        return cell.device_pins if self._on_device else cell.host_pins

    def _leads_on(self, node: Node) -> bool:
        """Whether a node below has data on the tier."""
        stack = list(node.each_child())
        while stack:
            below = stack.pop()
            if any(self._has(below, component) for component in self.tree.components):
                return True
            stack.extend(below.each_child())
        return False

    def _is_legal(self, node: Node, component: TreeComponent) -> bool:
        """Whether evicting `component` on `node` is allowed and can be done (E1, T5, L5)."""
        if not self._has(node, component) or self._pins(node, component):
            return False
        if self._is_double(node, component):
            return True
        at_leaf = None
        if component.is_prefix_closed:
            at_leaf = not self._leads_on(node)
            if not at_leaf:
                return False
        taken = [each for each in self.tree.components if self._has(node, each)]
        if at_leaf is None:
            taken = [each for each in taken if each.index in component.narrower]
        return not any(self._pins(node, each) for each in taken)

    def _is_double(self, node: Node, component: TreeComponent) -> bool:
        """Whether HOST gives up the copy before data that it alone has (E5)."""
        cell = node.cells[component.index]
        offered = cell.queued & (CLEAN | DOUBLE) == DOUBLE
        return not self._on_device and offered and cell.device is not None

    def _order(self, component: TreeComponent) -> Candidates:
        return component.pool(Tier.DEVICE if self._on_device else Tier.HOST).queue

    def _rank(self, node: Node, component: TreeComponent) -> _Rank:
        """When a candidate is to leave: the clean reserve first, in the order of its entries."""
        stamp = node.cells[component.index].stamp
        if self._is_double(node, component):
            return -inf, 0.0, 0
        reserved, place = self._clean.get(id(node), (stamp + 1, 0))
        if reserved == stamp:
            return -inf, 0.0, place
        return self._last_if_announced(node, component, self._ranked(component, stamp))

    def _last_if_announced(self, node: Node, component: TreeComponent, rank: _Rank) -> _Rank:
        """Announced data leaves behind all other of its level, the last place first."""
        announced = getattr(self._order(component).first_order, "announced", None)
        places = () if announced is None else announced.places_of(component, node).values()
        place = min(places, default=None)
        return rank if place is None or rank[0] <= EXPIRED else (rank[0] + 0.5, -place, 0)

    def _ranked(self, component: TreeComponent, stamp: int) -> _Rank:
        """The rank of data with a stamp; what was left behind leaves before all other (I9)."""
        if is_left_behind(stamp):
            return -inf, 0.0, stamp
        level = self.tree.level(stamp)
        if level == EXPIRED:
            term = None if self.tree.lifetimes is None else self.tree.lifetimes.of(stamp)
            assert term is not None
            assert term.until_s is not None
            return level, term.until_s, stamp
        _, score = ranked(self.tree, self._order(component), stamp)
        return level, (0.0 if score is None else score), stamp

    def _next(self) -> _Entry | None:
        """The first of those that may go."""
        component = self._component
        assert component is not None
        while self._above:
            node = self._above.pop()
            parent = node.parent
            if (
                parent is not None
                and parent.parent is not None
                and self._is_legal(parent, component)
            ):
                rank = self._rank(parent, component)
                heappush(self._queue, (rank, parent.end, parent.ident, parent))
        while self._queue:
            rank, _, _, node = self._queue[0]
            if node.parent is None or not self._is_legal(node, component):
                heappop(self._queue)
                continue
            now = self._rank(node, component)
            if now != rank:
                heappop(self._queue)
                heappush(self._queue, (now, node.end, node.ident, node))
                continue
            return self._queue[0]
        return None

    def _check_turn(self, component: TreeComponent, node: Node) -> None:
        """No other that could have gone is of a lower rank by the policy's own score (T7).

        An order that gives no scores, and is no plain `RecencyQueue`, is looked at for data that
        was left behind alone (I9).
        """
        stamp = node.cells[component.index].stamp
        if id(node) in self._doubles and not self._on_device:
            return
        first = self._next()
        rank = self._last_if_announced(node, component, self._ranked(component, stamp))
        reserved, place = self._clean.get(id(node), (stamp + 1, 0))
        if reserved == stamp:
            rank = -inf, 0.0, place
        if first is None or first[0] >= rank:
            return
        level, score, other = first[0]
        order = self._order(component)
        scored = level == -inf or level != rank[0] or order.score(stamp) is not None
        if not scored and type(order.first_order) is not RecencyQueue:
            return
        if level == -inf and other >= 0:
            ahead = f"number {other} of the clean reserve" if self._on_device else "on DEVICE, too"
            raise ContractViolation(
                "T7",
                component.name,
                f"{node!r}, used at {use_of(stamp)}, is evicted before {first[3]!r}, {ahead}",
            )
        if other < 0 and self._on_device:
            use = "left behind later" if is_left_behind(stamp) else "used"
            raise ContractViolation(
                "I9",
                component.name,
                f"{node!r}, which is {use}, is evicted before {first[3]!r}, left behind "
                f"{use_of(stamp - other)} earlier",
            )
        scores = "", ""
        if level != rank[0]:
            scores = f", level {rank[0]:g}", f", level {level:g}"
        elif score != rank[1]:
            scores = f", score {rank[1]:g}", f", score {score:g}"
        raise ContractViolation(
            "T7",
            component.name,
            f"{node!r}, used at {use_of(stamp)}{scores[0]}, is evicted from "
            f"{'DEVICE' if self._on_device else 'HOST'} before {first[3]!r}, used at "
            f"{use_of(other)}{scores[1]}, under the policy {self.tree.policy.name!r}",
        )

    def _check_along(
        self, component: TreeComponent, node: Node, was: list[bool], components: list[TreeComponent]
    ) -> None:
        """At a leaf everything goes, elsewhere the narrower components' data (E3)."""
        held = {each.index for each in self.tree.components if was[each.index]}
        everything = not self._leads_on(node) and not any(
            self._pins(node, self.tree.components[index]) for index in held
        )
        wanted = held if everything else held & set(component.narrower)
        gone = {each.index for each in components}
        if gone != wanted and id(node) not in self._pinned:
            names = [each.name for each in self.tree.components]
            raise ContractViolation(
                "E3",
                component.name,
                f"{node!r} {'is a leaf' if everything else 'leads on'} and loses "
                f"{[names[index] for index in sorted(gone)]}, not "
                f"{[names[index] for index in sorted(wanted)]}",
            )
