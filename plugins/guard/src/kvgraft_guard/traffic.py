"""Checks of data to and from the store: names, lengths and places (S2, S4, S5, S8).

Every step of every prefetch goes through one place, and so does every write. A step sees part of a
prefetch: each call of the store is compared with its pages, and each piece that is inserted into
the tree with the slots that the store filled for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kvgraft.errors import ContractViolation
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.node import Node
from kvgraft.tree.pinning import Receipt
from kvgraft_guard.paths import deepest, look
from kvgraft_storage import Address, Status, Storage, StorageTicket
from kvgraft_storage.keys import PageChain
from kvgraft_storage.memory import Buffers
from kvgraft_storage.tier.fetching import Fetch
from kvgraft_storage.tier.naming import labels
from kvgraft_storage.tier.prefetching import Prefetching
from kvgraft_storage.tier.slabs import Rows
from kvgraft_storage.tier.storing import Sent, Storing, parts_of

if TYPE_CHECKING:
    from kvgraft_storage.tier import StorageTier

__all__ = ["GuardedClient", "GuardedFetch", "GuardedPrefetching", "GuardedStoring", "Traffic"]

Pages = npt.NDArray[np.int64]


class _Call(NamedTuple):
    """A call of the store that is due.

    Attributes:
        what: its purpose, in a message.
        chain: the page hashes of the sequence.
        parts: components, and the pages of each: for each page an address per label.
    """

    what: str
    chain: PageChain
    parts: list[tuple[TreeComponent, Pages]]

    def addresses(self) -> Iterator[tuple[TreeComponent, int, Address]]:
        """In the order the store is to be given them, with component and page."""
        for component, pages in self.parts:
            names = labels(component)
            for page in pages.tolist():
                for name in names:
                    yield component, page, self.chain.address(page, name)


class _Fetched(NamedTuple):
    """A prefetch that is watched.

    Attributes:
        chain: the hashes of its sequence, as far as it went.
        places: per component, int32 `[n_pages, slots_per_page]`, the HOST slots that the store was
            given for its pages.
    """

    chain: PageChain
    places: list[npt.NDArray[np.int32]]


class Traffic:
    """Watches one storage tier's calls to its store, and where arrived pages are inserted.

    Args:
        tier: the tier.
        period: addresses are compared in one of this many calls of the store, of each kind.
    """

    def __init__(self, tier: StorageTier, period: int) -> None:
        self.tier = tier
        self.tree = tier.tree
        self._period = period
        self._watched: WeakKeyDictionary[Fetch, _Fetched] = WeakKeyDictionary()
        self._fetch: Fetch | None = None
        self._sent: tuple[Node, Sequence[TreeComponent]] | None = None
        self._tokens = b""
        self._chain = PageChain(tier.fingerprint)
        self._calls = Counter[str]()

    # -- callers of the store

    @contextmanager
    def stepping(self, fetch: Fetch) -> Iterator[None]:
        """A step of one prefetch: calls of the store within it belong to it."""
        if fetch not in self._watched:
            chain = self._new_chain(fetch.key.namespace)
            places = [np.full_like(each, -1) for each in fetch.slots]
            self._watched[fetch] = _Fetched(chain, places)
        self._fetch = fetch
        try:
            yield
        finally:
            self._fetch = None

    @contextmanager
    def sending(self, node: Node, components: Sequence[TreeComponent]) -> Iterator[None]:
        """A node is sent to the store."""
        self._sent = node, components
        try:
            yield
        finally:
            self._sent = None

    # -- calls of the store

    def looks(self, addresses: Sequence[Address]) -> None:
        """The store will be asked for presence."""
        if self._fetch is not None and self._is_due("exists"):
            self._compare(addresses, self._call_of(self._fetch, "looked for"))

    def fetches(self, addresses: Sequence[Address], buffers: Any) -> None:
        """The store will read payloads."""
        fetch = self._fetch
        if fetch is not None:
            self._check_worth(fetch)
            self._note_places(fetch, buffers)
            if self._is_due("get"):
                self._compare(addresses, self._call_of(fetch, "fetched"))

    def stores(self, addresses: Sequence[Address]) -> None:
        """The store will write payloads."""
        if self._sent is not None and self._is_due("set"):
            self._compare(addresses, self._call_for(*self._sent))

    def _is_due(self, call: str) -> bool:
        """Whether a call is looked at; each kind is counted by itself."""
        self._calls[call] += 1
        return self._calls[call] % self._period == 0

    # -- names

    def _call_of(self, fetch: Fetch, what: str) -> _Call:
        """The call that a prefetch makes now."""
        chain = self._watched[fetch].chain
        parts = [(part.component, part.pages) for part in fetch.parts]
        last = max((int(pages.max()) + 1 for _, pages in parts), default=0)
        with memoryview(fetch.key.data) as tokens:
            chain.grow(tokens[: last * self.tree.page_bytes])
        return _Call(f"a prefetch from page {fetch.start}: {what}", chain, parts)

    def _call_for(self, node: Node, components: Sequence[TreeComponent]) -> _Call:
        """The call that stores a node; its path is hashed anew where needed."""
        path = [node]
        while (above := path[-1].parent) is not None:
            path.append(above)
        root = path.pop()
        tokens = b"".join([each.key for each in reversed(path)])
        chain = self._new_chain(self.tree.namespace(root))
        if chain.page(-1) == self._chain.page(-1) and tokens.startswith(self._tokens):
            chain = self._chain
        chain.grow(tokens)
        self._chain, self._tokens = chain, tokens
        firsts = [node.end - 1 if component.is_state else node.start for component in components]
        pages = [np.arange(first, node.end) for first in firsts]
        return _Call(f"{node!r}: stored", chain, list(zip(components, pages)))

    def _new_chain(self, namespace: object) -> PageChain:
        """For a sequence of a namespace, in its version of now."""
        root = self.tier.versions.root(namespace)
        return PageChain(self.tier.fingerprint, namespace, root)

    def _compare(self, said: Sequence[Address], call: _Call) -> None:
        """Addresses are those that tokens, namespace and component give, in order (S8)."""
        wanted = list(call.addresses())
        given = list(said[0 : len(said)])
        wrong = [at for at, (a, b) in enumerate(zip(given, wanted)) if a != b[2]]
        if not wrong and len(given) == len(wanted):
            return
        component, page, _ = wanted[wrong[0] if wrong else min(len(given), len(wanted) - 1)]
        raise ContractViolation(
            "S8",
            component.name,
            f"{call.what} under {len(given)} addresses, of which {len(wrong)} are not those of its "
            f"tokens and namespace, page {page} the first; there are {len(wanted)}",
        )

    # -- prefetches

    def _check_worth(self, fetch: Fetch) -> None:
        """It goes for no less than the threshold (S2); where something is missing, for less."""
        threshold = -(-self.tier.settings.threshold_tokens // self.tree.page_size)
        least = fetch.anchor + (1 if fetch.spare else max(1, threshold))
        if fetch.rounds == 0 and fetch.target < least:
            raise ContractViolation(
                "S2",
                None,
                f"a prefetch goes for page {fetch.target}; from page {least} on it is worth it",
            )

    def _note_places(self, fetch: Fetch, buffers: Rows) -> None:
        """Remember which slots the store is given for which pages."""
        places = self._watched[fetch].places
        for part, (_, slots) in zip(fetch.parts, buffers.parts):
            own = places[part.component.index]
            own[part.pages - fetch.start] = slots.reshape(len(part.pages), -1)

    def arrives(self, fetch: Fetch, arrive: Callable[[int], bool], end: int) -> bool:
        """A piece is inserted into the tree: each page is in its place (S5)."""
        if fetch not in self._watched:
            return arrive(end)
        since, had = fetch.tip.end, [mask.copy() for mask in fetch.arrived]
        went_on = arrive(end)
        if went_on:
            self._check_places(fetch, since, had)
        return went_on

    def publishes(self, fetch: Fetch, reached: Callable[[int], None], boundary: int) -> None:
        """A boundary is published: every component can resume from it (S4)."""
        before = fetch.boundary
        reached(boundary)
        shelf = look(self.tree, fetch.key, boundary)
        anchor = deepest(self.tree, shelf, boundary, device_only=False)
        if before < boundary and anchor < boundary:
            raise ContractViolation(
                "S4",
                None,
                f"a prefetch published page {boundary}; the components accept {anchor}",
            )

    def acknowledged(self, nodes: list[tuple[Node, int]], n_ok: int) -> None:
        """The store took every payload of data that counts as stored from now on (S7)."""
        n_slots = sum(
            component.n_slots(node)
            for node, bits in nodes
            for component in self.tree.components
            if bits >> component.index & 1
        )
        if n_slots > n_ok:
            raise ContractViolation(
                "S7",
                None,
                f"{n_slots} slots of {len(nodes)} nodes count as stored, the store took {n_ok} of "
                "them",
            )

    def _check_places(self, fetch: Fetch, since: int, had: list[npt.NDArray[np.bool_]]) -> None:
        """Pages the tree took stand in the slots they arrived in (S5).

        Args:
            fetch: whose tip they lead to.
            since: the boundary they begin at, in pages.
            had: per component, the pages that had arrived and were not the tree's.
        """
        places = self._watched[fetch].places
        node = fetch.tip
        while node.parent is not None and node.end > since:
            for component, cell in zip(self.tree.components, node.cells):
                index = component.index
                first = node.end - 1 if component.is_state else node.start
                part = slice(first - fetch.start, node.end - fetch.start)
                taken = had[index][part] & ~fetch.arrived[index][part]
                if not taken.any():
                    continue
                there = np.frombuffer(cell.host or b"", np.int32).reshape(-1, len(places[index][0]))
                if len(there) == len(taken):
                    taken &= (there != places[index][part]).any(axis=1)
                if taken.any():
                    raise ContractViolation(
                        "S5",
                        component.name,
                        f"{node!r}: {int(taken.sum())} pages are published in other slots than "
                        f"they arrived in, page {first + int(taken.argmax())} the first",
                    )
            node = node.parent


class GuardedClient(Storage):
    """A store's client whose calls are compared with their purpose."""

    traffic: Traffic | None = None

    def exists(
        self, addresses: Sequence[Address], deadline_s: float | None = None
    ) -> StorageTicket:
        if self.traffic is not None:
            self.traffic.looks(addresses)
        return super().exists(addresses, deadline_s)

    def get(
        self,
        addresses: Sequence[Address],
        buffers: Sequence[object] | Buffers,
        deadline_s: float | None = None,
    ) -> StorageTicket:
        if self.traffic is not None:
            self.traffic.fetches(addresses, buffers)
        return super().get(addresses, buffers, deadline_s)

    def set(
        self,
        addresses: Sequence[Address],
        buffers: Sequence[object] | Buffers,
        deadline_s: float | None = None,
        *,
        only_missing: bool = False,
    ) -> StorageTicket:
        if self.traffic is not None:
            self.traffic.stores(addresses)
        return super().set(addresses, buffers, deadline_s, only_missing=only_missing)


