"""A store in memory that outlives the caches attached to it, and can be held up."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kvgraft import GuardMode, TokenKey
from kvgraft.cache import Cache
from kvgraft_storage import Address, Status, StorageBackend, Value
from kvgraft_storage.settings import PrefetchPolicy, StorageSettings, StorePolicy
from kvgraft_storage.tier import Prefetch, StorageTier
from kvgraft_storage.tier.slicing import Pace

from ..serving.server import Server
from ..serving.setups import Setup
from ..storage.backends import Hanging

__all__ = [
    "AT_ONCE",
    "Shelf",
    "addresses",
    "drained",
    "open_cache",
    "settings",
    "step_by_step",
    "stocked",
    "tier_of",
    "until",
]


class Shelf(Hanging):
    """Closing it forgets nothing; with its gate closed, fetches and stores wait.

    Attributes:
        asked: keys that were to be fetched, in order.
    """

    def __init__(self, *, synchronous: bool = False) -> None:
        super().__init__(synchronous=synchronous)
        self.asked: list[bytes] = []

    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        self.asked += keys
        return super().get_into(keys, values, deadline_s)

    def close(self) -> None:
        self.gate.set()

    def copy(self, *, synchronous: bool = False) -> Shelf:
        """Another store with the same in it."""
        other = Shelf(synchronous=synchronous)
        other.stored.update(self.stored)
        return other


def settings(**given: object) -> StorageSettings:
    defaults: dict[str, object] = {
        "model": "m",
        "weights": "w",
        "threshold_tokens": 2,
        "store": StorePolicy.WRITE_THROUGH,
        "prefetch": PrefetchPolicy.WAIT_COMPLETE,
    }
    return StorageSettings.model_validate({**defaults, **given})


def tier_of(cache: Cache) -> StorageTier:
    assert isinstance(cache.storage, StorageTier)
    return cache.storage


AT_ONCE = Pace(timer=lambda: 0.0)
"""A slice of time is never spent: every call does all that can be done."""


def step_by_step() -> Pace:
    """A slice of time is spent with the first step: every interleaving between steps occurs."""
    return Pace(itertools.count().__next__, seconds=1)


def open_cache(
    setup: Setup,
    shelf: StorageBackend,
    storage: StorageSettings | None = None,
    pace: Pace = AT_ONCE,
    **options: Any,
) -> Cache:
    """A guarded cache over a store, as a process of its own would open it."""
    given: dict[str, Any] = {"guard": GuardMode.ON, **options}
    cache = setup.open(storage=storage or settings(), **given)
    tier_of(cache).pace = pace
    tier_of(cache).attach(shelf)
    return cache


def stocked(
    setup: Setup,
    *prompts: Iterable[int],
    chunk: int | None = None,
    synchronous: bool = False,
) -> Shelf:
    """A store with a cache's data for some prompts, every state at a chunk's end."""
    shelf = Shelf()
    cache = open_cache(setup, shelf, device_tokens=256, host_tokens=512)
    server = Server(cache)
    for prompt in prompts:
        tokens = list(prompt)
        step = chunk or len(tokens)
        for end in [*range(step, len(tokens), step), len(tokens)]:
            server.serve(tokens[:end])
    assert cache.drain()
    cache.close()
    return shelf.copy(synchronous=synchronous)


def until(condition: Callable[[], object], cache: Cache | None = None) -> None:
    """Wait for it, polling a cache meanwhile, as an engine does."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.001)
        if cache is not None:
            cache.poll()


def addresses(cache: Cache, prompt: Iterable[int], component: str) -> list[list[Address]]:
    """Where a component's data of each page of a prompt is stored."""
    key = TokenKey(prompt)
    naming = tier_of(cache).context.naming
    tree_component = cache.tree.component(component)
    root = cache.tree.hold_root(None)
    hashes = naming.hashes(bytes(naming.of(cache.tree.root(None)).hashes), key.data)
    cache.tree.release_root(root)
    pages = np.arange(key.n_tokens // cache.tree.page_size)
    asked = naming.asked(hashes, 0, [(tree_component, pages)], naming.namespace(None))
    per_page = len(asked) // len(pages)
    return [asked[page * per_page : (page + 1) * per_page] for page in pages.tolist()]


def drained(cache: Cache, prefetch: Prefetch) -> Prefetch:
    """Everything under way has ended, and no slot is left in flight (S2)."""
    assert cache.drain()
    assert prefetch.ended
    assert tier_of(cache).prefetching.nbytes_in_flight == 0
    cache.check_integrity()
    return prefetch
