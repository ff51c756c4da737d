"""The backend without SGLang: pages by hash and pool.

Any thread may call; every call has a time limit.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvgraft import ConfigError
from kvgraft_sglang.identity import KV, Engine, Pool
from kvgraft_sglang.restorable import Need, Restorable, restorable
from kvgraft_sglang.settings import BackendSettings
from kvgraft_storage import Address, Status, Storage, StorageBackend, StorageTicket

__all__ = ["Page", "PageStore", "Transfer"]

Page = memoryview | Sequence[memoryview]
"""Memory of a page: one buffer, or several in order."""

MARK = b"\1"
"""Stored for a page of a pool without data, as a mark that the page is there."""

STEP_S = 0.05
"""Longest wait between two looks at a cancelled ticket."""


MOST_TRANSFERS = 1000
"""Most transfers that are kept until they are taken; older ones are dropped."""


@dataclass(frozen=True)
class Transfer:
    """A call that moved pages.

    Attributes:
        n_pages: pages that were loaded, or that the store has now.
        nbytes: their bytes.
        duration_s: seconds of the call.
    """

    n_pages: int
    nbytes: int
    duration_s: float


class PageStore:
    """A store below an engine's host pools.

    Args:
        engine: the engine that owns the data.
        kv: the host pool of the KV cache.
        settings: time-outs and limits.
        backend: the store, open; closed by `close`.
        clock: monotonic, in seconds.

    Attributes:
        storage: the store under supervision.
    """

    def __init__(
        self,
        engine: Engine,
        kv: Pool,
        settings: BackendSettings,
        backend: StorageBackend,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.storage = Storage(engine.fingerprint(kv), backend, settings.limits, clock)
        self._clock = clock
        self._loads: deque[Transfer] = deque(maxlen=MOST_TRANSFERS)
        self._stores: deque[Transfer] = deque(maxlen=MOST_TRANSFERS)
        self._pools: dict[str, Pool] = {}
        self.add_pool(kv)

    def add_pool(self, pool: Pool) -> None:
        """Add a host pool."""
        self._pools[pool.name] = pool

    def load(self, keys: Sequence[str], pages: Sequence[Page], pool: str = KV) -> list[bool]:
        """Fetch pages into the engine's memory; whether each arrived whole and verified.

        The memory of other pages is undefined.
        """
        begin = self._clock()
        pages = self._content(keys, pages, pool)
        ticket = self.storage.get(self._addresses(keys, pool), pages)
        return self._moved(ticket, pool, begin, self._loads)

    def store(self, keys: Sequence[str], pages: Sequence[Page], pool: str = KV) -> list[bool]:
        """Store pages from the engine's memory; whether each can be read from the store now."""
        begin = self._clock()
        pages = self._content(keys, pages, pool)
        ticket = self.storage.set(self._addresses(keys, pool), pages, only_missing=True)
        return self._moved(ticket, pool, begin, self._stores)

    def find(self, keys: Sequence[str], pool: str = KV) -> list[bool]:
        """Whether each page is probably there."""
        ticket = self.storage.exists(self._addresses(keys, pool))
        return self._finish(ticket, self.settings.lookup_timeout_s)

    def n_leading(self, keys: Sequence[str]) -> int:
        """Leading pages of the KV cache that are probably in the store, without a gap."""
        return _n_leading(self.find(keys))

    def find_restorable(self, keys: Sequence[str], needed: Mapping[str, int | None]) -> Restorable:
        """Lengths of a prefix that the store can restore in several pools, by one call.

        Args:
            keys: page hashes of the prefix.
            needed: per pool besides the KV cache, the pages at the end of a prefix that it needs;
                None for all.
        """
        pools = [KV, *needed]
        addresses = [each for pool in pools for each in self._addresses(keys, pool)]
        there = self._finish(self.storage.exists(addresses), self.settings.lookup_timeout_s)
        n = len(keys)
        shares = [there[n * number : n * (number + 1)] for number in range(len(pools))]
        n_kv = _n_leading(shares[0])
        return restorable(
            Need(pool, share[:n_kv], needed.get(pool)) for pool, share in zip(pools, shares)
        )

    def clear(self) -> None:
        """Remove everything in the store, of other engines too: keys do not name their owner.

        Raises:
            ConfigError: the settings do not allow it.
            TimeoutError: it was not done in time.
        """
        if not self.settings.allow_clear:
            raise ConfigError(
                f"kvgraft-sglang: storage {self.settings.backend!r} may hold data of other models, "
                'which clearing would remove too; set "allow_clear" to true if that is wanted'
            )
        ticket = self.storage.clear()
        self._finish(ticket, self.settings.call_timeout_s)
        if ticket.value is not True:
            raise TimeoutError(
                f"kvgraft-sglang: storage {self.settings.backend!r} was not cleared in "
                f"{self.settings.call_timeout_s:g} s; {ticket.error or 'try again'}"
            )

    def counts(self) -> dict[str, int]:
        """Pages by call and status since the start, such as `get.ok` and `get.corrupt`."""
        return self.storage.counters.snapshot()

    def take_loads(self) -> list[Transfer]:
        """Calls of `load` that moved a page since the last call; at most the newest 1,000."""
        return _taken(self._loads)

    def take_stores(self) -> list[Transfer]:
        """Calls of `store` after which a page is in the store; as `take_loads`."""
        return _taken(self._stores)

    def close(self) -> bool:
        """Finish pending stores and close the store; whether that was done in time."""
        return self.storage.close(self.settings.shutdown_s)

    def _content(self, keys: Sequence[str], pages: Sequence[Page], pool: str) -> Sequence[Page]:
        """The pages, or a mark for each if the pool has no data."""
        if self._pools[pool].page_nbytes:
            return pages
        return [memoryview(bytearray(MARK)) for _ in keys]

    def _addresses(self, keys: Iterable[str], pool: str) -> list[Address]:
        namespace = self.engine.namespace(self._pools[pool])
        address, sha256 = self.storage.address, hashlib.sha256
        return [address(sha256(key.encode()).digest(), pool, namespace) for key in keys]

    def _moved(
        self, ticket: StorageTicket, pool: str, begin: float, transfers: deque[Transfer]
    ) -> list[bool]:
        moved = self._finish(ticket, self.settings.call_timeout_s)
        n_pages = sum(moved)
        if n_pages:
            nbytes = n_pages * self._pools[pool].page_nbytes
            transfers.append(Transfer(n_pages, nbytes, self._clock() - begin))
        return moved

    def _finish(self, ticket: StorageTicket, timeout_s: float) -> list[bool]:
        """Wait; cancel the rest after the time-out, so that no memory is accessed any more."""
        if not ticket.wait(timeout_s):
            ticket.cancel()
            while not ticket.done:  # a copy that has begun must end first
                ticket.wait(STEP_S)
        return [status is Status.OK for status in ticket.statuses]


def _taken(transfers: deque[Transfer]) -> list[Transfer]:
    return [transfers.popleft() for _ in range(len(transfers))]


def _n_leading(there: Sequence[bool]) -> int:
    return there.index(False) if False in there else len(there)
