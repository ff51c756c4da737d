"""HOST to STORAGE: stores reused data, or all data, by policy, in the background (S6)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraft.errors import ConfigError
from kvgraft.tree.component import Cause, TreeComponent
from kvgraft.tree.node import Node
from kvgraft.tree.pinning import Receipt, hold_host, release
from kvgraft.tree.tree import TreeObserver
from kvgraft.types import Tier
from kvgraft_storage import TRANSIENT, Access, BreakerState, Status, StorageTicket
from kvgraft_storage.memory import Buffers, aligned, copy, round_up
from kvgraft_storage.settings import StorageSettings, StorePolicy
from kvgraft_storage.tier.context import TierContext
from kvgraft_storage.tier.prefix_probe import Allowance, PrefixProbe, probe_prefix

__all__ = ["Sent", "Storing", "parts_of"]

HOST = Tier.HOST

BACKLOG = 65_536
"""Most nodes that wait to be stored; beyond it the oldest are dropped and counted."""


RETRY_S = 0.5
"""Seconds between two tries to store data that a working store refused."""


FULL_S = 5.0
"""Seconds for which a full store is offered no reused data."""

MOST_ASKED = 64
"""Tails whose heads are looked up at a time, and nodes of one tail."""

RESUMED_S = 1.0
"""Seconds between two lookups of boundaries that requests resumed from without growing."""

RESUMED_PAGES = 32_768
"""Pages before such boundaries that are looked up at once, without the last one's."""

MOST_RESUMED = 4096
"""Most such boundaries that wait; beyond it the oldest are dropped."""


class _Waiting(NamedTuple):
    """A node that is to be stored, and the page it began at: it may be split meanwhile."""

    node: Node
    first: int

    @property
    def parts(self) -> list[Node]:
        """The parts it was split into, root first; none if it is gone."""
        return parts_of(self.node, self.first)


class _Tail(NamedTuple):
    """Nodes to be stored, each the child of the one before, that wait for a probe of their heads.

    Attributes:
        resumed: the boundary whose heads are asked for, where there are no nodes behind it.
    """

    nodes: list[_Waiting]
    asked: PrefixProbe
    resumed: Node | None = None

    @property
    def parent(self) -> Node | None:
        """The last node of the heads; None if the first of the nodes left the tree."""
        if self.resumed is not None:
            return self.resumed
        parts = self.nodes[0].parts
        return parts[0].parent if parts else None


class Sent(NamedTuple):
    """Data of a node on its way to the store.

    Attributes:
        receipt: its pins; None where the data was copied.
        first: the page the node began at.
        parts: per component, the number of its first address and how many there are to a page.
        nbytes: bytes of it.
        store: number of the store it goes to.
    """

    ticket: StorageTicket
    receipt: Receipt | None
    first: int
    parts: list[tuple[TreeComponent, int, int]]
    nbytes: int
    store: int


