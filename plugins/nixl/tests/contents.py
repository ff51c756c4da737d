"""An engine whose model writes bytes that follow from the tokens alone, and compares them.

A page holds bytes of all tokens up to its end, a state those of all tokens before it. So data of
other tokens, of another page or layer, or of another plane is found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvgraft import Cache, Request, TokenKey

PAGE = 16

SETS: dict[str, dict[str, dict[str, Any]]] = {
    "full": {"full": {}},
    "window": {"full": {"n_layers": 4}, "swa": {"window": 64, "n_layers": 4}},
    "states": {"full": {}, "mamba": {"states": 24, "host_states": 24}},
    "hybrid": {"full": {}, "swa": {"window": 48}, "mamba": {"states": 24, "host_states": 24}},
    "window alone": {"swa": {"window": 64}},
    "home on host": {"hisparse": {"hot_tokens": 32, "max_running": 8}},
}
"""Components by the name of a set."""

LARGE = "large"
SETS_AND_LARGE = {
    **SETS,
    LARGE: {"full": {"n_layers": 8, "n_kv_heads": 8, "head_dim": 64, "dtype": "float32"}},
}
"""With one of 32 KiB a token, whose reads take a while."""


def open_cache(components: str, **settings: Any) -> Cache:
    given = {"page_size": PAGE, "device_tokens": 2048, "host_tokens": 4096, "load": None}
    return Cache.open(SETS_AND_LARGE[components], **{**given, **settings})


def words(n_tokens: int, seed: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(1, 30_000, n_tokens).tolist()
    return found


def _bytes(tokens: memoryview, *name: object) -> Any:
    seed = xxhash.xxh3_64_intdigest(tokens, xxhash.xxh3_64_intdigest(repr(name).encode()))
    return np.random.default_rng(seed)


def _rows(pool: Any) -> list[tuple[Any, npt.NDArray[np.uint8]]]:
    """The planes of a pool or a mirror, with uint8 `[n_slots, nbytes]` of each."""
    planes = [(spec, pool.plane(spec.layer, spec.name)) for spec in pool.specs]
    return [
        (spec, plane.reshape(len(plane), -1).view(torch.uint8).numpy())
        if plane.is_contiguous()
        else (spec, _strided(pool, spec))
        for spec, plane in planes
    ]


def _strided(mirror: Any, spec: Any) -> npt.NDArray[np.uint8]:
    start = mirror.offsets[mirror.specs.index(spec)]
    nbytes = spec.dtype.itemsize * int(np.prod(spec.shape))
    found: npt.NDArray[np.uint8] = mirror.slab.numpy()[:, start : start + nbytes]
    return found


class Engine:
    """Computes requests of one cache."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.n_computed = 0

    def begin(self, key: TokenKey, **arguments: Any) -> Request | None:
        """A request that is admitted and loaded back; None if there is no room."""
        request = self.cache.begin(key, **arguments)
        for _ in range(3):
            if not self.cache.admit(request).admitted:
                self.cache.drain()
                continue
            self.cache.load_back(request)
            self.cache.drain()
            if not request.load_failed:
                return request
            self.cache.restart(request)
        self.cache.abort(request)
        return None

    def prefill(self, request: Request, end: int | None = None) -> None:
        while request.computed < (end or request.prompt):
            limit = None if end is None else end - request.computed
            n_tokens = self.cache.next_chunk(request, limit)
            assert n_tokens
            self.compute(request, n_tokens)

    def compute(self, request: Request, n_tokens: int) -> None:
        assert self.cache.allocate(request, n_tokens)
        self._write(request, request.computed + n_tokens, request.computed // PAGE)
        self.n_computed += n_tokens
        self.cache.computed(request, n_tokens)

    def serve(self, tokens: list[int], namespace: object = None) -> int:
        """One request from begin to finish; its cached tokens, -1 if it was not admitted."""
        request = self.begin(TokenKey(tokens, namespace), chunk=64)
        if request is None:
            return -1
        self.expect(request, request.anchor_tokens // PAGE)
        cached = request.anchor_tokens
        self.prefill(request)
        self.cache.finish(request)
        return cached

    def _write(self, request: Request, end: int, first: int) -> None:
        for rows, slot, name in self._places(request, end, first):
            for spec, plane in rows:
                plane[slot] = np.frombuffer(name(spec).bytes(plane.shape[1]), np.uint8)

    def expect(self, request: Request, boundary: int) -> None:
        """All data that the request's reaches need at a boundary is what computing gives."""
        for rows, slot, name in self._places(request, boundary * PAGE, 0, boundary):
            for spec, plane in rows:
                wanted = np.frombuffer(name(spec).bytes(plane.shape[1]), np.uint8)
                assert np.array_equal(plane[slot], wanted), (spec.layer, spec.name, slot, boundary)

    def _places(self, request: Request, end: int, first: int, boundary: int = 0) -> Any:
        """Rows, slot and generator of bytes of all pages up to token `end`, and of the states."""
        tokens = memoryview(bytes(request.key.data))
        for each in self.cache.mounted:
            component = self.cache.tree.component(each.name)
            if component.is_state:
                own = request.state_component(component.index)
                if own is None or own.live is None or (boundary and request.computed != end):
                    continue
                slot = self.cache.state_slot(request, each.name)
                name = _named(tokens[: 4 * end], each.name)
                yield _rows(each.component.device), slot, name
                continue
            pages = range(first, end // PAGE)
            if boundary:
                spans = component.reach_pages.spans(boundary)
                pages = [page for start, stop in spans for page in range(start, stop)]  # type: ignore[assignment]
            tables: list[Any] = [(each.component.device, self.cache.table(request, each.name))]
            if component.home_is_host:
                tables.append((each.component.host, self.cache.host_table(request, each.name)))
            for pool, table in tables:
                rows = _rows(pool)
                for page in pages:
                    slot = int(table[page])
                    assert slot >= 0 or not boundary, (each.name, page, boundary)
                    if slot >= 0:
                        yield rows, slot, _named(tokens[: 4 * PAGE * (page + 1)], each.name)


def _named(tokens: memoryview, component: str) -> Any:
    return lambda spec: _bytes(tokens, component, spec.layer, spec.name)
