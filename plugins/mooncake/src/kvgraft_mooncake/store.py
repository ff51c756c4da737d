"""The backend: a value is a header and its payload, in segments of some machines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from kvgraft_mooncake.admin import PORT, Admin
from kvgraft_mooncake.client import Client
from kvgraft_mooncake.codes import Code, MooncakeError, meaning
from kvgraft_mooncake.location import Location
from kvgraft_mooncake.options import MooncakeOptions
from kvgraft_mooncake.regions import give_back
from kvgraft_storage import (
    HEADER_NBYTES,
    Capabilities,
    Damage,
    Status,
    StorageBackend,
    StoreStats,
    Value,
    VerifyReport,
    damage,
)

__all__ = ["MooncakeBackend"]

EVICTION_S = 0.1
PAUSE_S = 0.05
"""Seconds and attempts that the master gets to make room, which it does on request.

Each attempt evicts a twentieth of the stored data, even for a value that would never fit.
"""

REMOVED_AT_ONCE = 256

READ_AT_ONCE = 8
"""Most values that a scan holds in memory."""


class MooncakeBackend(StorageBackend):
    """A store in the memory of the participating processes.

    The library takes no deadlines: a call has no time limit, and waits 4.5 s for a lost master.
    `Storage` does not wait for it.

    Args:
        location: master and namespace.
        options: options of this process's part.

    Raises:
        ConfigError: no client library, no such device, a master that is not there, or a set-up
            that failed.
    """

    def __init__(self, location: Location, options: MooncakeOptions) -> None:
        self.location = location
        self.options = options
        self._client = Client(location, options)
        self._admin = Admin(options.admin or f"http://{location.host}:{PORT}", options.timeout_s)

    @classmethod
    def open(cls, location: str, options: MooncakeOptions) -> MooncakeBackend:
        """A store from the location of a URL, `HOST:PORT/NAMESPACE`.

        Raises:
            ConfigError: as for the class.
        """
        return cls(Location.parse(location), options)

    @property
    def capabilities(self) -> Capabilities:
        """Shared; evicts. Neither durable nor synchronous: transfers may arrive late."""
        return Capabilities(shared=True, evicts=True, touch=True, scatter=True, registers=True)

    # -- memory of callers

    def register(self, memory: memoryview) -> None:
        """Register memory with the client library; payloads in it are stored from there."""
        self._client.regions.add(memory)

    def unregister(self, memory: memoryview) -> None:
        """Undo `register`."""
        self._client.unregister(memory)

    # -- calls

    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Per key, whether the master knows it; the process that holds it may be gone."""
        told = self._client.exist(self._names(keys))
        _expect_none_but(told, {0, 1})
        return [each == 1 for each in told]

    def touch(self, keys: Sequence[bytes]) -> None:
        """Query the keys, which gives each a lease; the master evicts other values first."""
        self.exists(keys)

    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        """Read directly into registered memory."""
        if deadline_s <= 0:
            return [Status.TIMEOUT] * len(keys)
        names = self._names(keys)
        with self._client.regions.at_home(values) as room:
            told = self._client.get(names, room)
            if any(each > 0 for each in told):
                give_back(room, values)
        statuses = [
            self._status_read(name, code, HEADER_NBYTES + value.nbytes)
            for name, code, value in zip(names, told, values)
        ]
        return _expect_some(statuses, told)

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        """Store directly from registered memory; existing values are kept."""
        if deadline_s <= 0:
            return [Status.TIMEOUT] * len(keys)
        end = time.monotonic() + min(deadline_s, EVICTION_S)
        names = self._names(keys)
        with self._client.regions.at_home(values) as room:
            told = self._client.put(names, room)
            while Code.NO_AVAILABLE_HANDLE in told and time.monotonic() < end:
                time.sleep(PAUSE_S)
                left = [n for n, code in enumerate(told) if code == Code.NO_AVAILABLE_HANDLE]
                again = self._client.put([names[n] for n in left], [room[n] for n in left])
                for number, code in zip(left, again):
                    told[number] = code
        outcomes = {0: Status.OK, Code.NO_AVAILABLE_HANDLE: Status.FULL}
        return _expect_some([outcomes.get(code, Status.DOWN) for code in told], told)

    def remove(self, keys: Sequence[bytes]) -> Sequence[Status]:
        """Remove values, even during a read: its checksum will not match.

        A value that is being stored counts as missing: its memory is still written to.
        """
        return self._remove(self._names(keys))

    def clear(self) -> None:
        """Remove the values of the namespace, of all writers."""
        own = self._own()
        for first in range(0, len(own), REMOVED_AT_ONCE):
            self._remove(own[first : first + REMOVED_AT_ONCE])

    def flush(self) -> None:
        """Do nothing: no data is durable."""
        self._client.expect_open()

    def stats(self) -> StoreStats:
        """Count the namespace; the capacity is that of all namespaces together."""
        self._client.expect_open()
        names = self._admin.names()
        own = self._admin.sizes([name for name in names if self.location.key_of(name) is not None])
        details = {"foreign_values": len(names) - len(own), "regions": len(self._client.regions)}
        nbytes = sum(sum(replicas) for replicas in own.values())
        return StoreStats(len(own), nbytes, self._admin.capacity_nbytes(), details)

    def verify(self) -> VerifyReport:
        """Read all values of the namespace, a few at a time."""
        n_records = nbytes = 0
        damaged = []
        for name, size, reason in self._scan():
            n_records += 1
            nbytes += size
            if reason is not None:
                key = name.rpartition("/")[2]
                damaged.append(Damage(f"mooncake:{self.location.master}/{name}", key, reason))
        return VerifyReport(n_records, nbytes, tuple(damaged))

    def healthy(self) -> bool:
        """Whether the master takes connections and answers."""
        if self._client.closed:
            return False
        try:
            self._client.reach_master()
        except OSError:
            return False
        return self._client.exist(["kvgraft-probe"])[0] in (0, 1)

    def close(self) -> None:
        """Wait for calls to end and leave the store; data in this process's segment is lost."""
        self._client.close()

    # -- inside

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [self.location.name_of(key) for key in keys]

    def _status_read(self, name: str, code: int, nbytes: int) -> Status:
        if code == nbytes:
            return Status.OK
        if code in (Code.OBJECT_NOT_FOUND, Code.REPLICA_IS_NOT_READY):
            return Status.MISS
        if code in (Code.INVALID_PARAMS, Code.TRANSFER_FAIL) or code >= 0:
            size = self._client.size(name)
            if size == Code.OBJECT_NOT_FOUND:
                return Status.MISS
            if size >= 0 and size != nbytes:
                return Status.TOO_LARGE if size > nbytes else Status.CORRUPT
        return Status.DOWN

    def _own(self) -> list[str]:
        self._client.expect_open()
        return [name for name in self._admin.names() if self.location.key_of(name) is not None]

    def _remove(self, names: Sequence[str]) -> list[Status]:
        told = self._client.remove(names)
        leased = [n for n, code in enumerate(told) if code == Code.OBJECT_HAS_LEASE]
        if leased:
            again = self._client.remove([names[n] for n in leased], leased=True)
            for number, code in zip(leased, again):
                told[number] = code
        _expect_none_but(told, {0, Code.OBJECT_NOT_FOUND, Code.REPLICA_IS_NOT_READY})
        return [Status.MISS if code else Status.OK for code in told]

    def _scan(self) -> Iterator[tuple[str, int, str | None]]:
        """Values of the namespace: name, bytes, and the damage, if any."""
        own = self._own()
        for first in range(0, len(own), READ_AT_ONCE):
            found = self._admin.sizes(own[first : first + READ_AT_ONCE])
            sizes = [(name, replicas[0]) for name, replicas in found.items() if replicas]
            for name, size in sizes:
                if size <= HEADER_NBYTES:
                    yield name, size, f"has {size} bytes, which is no header and payload"
            there = [(name, size) for name, size in sizes if size > HEADER_NBYTES]
            if there:
                yield from self._read(there)

    def _read(self, there: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int, str | None]]:
        with self._client.regions.room([size - HEADER_NBYTES for _, size in there]) as room:
            told = self._client.get([name for name, _ in there], room)
            for (name, size), code, value in zip(there, told, room):
                if code == Code.OBJECT_NOT_FOUND:
                    continue  # removed meanwhile
                key = self.location.key_of(name)
                assert key is not None
                read = damage(key, value.header, value.payload) if code == size else meaning(code)
                yield name, size, read


def _expect_none_but(told: Sequence[int], known: set[int]) -> None:
    """Check that every code is one of these.

    Raises:
        MooncakeError: one is not.
    """
    for code in told:
        if code not in known:
            raise MooncakeError(meaning(code))


def _expect_some(statuses: list[Status], told: Sequence[int]) -> list[Status]:
    """Check that at least one status is not DOWN.

    Raises:
        MooncakeError: all are.
    """
    if statuses and all(status is Status.DOWN for status in statuses):
        raise MooncakeError(meaning(told[0]))
    return statuses
