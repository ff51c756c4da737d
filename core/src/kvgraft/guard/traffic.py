"""Checks of data to and from the store: names, lengths and places (S2, S4, S5, S8).

Every step of every prefetch goes through one place, and so does whatever is stored. A step sees
part of a prefetch: each call of the store is compared with the pages it is made for, and each
piece that is hung into the tree with the slots that the store was given for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kvgraft.errors import ContractViolation
from kvgraft.guard.paths import deepest, look
from kvgraft.storage import Address
from kvgraft.storage.keys import PageChain
from kvgraft.storage_tier.fetching import Fetch
from kvgraft.storage_tier.naming import labels
from kvgraft.storage_tier.slabs import Rows
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.node import Node

if TYPE_CHECKING:
    from kvgraft.storage_tier import StorageTier

__all__ = ["Traffic"]

Pages = npt.NDArray[np.int64]


class _Call(NamedTuple):
    """A call of the store that is due.

    Attributes:
        what: what it is for, in a message.
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
    """Watches what one storage tier asks of its store, and where it hangs what came.

    Args:
        tier: the tier.
        period: addresses are compared in every so many calls of the store, of each kind.
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
        storage: Any = tier.client
        storing: Any = tier.storing
        prefetching: Any = tier.prefetching
        storage.exists = self._looking(storage.exists)
        storage.get = self._fetching(storage.get)
        storage.set = self._storing(storage.set)
        storing._send = self._sending(storing._send)
        prefetching._step = self._stepping(prefetching._step)

    # -- who calls the store

    def _stepping(self, step: Callable[[Fetch], bool]) -> Callable[[Fetch], bool]:
        @wraps(step)
        def stepped(fetch: Fetch) -> bool:
            if fetch not in self._watched:
                self._watch(fetch)
            self._fetch = fetch
            try:
                return step(fetch)
            finally:
                self._fetch = None

        return stepped

    def _sending(self, send: Callable[..., None]) -> Callable[..., None]:
        @wraps(send)
        def sent(
            node: Node, receipt: object, components: Sequence[TreeComponent], buffers: object
        ) -> None:
            self._sent = node, components
            try:
                send(node, receipt, components, buffers)
            finally:
                self._sent = None

        return sent

    # -- calls of the store

    def _looking(self, exists: Callable[..., Any]) -> Callable[..., Any]:
        due = self._in_turn()

        @wraps(exists)
        def looked(addresses: Sequence[Address], *given: Any, **named: Any) -> Any:
            if self._fetch is not None and due():
                self._compare(addresses, self._call_of(self._fetch, "looked for"))
            return exists(addresses, *given, **named)

        return looked

    def _fetching(self, get: Callable[..., Any]) -> Callable[..., Any]:
        due = self._in_turn()

        @wraps(get)
        def fetched(addresses: Sequence[Address], buffers: Any, *given: Any, **named: Any) -> Any:
            fetch = self._fetch
            if fetch is not None:
                self._check_worth(fetch)
                self._note_places(fetch, buffers)
                if due():
                    self._compare(addresses, self._call_of(fetch, "fetched"))
            return get(addresses, buffers, *given, **named)

        return fetched

    def _storing(self, put: Callable[..., Any]) -> Callable[..., Any]:
        due = self._in_turn()

        @wraps(put)
        def stored(addresses: Sequence[Address], *given: Any, **named: Any) -> Any:
            if self._sent is not None and due():
                self._compare(addresses, self._call_for(*self._sent))
            return put(addresses, *given, **named)

        return stored

    def _in_turn(self) -> Callable[[], bool]:
        """Says whether a call is looked at; each kind is counted by itself."""
        count = 0

        def due() -> bool:
            nonlocal count
            count += 1
            return count % self._period == 0

        return due

    # -- names

    def _call_of(self, fetch: Fetch, what: str) -> _Call:
        """The call that a prefetch makes now."""
        chain = self._watched[fetch].chain
        parts = [(part.component, part.pages) for part in fetch._asked]
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
        chain = PageChain(self.tier.fingerprint, self.tree.namespace(root))
        if chain.namespace == self._chain.namespace and tokens.startswith(self._tokens):
            chain = self._chain
        chain.grow(tokens)
        self._chain, self._tokens = chain, tokens
        firsts = [node.end - 1 if component.is_state else node.start for component in components]
        pages = [np.arange(first, node.end) for first in firsts]
        return _Call(f"{node!r}: stored", chain, list(zip(components, pages)))

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
        if fetch._rounds == 0 and fetch._target < least:
            raise ContractViolation(
                "S2",
                None,
                f"a prefetch goes for page {fetch._target}; from page {least} on it is worth it",
            )

    def _note_places(self, fetch: Fetch, buffers: Rows) -> None:
        """Remember which slots the store is given for which pages."""
        places = self._watched[fetch].places
        for part, (_, slots) in zip(fetch._asked, buffers._parts):
            own = places[part.component.index]
            own[part.pages - fetch.start] = slots.reshape(len(part.pages), -1)

    def _watch(self, fetch: Fetch) -> None:
        """Published pages are in their places (S5), and every component can resume there (S4)."""
        chain = PageChain(self.tier.fingerprint, fetch.key.namespace)
        self._watched[fetch] = _Fetched(chain, [np.full_like(each, -1) for each in fetch._slots])
        arrive, reached = fetch._arrive, fetch.reached

        def arrived(end: int) -> bool:
            since, had = fetch.tip.end, [mask.copy() for mask in fetch._arrived]
            went_on = arrive(end)
            if went_on:
                self._check_places(fetch, since, had)
            return went_on

        def published(boundary: int) -> None:
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

        watched: Any = fetch
        watched._arrive, watched.reached = arrived, published

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
                taken = had[index][part] & ~fetch._arrived[index][part]
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
