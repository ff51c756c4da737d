"""The tree's record of one component: its reach in pages, its ledgers, its eviction candidates.

Candidates are sorted three times:

    tenant   the one that borrowed most for its weight loses data first, see `PoolBooks.giver`
    level    data that running requests left behind, then data whose time is over, then the lowest
             priority, see `Tree.lifetimes`
    order    as the policy says; of the first two levels by age

A node is entered while it is a candidate, with the stamp of its cell. It is withdrawn at once when
it is used or no longer a candidate, so that an eviction never passes over stale entries.

Two lists beside this queue hold the copies that write-back makes, `TreeComponent.clean` and
`TreeComponent.doubles`. They leave before other data, in the order in which they were copied: no
policy orders them, and a stale entry is found when its turn comes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from kvgraft.errors import ConfigError, ContractViolation
from kvgraft.policies.policy import FIRST_USE, Order, is_left_behind
from kvgraft.policies.recency import RecencyQueue
from kvgraft.reach import PageReach, Reach
from kvgraft.tree.ledger import DEVICE, HOST, Ledger, PoolBooks
from kvgraft.tree.node import CLEAN, DOUBLE, ON_DEVICE, ON_HOST, Node
from kvgraft.types import Kind, Span, Tier, new_span

if TYPE_CHECKING:
    from kvgraft.tree.tree import Tree


EXPIRED: Final = -1 << 16
"""The level of expired data: below every priority."""

LEFT: Final = EXPIRED - 1
"""The level of evict-first data, left behind and not used since (I9)."""


class _Line:
    """The candidates of one tenant and level."""

    __slots__ = ("n", "order")

    def __init__(self, order: Order) -> None:
        self.order = order
        self.n = 0


class Candidates:
    """The candidates of one pool.

    Each tenant and level has an order of its own, made by the policy: a policy that ranks by the
    current cost of losing a candidate has no fixed number for a common key.

    Args:
        tree: says for whom room is made (`Tree.for_tenant`), and how long data is kept.
        component: name and index of the component.
        place: the bit of `Cell.queued` for cells that are entered here.
        pool: the pool's ledger.
    """

    def __init__(self, tree: Tree, component: tuple[str, int], place: int, pool: PoolBooks) -> None:
        self._tree = tree
        self._name, self.index = component
        self._place = place
        self._taken = place | CLEAN if place == ON_DEVICE else place
        self._pool = pool
        self._refused: Exception | None = None
        """The error of an order that did not take a candidate, or did not drop one."""
        self.use(lambda pool: RecencyQueue())

    def use(self, make: Callable[[PoolBooks], Order]) -> None:
        """Let a policy order the candidates; must be called while there are none."""
        self._make = make
        self._used = [_Line(make(each)) for each in self._pool.parts]
        self._left = [_Line(RecencyQueue()) for _ in self._used]
        self._lines: list[dict[int, _Line]] = [
            {LEFT: left, 0: used} for left, used in zip(self._left, self._used)
        ]
        """By tenant and level; the first two levels alone in `_used` and `_left`."""

    @property
    def first_order(self) -> Order:
        """The policy's order of the first tenant's data of priority 0."""
        return self._lines[0][0].order

    def score(self, stamp: int) -> float | None:
        """The policy's score of data with a stamp, within its level; None if it has none."""
        lifetimes, lines = self._tree.lifetimes, self._lines[0]
        level = 0 if lifetimes is None else lifetimes.priority(stamp)
        return lines.get(level, lines[0]).order.score(stamp)

    def push(self, node: Node) -> None:
        """Enter a candidate; nothing happens if it is entered already, or in the clean reserve.

        Pins are being changed, so a failing order is reported at the next eviction (I8).
        """
        cell = node.cells[self.index]
        queued = cell.queued
        if queued & self._taken:
            return
        stamp = cell.stamp
        if self._tree.lifetimes is None:
            line = (self._used if stamp >= FIRST_USE else self._left)[node.tenant]
        else:
            line = self._line(node, stamp)
            self._tree.lifetimes.entered(self, node, stamp)
        try:
            line.order.push(stamp, node)
        except Exception as error:  # noqa: BLE001 - whatever a policy of others raises
            self._refused = self._refused or error
            return
        cell.queued = queued | self._place
        line.n += 1

    def withdraw(self, node: Node) -> None:
        """Drop a node that is no longer a candidate; nothing happens if it is not entered."""
        cell = node.cells[self.index]
        queued = cell.queued
        if not queued & self._place:
            return
        stamp = cell.stamp
        if self._tree.lifetimes is None:
            line = (self._used if stamp >= FIRST_USE else self._left)[node.tenant]
        else:
            line = self._line(node, stamp)
            self._tree.lifetimes.left(self, node, stamp)
        cell.queued = queued ^ self._place
        line.n -= 1
        try:
            line.order.withdraw(stamp, node)
        except Exception as error:  # noqa: BLE001 - whatever a policy of others raises
            self._refused = self._refused or error

    def enter_anew(self, node: Node) -> None:
        """`withdraw` and `push` of an entered candidate: losing it may cost less now."""
        if self._tree.lifetimes is not None:
            self.withdraw(node)
            self.push(node)
            return
        stamp = node.cells[self.index].stamp
        order = (self._used if stamp >= FIRST_USE else self._left)[node.tenant].order
        try:
            order.withdraw(stamp, node)
            order.push(stamp, node)
        except Exception as error:  # noqa: BLE001 - whatever a policy of others raises
            self._refused = self._refused or error

    def take(self, least: int = LEFT) -> Node | None:
        """Take the next victim; None if there is none of the level `least` or above.

        Raises:
            ContractViolation: K2, the policy's order returns an entry that it does not have, or
                none though it has one; or its code raises, here or for an earlier candidate.
        """
        if self._refused is not None:
            said = f"{type(self._refused).__name__}: {self._refused}"
            raise self._bad_order(f"does not take or drop a candidate: {said}") from self._refused
        giver, level = self._next(least)
        if giver is None or level is None:
            return None
        if level == EXPIRED:
            over: Node = self._tree.lifetimes.over(self, giver)
            self.withdraw(over)
            return over
        line = self._lines[giver][level]
        try:
            entry = line.order.pop()
            if entry is None:
                raise self._bad_order(f"gives none while {line.n} candidates wait")
            stamp: int = entry[0]
            node: Node = entry[1]
            cell = node.cells[self.index]
        except ContractViolation:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise self._bad_order(f"gives no pair of stamp and node: {said}") from error
        if not cell.queued & self._place or cell.stamp != stamp:
            raise self._bad_order(f"gives {node!r} again, with stamp {stamp}")
        cell.queued ^= self._place
        line.n -= 1
        if self._tree.lifetimes is not None:
            self._tree.lifetimes.left(self, node, stamp)
        return node

    def next_level(self) -> int | None:
        """The level of the next victim; None if there is none."""
        return self._next(LEFT)[1]

    def giver(self) -> int | None:
        """The tenant that loses data next; None if none has to."""
        return self._pool.giver(self._tree.for_tenant, self)

    def waits(self, tenant: int) -> bool:
        """Whether a tenant has candidates."""
        return any(line.n for line in self._lines[tenant].values())

    def __len__(self) -> int:
        return sum([line.n for lines in self._lines for line in lines.values()])

    def __iter__(self) -> Iterator[tuple[int, Node]]:
        """Every candidate with its stamp, in no order."""
        for lines in self._lines:
            for line in lines.values():
                yield from line.order

    # -- inside

    def _line(self, node: Node, stamp: int) -> _Line:
        """Where a node with that stamp belongs by now."""
        lines = self._lines[node.tenant]
        level = LEFT if is_left_behind(stamp) else self._tree.lifetimes.priority(stamp)
        line = lines.get(level)
        if line is None:
            line = lines[level] = _Line(self._make(self._pool.parts[node.tenant]))
        return line

    def _next(self, least: int) -> tuple[int | None, int | None]:
        """The tenant and the level of the next victim."""
        giver, lifetimes = self._pool.giver(self._tree.for_tenant, self), self._tree.lifetimes
        if giver is None:
            return None, None
        if lifetimes is None:
            if self._left[giver].n and least <= LEFT:
                return giver, LEFT
            return giver, 0 if self._used[giver].n else None
        first: int | None = None
        if least <= EXPIRED and lifetimes.over(self, giver) is not None:
            first = EXPIRED
        for level, line in self._lines[giver].items():
            if line.n and level >= least and (first is None or level < first):
                first = level
        return giver, first

    def _bad_order(self, what: str) -> ContractViolation:
        return ContractViolation("K2", self._name, f"its eviction policy's order {what}")