class Storing(TreeObserver):
    """Sends nodes to the store, each component's data once.

    Attributes:
        counts: nodes and slots by outcome.
    """

    def __init__(
        self, context: TierContext, settings: StorageSettings, clock: Callable[[], float]
    ) -> None:
        self.context = context
        self.policy = settings.store
        self.budget = settings.store_nbytes
        self.counts: Counter[str] = Counter()
        self.nbytes_in_flight = 0
        self._backlog: deque[_Waiting] = deque()
        self._failed: deque[_Waiting] = deque(maxlen=BACKLOG)
        self._clock = clock
        self._retry_at = self._full_until = 0.0
        self._sent: list[Sent] = []
        self._done: deque[Sent] = deque()
        self._tails: deque[_Tail] = deque()
        self._resumed: dict[Node, None] = {}
        self._resumed_at = 0.0
        self._allowance = Allowance()
        self._allowance_of = 0
        self._sending: Generator[None, None, None] | None = None
        self._last_dropped: Node | None = None

    @property
    def n_in_flight(self) -> int:
        """Nodes on their way or waiting for it."""
        sending = self._sending is not None
        n_asked = sum(len(tail.nodes) or 1 for tail in self._tails)
        n_due = int(self._resumed_is_due)
        return len(self._sent) + len(self._done) + len(self._backlog) + n_asked + sending + n_due

    def receipts(self) -> list[Receipt]:
        """Pins of data on its way to the store, for integrity checks."""
        under_way = (*self._sent, *self._done)
        return [sent.receipt for sent in under_way if sent.receipt is not None]

    # -- events in the cache

    def arrived(
        self,
        node: Node,
        component: TreeComponent,
        tier: Tier,
        start: int,
        source: Tier | None,
    ) -> None:
        """Data of a node came to HOST: store it, if the policy or a use requires it."""
        del component, start, source
        if tier is not HOST:
            return
        wanted = node.names is not None and node.names.wanted == self.context.client.store_number
        if wanted or self.policy is StorePolicy.WRITE_THROUGH:
            self._queue(node)

    def matched(self, anchor: Node) -> None:
        """A request resumes at `anchor`: data used a second time is worth storing.

        With write-through it is stored already, unless the store was attached since.
        """
        self.context.touching.used(anchor)
        store = self.context.client.store_number
        if self.policy is StorePolicy.HOST_EVICTION or not self.context.client.attached:
            return
        if self._clock() < self._full_until:
            return
        if self.context.client.evicts:
            self._ask_later(anchor)
        fresh: list[Node] = []
        node: Node | None = anchor
        while node is not None and node.parent is not None:
            names = self.context.naming.of(node)
            if names.wanted == store:
                break
            names.wanted = store
            fresh.append(node)
            node = node.parent
        for node in reversed(fresh):
            self._queue(node)

    def _ask_later(self, anchor: Node) -> None:
        """Ask for the heads of a boundary, unless a tail behind it does so before."""
        if not self._resumed:
            self._resumed_at = self._clock() + RESUMED_S
        self._resumed.pop(anchor, None)
        self._resumed[anchor] = None
        if len(self._resumed) > MOST_RESUMED:
            del self._resumed[next(iter(self._resumed))]

    def hurry(self) -> None:
        """Look up the waiting boundaries at once."""
        self._resumed_at = self._clock()

    @property
    def _resumed_is_due(self) -> bool:
        due = bool(self._resumed) and self._clock() >= self._resumed_at
        return due and self.context.client.attached

    def leaving(self, node: Node, component: TreeComponent, tier: Tier, cause: Cause) -> None:
        """HOST is about to drop data of a node: copy it, and store the copy."""
        if tier is not HOST or self.policy is not StorePolicy.HOST_EVICTION:
            return
        if cause == "cleared" or self.context.tree.is_cleared(node):
            return
        if not self.context.client.attached:
            return
        if self._is_stored(node, component) or not self._name_at_once(node):
            return
        n_slots, nbytes = component.n_slots(node), self.context.slabs.nbytes[component.index]
        if self.nbytes_in_flight + nbytes * n_slots > self.budget:
            self.counts["dropped, too many in flight"] += 1
            return
        size = round_up(nbytes)
        memory = aligned(size * n_slots)
        slots = node.cells[component.index].host
        assert slots is not None
        buffers = []
        rows = self.context.slabs.of([(component, np.frombuffer(slots, np.int32))])
        for number, slab in enumerate(rows[:]):
            buffers.append(memory[number * size : number * size + len(slab)])
            copy(buffers[-1], slab)
        self._send(node, None, [component], buffers)

    # -- going on

    def poll(self) -> None:
        """Process finished writes, and send again where due; never waits.

        Data that a store refused because it failed is sent again once the breaker is closed (S7).
        """
        if any(sent.ticket.settled or sent.ticket.cancelled for sent in self._sent):
            sent = self._sent
            self._sent = []
            for each in sent:
                (self._done if each.ticket.done else self._sent).append(each)
        closed = self.context.client.state_of(Access.WRITE) is BreakerState.CLOSED
        if self._failed and closed and self._clock() >= self._retry_at:
            self._backlog += self._failed
            self._failed.clear()
            self._retry_at = self._clock() + RETRY_S
        if self._backlog and not self.context.client.attached:
            self.counts["dropped, no store"] += len(self._backlog)
            self._backlog.clear()

    def step(self) -> bool:
        """Process a finished write, or send a waiting node; false if there is none."""
        if self._done:
            self._take_in(self._done.popleft())
            return True
        if self._sending is None:
            self._sending = self._next()
        elif self.nbytes_in_flight >= self.budget:
            return False
        if self._sending is None:
            return False
        if next(self._sending, self) is self:
            self._sending = None
        return True

    def _next(self) -> Generator[None, None, None] | None:
        """The next thing to do, a step at a time; None if there is none now."""
        if self.nbytes_in_flight >= self.budget:
            return None
        if self._tails and self._tails[0].asked.ticket.done:
            return self._send_tail(self._tails.popleft())
        if len(self._tails) >= MOST_ASKED:
            return None
        if not self._backlog:
            return self._ask_resumed() if self._resumed_is_due else None
        if self._tails and self._follows_a_tail(self._backlog[0].node):
            return None
        nodes = [self._backlog.popleft()]
        while len(nodes) < MOST_ASKED and self._backlog:
            if self._backlog[0].node.parent is not nodes[-1].node:
                break
            nodes.append(self._backlog.popleft())
        return self._send_next(nodes)

    def _follows_a_tail(self, node: Node) -> bool:
        """Whether a node above one waits itself for an answer about its heads."""
        asked = {each.node for tail in self._tails for each in tail.nodes}
        first = min(tail.asked.end for tail in self._tails)
        at: Node | None = node
        while at is not None and at.start >= first:
            if at in asked:
                return True
            at = at.parent
        return False

    def _ask_resumed(self) -> Generator[None, None, None]:
        """Ask for the heads of boundaries that requests resumed from."""
        left = RESUMED_PAGES
        for anchor in list(islice(self._resumed, MOST_ASKED - len(self._tails))):
            if left <= 0:
                break
            if self._resumed.pop(anchor, anchor) is anchor:
                continue  # a tail has asked meanwhile
            left -= anchor.end
            with suppress(ConfigError):  # a namespace without a name
                yield from self.context.naming.name(anchor)
                asked = yield from probe_prefix(self.context, anchor, anchor.end)
                if asked is not None:
                    self._tails.append(_Tail([], asked, anchor))
        self._resumed_at = self._clock() + RESUMED_S

    def _send_next(self, nodes: list[_Waiting]) -> Generator[None, None, None]:
        """Hash pages without names, a block at a time; then ask for the heads, or send."""
        naming, client = self.context.naming, self.context.client
        try:
            for each in nodes:
                yield from naming.name(each.node)
        except ConfigError:
            self.counts["dropped, namespace without a name"] += len(nodes)
            return
        if client.evicts:
            while nodes and not sum(self._offer(part) for part in nodes[0].parts):
                self.counts["dropped, evicted first"] += nodes[0].node.parent is None
                del nodes[0]  # it is stored, or gone
            for each in nodes[1:]:
                for part in each.parts:
                    self._offer(part)
            parent = nodes[0].parts[0].parent if nodes else None
            if parent is not None:
                asked = yield from probe_prefix(self.context, parent, nodes[-1].node.end)
                self._resumed.pop(parent, None)
                if asked is not None:
                    self._tails.append(_Tail(nodes, asked))
                    return
        yield from self._send_all(nodes)

    def _send_tail(self, tail: _Tail) -> Generator[None, None, None]:
        """Send the heads that the store lost and what follows them, or nothing."""
        nodes, parent = tail.nodes, tail.parent
        if parent is not None and self.context.client.attached:
            missing = yield from tail.asked.missing(self.context, parent)
            if missing is None:
                self._leave_out(nodes, "dropped, no head")
                return
            if missing:
                nbytes = sum(each.nbytes for each in missing)
                rest = sum(self._unsent_nbytes(part) for each in nodes for part in each.parts)
                if not self._allowance.covers(nbytes + rest):
                    self._leave_out(nodes, "dropped, its head would be written too often")
                    return
                self.counts["heads"] += 1
                self.counts["head bytes"] += nbytes
            for each in missing:
                for part in parts_of(each.node, each.first):
                    if not self._store(part, each.components):
                        self._leave_out(nodes, None)
                        return
                self._allowance.written += each.nbytes
                yield
        yield from self._send_all(nodes)

    def _send_all(self, nodes: Sequence[_Waiting]) -> Generator[None, None, None]:
        for number, each in enumerate(nodes):
            if number:
                yield
            if not self.context.client.attached:
                self.counts["dropped, no store"] += len(nodes) - number
                return
            for part in each.parts:
                nbytes = self._unsent_nbytes(part)
                if self._store(part, self.context.tree.components):
                    self._allowance.written += nbytes
            self.counts["dropped, evicted first"] += each.node.parent is None

    def _leave_out(self, nodes: Sequence[_Waiting], reason: str | None) -> None:
        """Do not store a tail, until it is used again."""
        if reason is not None:
            self.counts[reason] += len(nodes)
        for each in nodes:
            self._unwant(*each)

    def _offer(self, node: Node) -> bool:
        """Count data of a node as offered to the store, once; whether there is any to store."""
        store, names = self.context.client.store_number, self.context.naming.of(node)
        if self._allowance_of != store:
            self._allowance, self._allowance_of = Allowance(), store
        if names.store != store:
            names.store, names.stored, names.offered = store, 0, 0
        components = self._unsent(node, self.context.tree.components)
        for component in components:
            if not names.offered >> component.index & 1:
                names.offered |= 1 << component.index
                self._allowance.offered += self._nbytes(node, component)
        return bool(components)

    def _unsent(self, node: Node, components: Sequence[TreeComponent]) -> list[TreeComponent]:
        """Components with HOST data of a node that the store is not known to have or to get."""
        names = self.context.naming.of(node)
        return [
            component
            for component in components
            if node.cells[component.index].host is not None
            and not self._is_stored(node, component)
            and not names.sent >> component.index & 1
        ]

    def _unsent_nbytes(self, node: Node) -> int:
        components = self._unsent(node, self.context.tree.components)
        return sum(self._nbytes(node, component) for component in components)

    def _nbytes(self, node: Node, component: TreeComponent) -> int:
        return component.n_slots(node) * self.context.slabs.nbytes[component.index]

    def stop(self) -> None:
        """Send nothing more; cancelled writes end with the next polls."""
        self.counts["dropped, no store"] += len(self._backlog) + len(self._failed)
        if self._sending is not None:
            self.counts["dropped, no store"] += 1
            self._sending = None
        for tail in self._tails:
            self.counts["dropped, no store"] += len(tail.nodes)
            tail.asked.ticket.cancel()
        self._tails.clear()
        self._resumed.clear()
        self._backlog.clear()
        self._failed.clear()
        for sent in self._sent:
            sent.ticket.cancel()

    # -- inside

    def _name_at_once(self, node: Node) -> bool:
        """Hash a node's pages now: it is about to leave. False if its namespace has no name."""
        try:
            for _ in self.context.naming.name(node):
                pass
        except ConfigError:
            self.counts["dropped, namespace without a name"] += 1
            return False
        return True

    def _queue(self, node: Node) -> None:
        if not self.context.client.attached:
            self.counts["dropped, no store"] += node is not self._last_dropped
            self._last_dropped = node
            return
        if self._backlog and self._backlog[-1].node is node:
            return  # its components come one after the other
        if len(self._backlog) >= BACKLOG:
            self._unwant(*self._backlog.popleft())
            self.counts["dropped, too many waiting"] += 1
        self._backlog.append(_Waiting(node, node.start))

    def _unwant(self, node: Node, first: int) -> None:
        """Offer the data that was not stored, and its descendants, again when it is used again."""
        stack = parts_of(node, first)
        while stack:
            below = stack.pop()
            if below.names is not None and below.names.wanted:
                below.names.wanted = 0
                stack.extend(below.each_child())

    def _is_stored(self, node: Node, component: TreeComponent) -> bool:
        names = node.names
        if names is None or names.store != self.context.client.store_number:
            return False
        return bool(names.stored >> component.index & 1)

    def _store(self, node: Node, components: Sequence[TreeComponent]) -> bool:
        """Send a node's HOST data, except data the store is known to have.

        Args:
            node: with names.
            components: those to send.

        Returns:
            False if it is promised to requests, and so not sent.
        """
        components = self._unsent(node, components)
        if not components:
            return True
        if self.context.tree.is_cleared(node):
            self.counts["dropped, cleared"] += 1
            return True
        receipt = hold_host(self.context.tree, node)
        if receipt is None:
            self.counts["dropped, promised to requests"] += 1
            self._unwant(node, node.start)
            return False
        names = self.context.naming.of(node)
        parts = []
        for component in components:
            slots = node.cells[component.index].host
            assert slots is not None
            parts.append((component, np.frombuffer(slots, np.int32)))
            names.sent |= 1 << component.index
        self._send(node, receipt, components, self.context.slabs.of(parts))
        return True

    def _send(
        self,
        node: Node,
        receipt: Receipt | None,
        components: Sequence[TreeComponent],
        buffers: Buffers | Sequence[memoryview],
    ) -> None:
        """Store a node's data of some components, from the memory given for it."""
        naming, storage = self.context.naming, self.context.client
        namespace = naming.namespace(self.context.tree.namespace(_root(node)))
        parts: list[tuple[TreeComponent, int, int]] = []
        pages: list[tuple[TreeComponent, npt.NDArray[np.int64]]] = []
        number = nbytes = 0
        for component in components:
            first = node.end - 1 if component.is_state else node.start
            pages.append((component, np.arange(first, node.end)))
            n_slots = component.n_slots(node)
            parts.append((component, number, n_slots // (node.end - first)))
            number += n_slots
            nbytes += n_slots * self.context.slabs.nbytes[component.index]
        names = naming.of(node)
        asked = naming.asked(names.hashes, node.start, pages, namespace)
        ticket = storage.set(asked, buffers, self.context.deadline_s, only_missing=True)
        self._sent.append(Sent(ticket, receipt, node.start, parts, nbytes, storage.store_number))
        self.nbytes_in_flight += nbytes
        self.counts["nodes"] += 1

    def _take_in(self, sent: Sent) -> None:
        """Note which components are stored, on the node or on those it was split into."""
        self.nbytes_in_flight -= sent.nbytes
        statuses = sent.ticket.statuses
        n_ok = statuses.count(Status.OK)
        whole = n_ok == len(statuses)
        if whole:
            self.counts["bytes"] += sent.nbytes
        self.counts["slots"] += n_ok
        self.counts["slots failed"] += len(statuses) - n_ok
        if sent.receipt is None:
            return
        if not whole and sent.store == self._allowance_of:
            self._allowance.written -= sent.nbytes * (len(statuses) - n_ok) / len(statuses)
        if sent.store != self.context.client.store_number:
            self._unwant(sent.receipt.anchor, sent.first)  # it may be wanted by the next one
        elif not whole and any(status in statuses for status in TRANSIENT):
            self._failed.append(_Waiting(sent.receipt.anchor, sent.first))
        elif not whole:
            self._unwant(sent.receipt.anchor, sent.first)
            if Status.FULL in statuses:
                self._full_until = self._clock() + FULL_S
        for node in parts_of(sent.receipt.anchor, sent.first):
            names = self.context.naming.of(node)
            if names.store != sent.store:
                names.store, names.stored = sent.store, 0
            for component, number, per_page in sent.parts:
                names.sent &= ~(1 << component.index)
                low, high = node.start - sent.first, node.end - sent.first
                if component.is_state:
                    low, high = (0, 1) if node is sent.receipt.anchor else (0, 0)
                mine = statuses[number + low * per_page : number + high * per_page]
                if mine and mine.count(Status.OK) == len(mine):
                    names.stored |= 1 << component.index
        self.context.touching.used(sent.receipt.anchor)  # it was stored from its start on
        release(self.context.tree, sent.receipt)


def _root(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node


def parts_of(node: Node, start: int) -> list[Node]:
    """The parts of a split node that began at page `start`, root first; none if it is gone."""
    parts: list[Node] = []
    part: Node | None = node
    while part is not None and part.parent is not None and part.end > start:
        parts.append(part)
        part = part.parent
    parts.reverse()
    return parts