class GuardedStoring(Storing):
    """The data to be stored, with the node it belongs to."""

    traffic: Traffic | None = None

    def _send(
        self,
        node: Node,
        receipt: Receipt | None,
        components: Sequence[TreeComponent],
        buffers: Buffers | Sequence[memoryview],
    ) -> None:
        if self.traffic is None:
            super()._send(node, receipt, components, buffers)
            return
        with self.traffic.sending(node, components):
            super()._send(node, receipt, components, buffers)

    def _take_in(self, sent: Sent) -> None:
        if self.traffic is None or sent.receipt is None:
            super()._take_in(sent)
            return
        nodes = parts_of(sent.receipt.anchor, sent.first)
        n_ok = sent.ticket.statuses.count(Status.OK)
        was = [self._bits(node, sent.store) for node in nodes]
        super()._take_in(sent)
        self.traffic.acknowledged(
            [(node, self._bits(node, sent.store) & ~bits) for node, bits in zip(nodes, was)], n_ok
        )

    def _bits(self, node: Node, store: int) -> int:
        names = node.names
        return names.stored if names is not None and names.store == store else 0


class GuardedFetch(Fetch):
    """A prefetch at work, whose pages are compared with where they arrived."""

    traffic: Traffic | None = None

    def _arrive(self, end: int) -> bool:
        if self.traffic is None:
            return super()._arrive(end)
        return self.traffic.arrives(self, super()._arrive, end)

    def reached(self, boundary: int) -> None:
        if self.traffic is None:
            super().reached(boundary)
        else:
            self.traffic.publishes(self, super().reached, boundary)


class GuardedPrefetching(Prefetching):
    """Prefetches whose steps are distinguished."""

    new_fetch = GuardedFetch
    traffic: Traffic | None = None

    def _step(self, fetch: Fetch) -> bool:
        if self.traffic is None:
            return super()._step(fetch)
        if isinstance(fetch, GuardedFetch):
            fetch.traffic = self.traffic
        with self.traffic.stepping(fetch):
            return super()._step(fetch)