class Fifo:
    """Nodes of one pool, first in, first out.

    Attributes:
        n_slots: slots of the entries, counted when they were entered.
    """

    __slots__ = ("_entries", "_index", "_place", "n_slots")

    def __init__(self, index: int, place: int) -> None:
        self._index = index
        self._place = place
        self._entries: OrderedDict[Node, tuple[int, int]] = OrderedDict()
        """Stamp and slots of each."""
        self.n_slots = 0

    def enter(self, stamp: int, node: Node, n_slots: int) -> None:
        """Enter a node behind all others."""
        self._entries[node] = stamp, n_slots
        self.n_slots += n_slots
        node.cells[self._index].queued |= self._place

    def withdraw(self, node: Node) -> None:
        """Drop a node; nothing happens if it is not entered."""
        cell = node.cells[self._index]
        if cell.queued & self._place:
            cell.queued &= ~self._place
            self.n_slots -= self._entries.pop(node)[1]

    @property
    def last(self) -> tuple[int, Node] | None:
        """The last entry; None if there is none, or its data was used since."""
        found: tuple[int, Node] | None = None
        latest = 0
        for node in reversed(self._entries):
            stamp = self._entries[node][0]
            found = found or (stamp, node)
            if stamp != found[0]:
                break
            latest = max(latest, node.cells[self._index].stamp)
        return found if found is not None and latest == found[0] else None

    def pop(self) -> tuple[int, Node] | None:
        """Take the first entry; None if there is none."""
        node = next(iter(self._entries), None)
        if node is None:
            return None
        stamp = self._entries[node][0]
        self.withdraw(node)
        return stamp, node

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[int, Node]]:
        """Every entry, the first one first."""
        for node, (stamp, _) in self._entries.items():
            yield stamp, node


