"""An engine that computes nothing but stamps, and reads what attention would read."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from kvgraft import Tier, TokenKey
from kvgraft.admission import Decision
from kvgraft.cache import Cache
from kvgraft.request import Request
from kvgraft.tree.track import Track

__all__ = ["OutOfMemory", "Server", "ledgers", "slots_on", "tree_dump"]


class OutOfMemory(AssertionError):
    """An admitted request did not get what it was promised (A7)."""


class Server:
    """Runs requests on a cache.

    Every row is stamped with a number made of component, plane and the tokens it was computed
    from, so that a row read later is right or it is not.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    # -- the life of a request

    def begin(
        self, tokens: Iterable[int], reserve: int = 0, chunk: int | None = None
    ) -> Request:
        return self.cache.begin(TokenKey(tokens), reserve=reserve, chunk=chunk)

    def start(
        self, tokens: Iterable[int], reserve: int = 0, chunk: int | None = None
    ) -> Request:
        """Begin, admit and load back; the cache must have the room."""
        request = self.begin(tokens, reserve, chunk)
        decision = self.cache.admit(request)
        assert decision.admitted, decision
        self.load_back(request)
        return request

    def admit(self, request: Request) -> Decision:
        return self.cache.admit(request)

    def load_back(self, request: Request) -> None:
        """Load back and wait; it must deliver."""
        self.cache.load_back(request)
        self.cache.drain()
        assert request.ready
        assert not request.load_failed

    def step(self, request: Request, n_tokens: int) -> None:
        """Allocate, read, compute."""
        if not self.cache.allocate(request, n_tokens):
            raise OutOfMemory(f"{n_tokens} tokens at {request.computed} were promised and refused")
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
                raise OutOfMemory(f"{n_tokens} tokens instead of {promised} at {request.computed}")
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
        for track in self.cache.tree.tracks:
            self.cache.evict(track.name, track.device.capacity)

    # -- bytes

    def write(self, request: Request, end: int) -> None:
        """Stamp tokens up to `end` into the request's slots."""
        size = self.cache.tree.page_size
        tokens = request.key.tokens()
        for track in self.cache.tree.tracks:
            device, host = self._lanes(track)
            if track.is_state:
                slot = self.cache.state_slot(request, track.name)
                for key, rows in device.items():
                    rows[slot] = _stamp(track, key, tokens[:end].tobytes(), 0)
                continue
            table = self.cache.table(request, track.name).tolist()
            mirror: list[int] = []
            if track.home_is_host:
                mirror = self.cache.host_table(request, track.name).tolist()
            for page in range(request.computed // size, -(-end // size)):
                data = tokens[: min(end, (page + 1) * size)].tobytes()
                for sub in range(track.slots_per_page):
                    position = page * track.slots_per_page + sub
                    for key, rows in device.items():
                        rows[table[position]] = _stamp(track, key, data, sub)
                    if mirror:
                        for key, rows in host.items():
                            rows[mirror[position]] = _stamp(track, key, data, sub)

    def read(self, request: Request) -> None:
        """Everything the next token needs is on DEVICE and right (R5, L3)."""
        size = self.cache.tree.page_size
        tokens, computed = request.key.tokens(), request.computed
        if not computed:
            return
        for track in self.cache.tree.tracks:
            device, host = self._lanes(track)
            if track.is_state:
                slot = self.cache.state_slot(request, track.name)
                for key, rows in device.items():
                    want = _stamp(track, key, tokens[:computed].tobytes(), 0)
                    assert rows[slot].eq(want).all(), f"{track.name}: not the state at {computed}"
                continue
            table = self.cache.table(request, track.name).tolist()
            mirror = []
            if track.home_is_host:
                mirror = self.cache.host_table(request, track.name).tolist()
            for span in track.reach_pages.spans(-(-computed // size)):
                for page in range(*span):
                    data = tokens[: min(computed, (page + 1) * size)].tobytes()
                    for sub in range(track.slots_per_page):
                        position = page * track.slots_per_page + sub
                        slot = table[position] if position < len(table) else -1
                        assert slot >= 0, f"{track.name}: page {page} of {computed} tokens missing"
                        for key, rows in device.items():
                            want = _stamp(track, key, data, sub)
                            assert rows[slot].eq(want).all(), (
                                f"{track.name}: page {page} of {computed} tokens holds other bytes"
                            )
                        if mirror:
                            for key, rows in host.items():
                                want = _stamp(track, key, data, sub)
                                assert rows[mirror[position]].eq(want).all()

    def _lanes(self, track: Track):  # type: ignore[no-untyped-def]
        component = self.cache.mounted[track.index].component
        pools = (component.device, component.host)
        return tuple(
            {(spec.layer, spec.name): rows for spec, rows in zip(pool.specs, pool.lanes)}
            if pool is not None
            else {}
            for pool in pools
        )


def _stamp(track: Track, key: tuple[int, str], tokens: bytes, sub: int) -> int:
    return zlib.crc32(tokens, zlib.crc32(f"{track.name} {key} {sub}".encode())) % 30_000 + 1


def ledgers(cache: Cache) -> dict[tuple[str, str], tuple[int, ...]]:
    """Every term of every pool's equation."""
    books = {}
    for track, private in zip(cache.tree.tracks, cache.private):
        for ledger in (track.device, track.host, *private):
            if ledger is not None:
                key = (track.name, f"{ledger.tier.value} {len(books)}")
                books[key] = (*ledger.counts().values(), ledger.promised)
    return books


def tree_dump(cache: Cache) -> list[tuple[object, ...]]:
    """What the tree holds, page by page: splits do not show, anything else does."""
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
            for track in cache.tree.tracks:
                cell = node.cells[track.index]
                if track.is_state and not last:
                    continue
                size = 4 * (1 if track.is_state else track.slots_per_page)
                at = 0 if track.is_state else page * size
                held.append(
                    (
                        track.name,
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
    key, track = TokenKey(tokens), cache.tree.by_name[component]
    found: list[int | None] = [None] * (key.n_tokens // cache.tree.page_size)
    page_bytes = cache.tree.page_bytes
    node = cache.tree.root(None)
    while node.children is not None:
        child = node.child(bytes(key.data[node.end * page_bytes :][:page_bytes]))
        if child is None or not key.data.startswith(child.key, node.end * page_bytes):
            break
        node = child
        cell = node.cells[track.index]
        slots = cell.device if tier is Tier.DEVICE else cell.host
        if slots is not None:
            numbers = memoryview(slots).cast("i").tolist()
            if track.is_state:
                found[node.end - 1] = numbers[0]
            else:
                found[node.start : node.end] = numbers[:: track.slots_per_page]
    return found
