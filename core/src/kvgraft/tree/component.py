"""The tree's record of one component: its reach in pages, its ledgers, its queues of candidates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, Final, Literal, NamedTuple

from kvgraft.errors import ConfigError, ContractViolation
from kvgraft.policies.policy import Order
from kvgraft.policies.recency import FIRST_USE, RecencyQueue
from kvgraft.reach import PageReach, Reach
from kvgraft.tree.ledger import PoolBooks
from kvgraft.tree.node import BEHIND, CLEAN, DOUBLE, ON_DEVICE, ON_HOST, Cell, Node
from kvgraft.types import Kind, Span, Tier, new_span


class Fifo:
    """Pairs of stamp and node, first in, first out.

    Attributes:
        n_slots: slots of the entries, as many as they had when they were entered.
    """

    __slots__ = ("_entries", "n_slots")

    def __init__(self) -> None:
        self._entries: deque[Any] = deque()
        """Stamp, node and slots of each, one behind the other: no object for each entry."""
        self.n_slots = 0

    def enter(self, stamp: int, node: Node, n_slots: int) -> None:
        """Enter a node behind all others."""
        self._entries += (stamp, node, n_slots)
        self.n_slots += n_slots

    @property
    def last(self) -> tuple[int, Node] | None:
        """The entry behind all others; None if there is none."""
        return (self._entries[-3], self._entries[-2]) if self._entries else None

    def pop(self) -> tuple[int, Node] | None:
        """Take the first entry; None if there is none."""
        if not self._entries:
            return None
        take = self._entries.popleft
        entry = take(), take()
        self.n_slots -= take()
        return entry

    def keep(self, wanted: Callable[[Node], object]) -> None:
        """Drop every entry whose node is not wanted; O(entries)."""
        entries = [entry for entry in self._each() if wanted(entry[1])]
        self._entries = deque([part for entry in entries for part in entry])
        self.n_slots = sum([n_slots for _, _, n_slots in entries])

    def __len__(self) -> int:
        return len(self._entries) // 3

    def __iter__(self) -> Iterator[tuple[int, Node]]:
        """Every entry, the first one first."""
        for stamp, node, _ in self._each():
            yield stamp, node

    def _each(self) -> Iterator[tuple[int, Node, int]]:
        each = iter(self._entries)
        return zip(each, each, each)


BOUNDARIES: Final = 1024
"""Boundaries whose pages under the reach are remembered, of each component."""

FOREIGN_BOUNDARIES: Final = 16
"""The same of a reach with terms of others, which may name thousands of ranges at each."""

PLACES: Final = (ON_DEVICE, ON_HOST, BEHIND, CLEAN, DOUBLE)
"""The queues that a cell may have an entry in, as in `Cell.queued`."""


Cause = Literal["demoted", "deleted", "cascade", "leaf", "cleared"]
"""Why slots left a tier.

    demoted    the pool was short; a copy stays on another tier
    deleted    the pool was short; no copy was left
    cascade    a component of wider or equal reach lost its data on the node (E3)
    leaf       another component's pool was short, at a leaf, where everything goes (E3)
    cleared    its namespace was cleared, and nobody holds it (any more)
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

    The first, the base, ends at every boundary: its data tells how far a sequence was computed.
    The order depends on the set of components only, not on how it was listed (D1).

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
        devices, hosts: the ledgers of its pools by tenant (`Node.tenant`); where there are no
            tenants, `device` and `host` alone.
        narrower: indexes of components whose reach this one contains, itself included: their data
            loses its use on a node where this component's data is gone (E3).
        depends_on: indexes of the components without whose data on a node this one's is of no use
            there: those that need every page, else the base, where their reach contains this
            one's and is not contained in it (T4).
        segment_at: gives the pages that its reach covers at a boundary, in pages; of a state the
            empty span there.
        device_evictions, host_evictions: slots that left a tier so far, by cause.
        behind_queue: DEVICE eviction candidates that running requests left behind; they go before
            those of `device_queue` (I9).
        device_queue, host_queue: other candidates, as the policy orders them. An entry's stamp may
            lag behind the cell's; the code that takes it compares the two and enters it again. One
            entry per cell and queue at most, see `Cell.queued`.
        clean: the first of `device_queue`, taken out of it to be copied to HOST before they leave:
            the clean reserve. They go before the others. What is used meanwhile is a candidate
            among these again.
        doubles: nodes whose data both tiers have and that are not in the clean reserve; under
            write-back HOST gives up these copies first, the oldest entry before others.
        host_floor: the policy's score of the last victim of `host_queue`; None without one.
        host_level: that victim's level, see `kvgraft.tree.lifetimes`.
        entries: entries by queue, as in `Cell.queued`, as the tree counts them.
        dead: how many of them are of nodes that left the tree.
        per_tenant_order: whether its orders keep candidates back from some tenants, see
            `kvgraft.tree.tenants`.
        refused: the error of an order that did not take a candidate; None if all took theirs.
    """

    __slots__ = (
        "behind_queue",
        "can_copy",
        "clean",
        "dead",
        "depends_on",
        "device",
        "device_evictions",
        "device_queue",
        "devices",
        "doubles",
        "ends_at_boundary",
        "entries",
        "home_is_host",
        "host",
        "host_evictions",
        "host_floor",
        "host_level",
        "host_queue",
        "hosts",
        "index",
        "is_prefix_closed",
        "is_state",
        "name",
        "narrower",
        "per_tenant_order",
        "reach",
        "reach_pages",
        "refused",
        "segment_at",
        "slots_per_page",
        "stored_pages",
        "window_pages",
    )

    def __init__(
        self,
        shape: ComponentShape,
        index: int,
        page_size: int,
        device: PoolBooks,
        host: PoolBooks | None,
    ) -> None:
        if shape.home is Tier.HOST and host is None:
            raise ConfigError(f"component {shape.name!r}: its home is HOST but it has no host pool")
        self.name = shape.name
        self.index = index
        self.reach = shape.reach
        self.reach_pages = PageReach(shape.reach, page_size, shape.name)
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
        self.behind_queue: Order = RecencyQueue()
        self.device_queue: Order = RecencyQueue()
        self.host_queue: Order = RecencyQueue()
        self.clean = Fifo()
        self.doubles = Fifo()
        self.host_floor: float | None = None
        self.host_level = 0
        self.entries = [0] * (max(PLACES) + 1)
        self.dead = [0] * (max(PLACES) + 1)
        self.refused: Exception | None = None
        self.per_tenant_order = False
        self.device_evictions: dict[Cause, int] = dict.fromkeys(CAUSES, 0)
        self.host_evictions: dict[Cause, int] = dict.fromkeys(CAUSES, 0)

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

    def queue_device(self, node: Node) -> None:
        """Enter a DEVICE eviction candidate; nothing happens if it is entered already."""
        cell = node.cells[self.index]
        if cell.stamp < FIRST_USE:
            if not cell.queued & BEHIND:
                self._enter(self.behind_queue, BEHIND, node, cell)
        elif not cell.queued & (ON_DEVICE | CLEAN):
            self._enter(self.device_queue, ON_DEVICE, node, cell)

    def queue_host(self, node: Node) -> None:
        """Enter a HOST eviction candidate; nothing happens if it is entered already."""
        cell = node.cells[self.index]
        if not cell.queued & ON_HOST:
            self._enter(self.host_queue, ON_HOST, node, cell)

    def _enter(self, queue: Order, place: int, node: Node, cell: Cell) -> None:
        """Enter a candidate in a queue.

        Pins and ledgers are being changed, so an order that fails is reported where room is made
        next (I8).
        """
        try:
            queue.push(cell.stamp, node)
        except Exception as error:  # noqa: BLE001 - whatever a policy of others raises
            self.refused = self.refused or error
            return
        cell.queued |= place
        self.entries[place] += 1

    def pop_device(self) -> Node | None:
        """The next DEVICE entry, taken off its queue: left behind first, then the clean reserve.

        None if there is none.
        """
        node = self.pop_behind() if self.entries[BEHIND] else None
        if node is None and self.entries[CLEAN]:
            node = self._pop_clean()
        return node if node is not None else self.pop_in_order()

    def pop_in_order(self) -> Node | None:
        """The next DEVICE entry as the policy orders them, taken off; None if there is none."""
        return self._take(self.device_queue, ON_DEVICE)

    def keep_clean(self, node: Node, stamp: int) -> None:
        """Enter a node in the clean reserve, as the last to go.

        Args:
            node: taken off its queue, or above one that was and not entered in one itself.
            stamp: its cell's, or of the node below: it inherits that when the node below leaves.
        """
        cell = node.cells[self.index]
        assert not cell.queued & (ON_DEVICE | CLEAN)
        self.clean.enter(stamp, node, self.n_slots(node))
        cell.queued |= CLEAN
        self.entries[CLEAN] += 1

    def _pop_clean(self) -> Node | None:
        """The first entry of the clean reserve that was not used since, taken off."""
        while (entry := self.clean.pop()) is not None:
            stamp, node = entry
            cell = node.cells[self.index]
            cell.queued &= ~CLEAN
            self.entries[CLEAN] -= 1
            if node.parent is None:
                self.dead[CLEAN] -= 1
            elif cell.stamp == stamp:
                return node
            else:
                self.queue_device(node)
                self.queue_double(node)
        return None

    def queue_double(self, node: Node) -> None:
        """Enter a node if both tiers have its data, and it is not in the clean reserve."""
        cell = node.cells[self.index]
        if cell.device is None or cell.host is None or cell.queued & (CLEAN | DOUBLE):
            return
        self.doubles.enter(cell.stamp, node, self.n_slots(node))
        cell.queued |= DOUBLE
        self.entries[DOUBLE] += 1

    def pop_double(self) -> Node | None:
        """The first node whose data both tiers have, taken off; None if there is none."""
        while (entry := self.doubles.pop()) is not None:
            _, node = entry
            cell = node.cells[self.index]
            cell.queued &= ~DOUBLE
            self.entries[DOUBLE] -= 1
            if node.parent is None:
                self.dead[DOUBLE] -= 1
            elif cell.device is not None and cell.host is not None and not cell.queued & CLEAN:
                return node
        return None

    def pop_behind(self) -> Node | None:
        """The oldest DEVICE entry that was left behind, taken off its queue; None if none is."""
        return self._take(self.behind_queue, BEHIND)

    def pop_host(self) -> Node | None:
        """The least recently used HOST entry, taken off the queue; None if there is none."""
        return self._take(self.host_queue, ON_HOST)

    def _take(self, queue: Order, place: int) -> Node | None:
        """The oldest entry that is of a node in the tree and whose stamp is the cell's.

        A cell that was left behind and used since, or the other way round, has an entry in the
        queue where it belongs now; the one it left is dropped.

        Raises:
            ContractViolation: K2, the policy's order gives what is not entered in it, an entry
                again and again, or fewer than there are; or its code raises, here or as a candidate
                was entered.
        """
        if self.refused is not None:
            said = f"{type(self.refused).__name__}: {self.refused}"
            raise self._bad_order(f"does not take a candidate: {said}") from self.refused
        entries = self.entries
        left = entries[place]
        while True:
            try:
                entry = queue.pop()
                if entry is None:
                    break
                stamp: int = entry[0]
                node: Node = entry[1]
                cell = node.cells[self.index]
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                raise self._bad_order(f"gives no pair of stamp and node: {said}") from error
            there = node.parent is not None
            moved = there and (cell.stamp < FIRST_USE) is not (stamp < FIRST_USE)
            if left < 0 or not cell.queued & place:
                raise self._bad_order(f"gives {node!r} again, with stamp {stamp}")
            cell.queued &= ~place
            entries[place] -= 1
            if there and cell.stamp != stamp and not moved:
                self._enter(queue, place, node, cell)
                left -= 1
                continue
            if there and not moved:
                return node
            self.dead[place] -= not there
            if self.per_tenant_order and place == ON_DEVICE and entries[BEHIND]:
                # Its tenant has one candidate less: another may be the one to give up data now.
                behind = self.pop_behind()
                if behind is not None:
                    return behind
        if entries[place] and not self.per_tenant_order:
            raise self._bad_order(f"gives none while {entries[place]} candidates wait")
        return None

    def _bad_order(self, what: str) -> ContractViolation:
        return ContractViolation("K2", self.name, f"its eviction policy's order {what}")

    def forget(self, node: Node) -> None:
        """`node` left the tree: drop its entries, in bulk once they are half of a queue's."""
        queued, entries, dead = node.cells[self.index].queued, self.entries, self.dead
        for place in PLACES:
            if queued & place:
                dead[place] += 1
                if dead[place] * 2 > entries[place] + 64:
                    self._queue(place).keep(lambda each: each.parent)
                    entries[place] -= dead[place]
                    dead[place] = 0

    def _queue(self, place: int) -> Order | Fifo:
        if place == BEHIND:
            return self.behind_queue
        if place == ON_DEVICE:
            return self.device_queue
        if place == ON_HOST:
            return self.host_queue
        return self.clean if place == CLEAN else self.doubles