BOUNDARIES: Final = 1024
"""Boundaries whose pages under the reach are remembered, of each component."""

FOREIGN_BOUNDARIES: Final = 16
"""The same for a reach with custom terms, which may name thousands of ranges at each."""


Cause = Literal["demoted", "deleted", "cascade", "leaf", "cleared"]
"""Why slots left a tier.

    demoted    the pool was short; a copy stays on another tier
    deleted    the pool was short; no copy was left
    cascade    a component of wider or equal reach lost its data on the node (E3)
    leaf       another component's pool was short, at a leaf, where all data leaves (E3)
    cleared    its namespace was cleared, and nobody holds it any more
"""

CAUSES: tuple[Cause, ...] = ("demoted", "deleted", "cascade", "leaf", "cleared")


class ComponentShape(NamedTuple):
    """A component as the tree sees it; no pools, no torch.

    Attributes:
        name: the component's name.
        reach: its declared reach.
        home: tier of the canonical copy.
        slots_per_page: device and host slots a page takes (paged components).
        can_copy: whether a state can be copied for a request that will write to it.
    """

    name: str
    reach: Reach
    home: Tier = Tier.DEVICE
    slots_per_page: int = 1
    can_copy: bool = True

    @property
    def kind(self) -> Kind:
        """State or paged, from the reach."""
        return Kind.STATE if self.reach.is_state else Kind.PAGED


def ordered(shapes: Sequence[ComponentShape]) -> list[ComponentShape]:
    """Components in the tree's order: containing before contained, then widest reach first (T4).

    The first, the base, ends at every boundary: its data shows how far a sequence was computed. The
    order depends on the set of components only, not on how it was listed (D1).

    Raises:
        ConfigError: no component, two of one name, or none whose reach ends at every boundary.
    """
    if not shapes:
        raise ConfigError("no component given; install and name one, see `kvgraft components`")
    names = [shape.name for shape in shapes]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"component {name!r} is given {names.count(name)} times; give it once"
            )

    if not any(shape.reach.ends_at_boundary for shape in shapes):
        first = shapes[0]
        raise ConfigError(
            f"component {first.name!r}: its reach {first.reach} leaves out the token before some "
            "boundaries; put it beside a component that holds it: full attention, a window, a state"
        )

    def containers(shape: ComponentShape) -> int:
        """Number of reaches that strictly contain this one; more than any of those have."""
        return sum(
            other.reach.contains(shape.reach) and not shape.reach.contains(other.reach)
            for other in shapes
        )

    return sorted(
        shapes,
        key=lambda shape: (
            containers(shape),
            not shape.reach.ends_at_boundary,
            -shape.reach.width_tokens,
            shape.home is Tier.HOST,
            shape.name,
        ),
    )


