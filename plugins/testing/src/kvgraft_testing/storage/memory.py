"""The reference backend: a dictionary with a capacity, which evicts the least recently used key."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from kvgraft_storage import (
    Capabilities,
    Change,
    Damage,
    EventLog,
    Status,
    StorageBackend,
    StoreStats,
    Value,
    VerifyReport,
)
from kvgraft_storage.payload import damage

__all__ = ["MemoryBackend"]


class MemoryBackend(StorageBackend):
    """Keeps values in this process; other backends are compared with it.

    Args:
        capacity_nbytes: bytes of header and payload it may hold.
        max_payload_nbytes: longest payload.
    """

    def __init__(
        self, capacity_nbytes: int = 64 << 20, max_payload_nbytes: int | None = None
    ) -> None:
        self._capacity = capacity_nbytes
        self._longest = max_payload_nbytes
        self._lock = threading.Lock()
        self.stored: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()
        """The stored header and payload by key, for tests to read and to damage."""
        self.closed = False
        self._events: EventLog | None = None
        self._versions: dict[bytes, bytes] = {}

    @property
    def capabilities(self) -> Capabilities:
        """Not durable, not shared."""
        return Capabilities(
            evicts=True,
            touch=True,
            lru=True,
            max_payload_nbytes=self._longest,
            scatter=True,
            events=True,
            keeps_versions=True,
        )

    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Per key, whether it is there."""
        with self._lock:
            self._use(reversed(keys))
            return [key in self.stored for key in keys]

    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        """Copy values out; see `StorageBackend.get_into`."""
        with self._lock:
            told = [self._get(key, value) for key, value in zip(keys, values)]
            self._use(reversed(keys))
            return told

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        """Copy values in, and make room; see `StorageBackend.set_from`."""
        with self._lock:
            told = [self._set(*each) for each in zip(reversed(keys), reversed(values))]
            return told[::-1]

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark keys as used now, the last one most recently."""
        with self._lock:
            self._use(keys)

    def probably_has(self, keys: Sequence[bytes]) -> Sequence[bool | None]:
        """Per key, whether it is there."""
        return [key in self.stored for key in keys]

    def versions(self) -> Mapping[bytes, bytes]:
        """All that were set."""
        return dict(self._versions)

    def set_version(self, name: bytes, version: bytes) -> None:
        """Keep a version, also in `clear`."""
        self._versions[name] = version

    def observe(self, events: EventLog) -> None:
        """Log changes from now on."""
        self._events = events

    def remove(self, keys: Sequence[bytes]) -> Sequence[Status]:
        """Remove keys."""
        with self._lock:
            gone = [self.stored.pop(key, None) for key in keys]
            self._log(Change.REMOVED, [key for key, each in zip(keys, gone) if each is not None])
        return [Status.MISS if each is None else Status.OK for each in gone]

    def clear(self) -> None:
        """Remove everything."""
        with self._lock:
            self.stored.clear()
            if self._events is not None:
                self._events.clear()

    def flush(self) -> None:
        """Does nothing: no data is durable here."""

    def stats(self) -> StoreStats:
        """Counts of the content."""
        with self._lock:
            return StoreStats(len(self.stored), self._nbytes(), self._capacity)

    def verify(self) -> VerifyReport:
        """Check every payload against its header."""
        with self._lock:
            damaged = []
            for key, (header, payload) in self.stored.items():
                fault = damage(key, header, payload)
                if fault is not None:
                    damaged.append(Damage("memory", key.hex(), fault))
            return VerifyReport(len(self.stored), self._nbytes(), tuple(damaged))

    def healthy(self) -> bool:
        """True until it is closed."""
        return not self.closed

    def close(self) -> None:
        """Remove everything."""
        self.closed = True
        self.clear()

    def _use(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in self.stored:
                self.stored.move_to_end(key)

    def _get(self, key: bytes, value: Value) -> Status:
        found = self.stored.get(key)
        if found is None:
            return Status.MISS
        header, payload = found
        if len(payload) != value.nbytes:
            return Status.TOO_LARGE if len(payload) > value.nbytes else Status.CORRUPT
        value.header[:] = header
        start = 0
        for part in value.parts:
            part[:] = payload[start : start + len(part)]
            start += len(part)
        return Status.OK

    def _set(self, key: bytes, value: Value) -> Status:
        if self._longest is not None and value.nbytes > self._longest:
            return Status.TOO_LARGE
        nbytes = len(value.header) + value.nbytes
        if nbytes > self._capacity:
            return Status.FULL
        known = self.stored.pop(key, None)
        while self._nbytes() + nbytes > self._capacity:
            self._log(Change.EVICTED, [self.stored.popitem(last=False)[0]])
        self.stored[key] = (bytes(value.header), b"".join(value.parts))
        if known is None:
            self._log(Change.STORED, [key])
        return Status.OK

    def _log(self, change: Change, keys: Sequence[bytes]) -> None:
        if self._events is not None:
            self._events.add(change, keys)

    def _nbytes(self) -> int:
        return sum(len(header) + len(payload) for header, payload in self.stored.values())
