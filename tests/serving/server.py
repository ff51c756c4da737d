"""An engine that computes nothing but stamps, and reads the slots that attention would read."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvgraft import Tier, TokenKey
from kvgraft.admission import Decision
from kvgraft.cache import Cache
from kvgraft.requests.request import Request
from kvgraft.tree.component import TreeComponent

__all__ = ["OutOfSlotsError", "Server", "ledgers", "slots_on", "tree_dump"]


class OutOfSlotsError(AssertionError):
    """An admitted request did not get its promised slots (A7)."""


class Server:
    """Runs requests on a cache.

    Every row is stamped with a number made of component, plane and the tokens it was computed
    from, so that a row read later is right or it is not.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self._planes = {
            (each.name, tier): {
                (spec.layer, spec.name): rows.numpy() for spec, rows in zip(pool.specs, pool.lanes)
            }
            for each in cache.mounted
            for tier, pool in (("device", each.component.device), ("host", each.component.host))
            if pool is not None
        }

    # -- the life of a request

    def begin(self, tokens: Iterable[int], reserve: int = 0, chunk: int | None = None) -> Request:
        return self.cache.begin(TokenKey(tokens), reserve=reserve, chunk=chunk)

    def start(self, tokens: Iterable[int], reserve: int = 0, chunk: int | None = None) -> Request:
        """Begin, admit and load back; the cache must have the room."""
        request = self.begin(tokens, reserve, chunk)
        decision = self.cache.admit(request)
        assert decision.admitted, decision
        self.load_back(request)
        return request

    def admit(self, request: Request) -> Decision:
        return self.cache.admit(request)

    def load_back(self, request: Request) -> None:
        """Load back and wait for its own transfers, and no others; they must deliver."""
        self.cache.load_back(request)
        for transfer in list(request.waits):
            assert transfer.ticket.wait(10)
        self.cache.poll()
        assert request.ready
        assert not request.load_failed

    def step(self, request: Request, n_tokens: int) -> None:
        """Allocate, read, compute."""
        if not self.cache.allocate(request, n_tokens):
            raise OutOfSlotsError(
                f"{n_tokens} tokens at {request.computed} were promised and refused"
            )
        self.read(request)
        self.write(request, request.computed + n_tokens)
        self.cache.computed(request, n_tokens)

    def promised_chunk(self, request: Request) -> int:
        """The prefill step admission promised: cut at states to capture, else at whole pages."""
        size, start = self.cache.tree.page_size, request.computed
        end = min(request.prompt, start + request.chunk)
        end = min([end, *(page * size for page in request.checkpoints if page * size > start)])
        if end < request.prompt and end // size * size > start:
            end = end // size * size
        return end - start

    def prefill(self, request: Request) -> None:
        """Compute the prompt in the steps that were promised."""
        while request.computed < request.prompt:
            promised = self.promised_chunk(request)
            n_tokens = self.cache.next_chunk(request)
            if n_tokens != promised:
                raise OutOfSlotsError(
                    f"{n_tokens} tokens instead of {promised} at {request.computed}"
                )
            self.step(request, n_tokens)

    def decode(self, request: Request, n_tokens: int) -> None:
        for _ in range(n_tokens):
            request.key.extend([request.computed + 10_000])
            self.step(request, 1)

    def serve(self, tokens: Iterable[int], decode: int = 0, chunk: int | None = None) -> int:
        """A whole life, alone; returns the tokens cached."""
        request = self.start(tokens, decode, chunk)
        self.prefill(request)
        self.decode(request, decode)
        cached = self.cache.finish(request)
        self.cache.drain()
        return cached

    def empty_device(self) -> None:
        """Evict everything that nobody pins."""
        for component in self.cache.tree.components:
            self.cache.evict(component.name, component.device.capacity)

    # -- bytes

    def write(self, request: Request, end: int) -> None:
        """Stamp tokens up to `end` into the request's slots."""
        first = request.computed // self.cache.tree.page_size
        last = -(-end // self.cache.tree.page_size)
        for component in self.cache.tree.components:
            for tier, slots, wanted in self._rows(request, component, end, range(first, last)):
                for key, rows in self._planes[component.name, tier].items():
                    rows[slots] = self._stamps(component, key, wanted)[:, None]

    def read(self, request: Request) -> None:
        """Everything the next token needs is on DEVICE and right (R5, L3)."""
        computed = request.computed
        if not computed:
            return
        boundary = -(-computed // self.cache.tree.page_size)
        for component in self.cache.tree.components:
            pages = [
                page for span in component.reach_pages.spans(boundary) for page in range(*span)
            ]
            for tier, slots, wanted in self._rows(request, component, computed, pages):
                assert min(slots, default=0) >= 0, (
                    f"{component.name}: a page of the {computed} tokens before is missing"
                )
                for key, rows in self._planes[component.name, tier].items():
                    stamps = self._stamps(component, key, wanted)[:, None]
                    assert (rows[slots] == stamps).all(), (
                        f"{component.name} {tier}: other bytes than those of {computed} tokens"
                    )

    def _rows(
        self, request: Request, component: TreeComponent, end: int, pages: Sequence[int]
    ) -> Iterator[tuple[str, list[int], list[tuple[bytes, int]]]]:
        """Per tier, slots and their stamps: tokens computed from, row of the page."""
        data, size = bytes(request.key.data), self.cache.tree.page_size
        if component.is_state:
            yield "device", [self.cache.state_slot(request, component.name)], [(data[: end * 4], 0)]
            return
        per_page = component.slots_per_page
        wanted = [
            (data[: min(end, (page + 1) * size) * 4], sub)
            for page in pages
            for sub in range(per_page)
        ]
        tables = {"device": self.cache.table(request, component.name)}
        if component.home_is_host:
            tables["host"] = self.cache.host_table(request, component.name)
        for tier, table in tables.items():
            slots = [
                int(table[slot]) if slot < len(table) else -1
                for page in pages
                for slot in range(page * per_page, (page + 1) * per_page)
            ]
            yield tier, slots, wanted

    def _stamps(
        self, component: TreeComponent, key: tuple[int, str], wanted: list[tuple[bytes, int]]
    ) -> npt.NDArray[np.int16]:
        seed = zlib.crc32(f"{component.name} {key}".encode())
        return np.array([zlib.crc32(data, seed + sub) % 30_000 + 1 for data, sub in wanted])


def ledgers(cache: Cache) -> dict[tuple[str, str], tuple[int, ...]]:
    """Every term of every pool's equation."""
    books: dict[tuple[str, str], tuple[int, ...]] = {}
    for component, private in zip(cache.tree.components, cache.private):
        for ledger in (component.device, component.host, *private):
            if ledger is not None:
                key = (component.name, f"{ledger.tier.value} {len(books)}")
                books[key] = (*ledger.counts().values(), ledger.promised)
    return books


def tree_dump(cache: Cache) -> list[tuple[object, ...]]:
    """The tree's content, page by page: splits do not show, anything else does."""
    dump: list[tuple[object, ...]] = []
    for node in cache.tree.nodes():
        path = []
        above = node
        while above.parent is not None:
            path.append(above.key)
            above = above.parent
        prefix = b"".join(reversed(path[1:]))
        for page in range(node.end - node.start):
            end = (page + 1) * cache.tree.page_bytes
            last = page + 1 == node.end - node.start
            held = []
            for component in cache.tree.components:
                cell = node.cells[component.index]
                if component.is_state and not last:
                    continue
                size = 4 * (1 if component.is_state else component.slots_per_page)
                at = 0 if component.is_state else page * size
                held.append(
                    (
                        component.name,
                        cell.device and cell.device[at : at + size],
                        cell.host and cell.host[at : at + size],
                        cell.incoming and cell.incoming.slots[at : at + size],
                        cell.device_pins,
                        cell.host_pins,
                    )
                )
            dump.append((prefix + node.key[:end], tuple(held)))
    return sorted(dump, key=repr)


def slots_on(cache: Cache, tokens: Iterable[int], component: str, tier: Tier) -> list[int | None]:
    """Per page of `tokens`, the component's first slot on a tier; None where it has none."""
    key, tree_component = TokenKey(tokens), cache.tree.by_name[component]
    found: list[int | None] = [None] * (key.n_tokens // cache.tree.page_size)
    page_bytes = cache.tree.page_bytes
    node = cache.tree.root(None)
    while node.children is not None:
        child = node.child(bytes(key.data[node.end * page_bytes :][:page_bytes]))
        if child is None or not key.data.startswith(child.key, node.end * page_bytes):
            break
        node = child
        cell = node.cells[tree_component.index]
        slots = cell.device if tier is Tier.DEVICE else cell.host
        if slots is not None:
            numbers = memoryview(slots).cast("i").tolist()
            if tree_component.is_state:
                found[node.end - 1] = numbers[0]
            else:
                found[node.start : node.end] = numbers[:: tree_component.slots_per_page]
    return found