def _segment(reach: PageReach, boundary: int) -> tuple[Span, ...]:
    if reach.is_state and boundary:
        return (new_span((boundary, boundary)),)
    return reach.spans(boundary)


class TreeComponent:
    """One component's constants and books inside a tree.

    Attributes:
        index: its position among the tree's components and in `Node.cells`.
        device, host: its books of either tier.
        devices, hosts: their ledgers by tenant (`Node.tenant`); where there are no tenants,
            `device` and `host` alone.
        narrower: indexes of components whose reach this one contains, itself included: their data
            is useless on a node without this component's (E3).
        depends_on: indexes of the components without whose data on a node this one's is useless:
            those that need every page, else the base, if their reach contains this one's and is not
            contained in it (T4).
        segment_at: returns the pages that its reach covers at a boundary, in pages; for a state the
            empty span there.
        clean: the clean reserve: the first of `device.queue`, taken out of it and copied to HOST
            before they leave. They leave before all others except evict-first data. An entry that
            is used meanwhile returns to the queue.
        doubles: nodes whose data both tiers have and that are not in the clean reserve. Under
            write-back HOST evicts these copies first, the oldest entry before others.
        lists_doubles: whether it does: not for canonical copies, nor where tenants share HOST.
        host_floor: the policy's score of the last victim on HOST; None without one.
        host_level: that victim's level, see `Tree.lifetimes`.
        per_tenant_order: whether tenants share its pools: some may not take all candidates.
    """

    __slots__ = (
        *("_tree", "can_copy", "clean", "depends_on", "device", "devices", "doubles"),
        *("ends_at_boundary", "home_is_host", "host", "host_floor", "host_level", "hosts", "index"),
        *("is_prefix_closed", "is_state", "lists_doubles", "name", "narrower", "per_tenant_order"),
        *("reach", "reach_pages", "segment_at", "slots_per_page", "stored_pages", "window_pages"),
    )

    def __init__(
        self,
        tree: Tree,
        shape: ComponentShape,
        index: int,
        device: PoolBooks,
        host: PoolBooks | None,
    ) -> None:
        if shape.home is Tier.HOST and host is None:
            raise ConfigError(f"component {shape.name!r}: its home is HOST but it has no host pool")
        self._tree = tree
        self.name = shape.name
        self.index = index
        self.reach = shape.reach
        self.reach_pages = PageReach(shape.reach, tree.page_size, shape.name)
        self.is_state = self.reach_pages.is_state
        self.is_prefix_closed = self.reach_pages.is_prefix_closed
        self.window_pages = self.reach_pages.window_pages
        self.ends_at_boundary = self.reach_pages.ends_at_boundary
        self.stored_pages = self.reach_pages.stored_pages
        remembered = BOUNDARIES if self.reach_pages.trusted else FOREIGN_BOUNDARIES
        self.segment_at: Callable[[int], tuple[Span, ...]] = lru_cache(remembered)(
            partial(_segment, self.reach_pages)
        )
        self.home_is_host = shape.home is Tier.HOST
        self.can_copy = shape.can_copy
        self.slots_per_page = shape.slots_per_page
        self.device = device
        self.host = host
        self.devices = device.parts
        self.hosts = (None,) * len(self.devices) if host is None else host.parts
        self.narrower: tuple[int, ...] = (index,)
        self.depends_on: tuple[int, ...] = ()
        named = shape.name, index
        for pool, place in ((device, ON_DEVICE), (host, ON_HOST)):
            if pool is not None:
                pool.queue = Candidates(tree, named, place, pool)
                pool.evicted = dict.fromkeys(CAUSES, 0)
        self.clean = Fifo(index, CLEAN)
        self.doubles = Fifo(index, DOUBLE)
        self.host_floor: float | None = None
        self.host_level = 0
        self.per_tenant_order = len(device.parts) > 1
        kept = tree.prefix_closed_host or self.home_is_host or self.per_tenant_order
        self.lists_doubles = not kept

    def pool(self, tier: Tier) -> PoolBooks:
        """Its books of a tier on which it has a pool."""
        pool = self.device if tier is DEVICE else self.host
        assert pool is not None
        return pool

    def ledger(self, tier: Tier, tenant: int) -> Ledger:
        """A tenant's ledger of that pool, the only one without tenants."""
        ledger = self.devices[tenant] if tier is DEVICE else self.hosts[tenant]
        assert ledger is not None
        return ledger

    def books_for(self, tier: Tier, tenant: int | None) -> PoolBooks:
        """The books that decide whether a tenant, or with None any request, may take slots."""
        return self.pool(tier) if tenant is None else self.ledger(tier, tenant)

    def stored_between(self, first: int, end: int) -> int:
        """Number of the pages `[first, end)` of a running request that get slots."""
        stored = self.stored_pages
        return end - first if end <= stored else max(0, stored - first)

    def needed_pages(self, boundary: int) -> tuple[Span, ...]:
        """The pages whose data is needed to resume at a boundary, in pages; a state's last one."""
        if self.is_state:
            return (Span(boundary - 1, boundary),)
        return self.reach_pages.spans(boundary)

    def n_slots(self, node: Node) -> int:
        """Slots this component takes for the whole of `node`."""
        return 1 if self.is_state else (node.end - node.start) * self.slots_per_page

    def hold(self, node: Node) -> None:
        """The data on `node` was pinned on DEVICE: it is no candidate any more."""
        self.device.queue.withdraw(node)
        if self.home_is_host:
            self.pool(HOST).queue.withdraw(node)

    def restamp(self, node: Node, stamp: int) -> None:
        """Note the latest use of the data on `node`."""
        cell = node.cells[self.index]
        if not cell.queued or cell.stamp == stamp:
            cell.stamp = stamp
            return
        queues = [self.device.queue] if cell.queued & ON_DEVICE else []
        if self.host is not None and cell.queued & ON_HOST:
            queues.append(self.host.queue)
        for queue in queues:
            queue.withdraw(node)
        cell.stamp = stamp
        for queue in queues:
            queue.push(node)

    def is_worth(self, stamp: int, other: int) -> bool:
        """Whether the policy scores data with a stamp no lower than data with another one."""
        order = self.device.queue.first_order
        score, least = order.score(stamp), order.score(other)
        return score is None or least is None or score >= least

    def pop_device(self) -> Node | None:
        """Take the next DEVICE candidate: evict-first, then the clean reserve; None if none is."""
        if self.clean and self.device.queue.next_level() != LEFT:
            node = self._pop_clean()
            if node is not None:
                return node
        return self.device.queue.take()

    def keep_clean(self, node: Node, stamp: int) -> None:
        """Enter a node in the clean reserve, as its last victim.

        Args:
            node: taken off its queue; or not queued itself, above one that was.
            stamp: its cell's, or that of the node below, which it inherits when that leaves.
        """
        assert not node.cells[self.index].queued & (ON_DEVICE | CLEAN)
        self.clean.enter(stamp, node, self.n_slots(node))

    def _pop_clean(self) -> Node | None:
        """The first entry of the clean reserve that was not used since, taken off."""
        while (entry := self.clean.pop()) is not None:
            stamp, node = entry
            if node.cells[self.index].stamp == stamp:
                return node
            if self._tree.is_candidate(node, self, DEVICE):
                self.device.queue.push(node)
            self.queue_double(node)
        return None

    def queue_double(self, node: Node) -> None:
        """Enter a node if both tiers have its data, and it is not in the clean reserve."""
        cell = node.cells[self.index]
        both = cell.device is not None and cell.host is not None
        if self.lists_doubles and both and not cell.queued & (CLEAN | DOUBLE):
            self.doubles.enter(cell.stamp, node, self.n_slots(node))

    def pop_double(self) -> Node | None:
        """Take the first node whose data both tiers have; None if there is none."""
        while (entry := self.doubles.pop()) is not None:
            cell = entry[1].cells[self.index]
            if cell.device is not None and cell.host is not None and not cell.queued & CLEAN:
                return entry[1]
        return None
