"""The interface of a storage backend: keys to values, in batches, a status for each key.

A backend moves bytes. `kvgraft_storage.Storage` handles names, headers, checksums, deadlines and
failures, and trusts no answer of a backend.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvgraft.errors import ConfigError
from kvgraft_storage.events import EventLog
from kvgraft_storage.status import Status

__all__ = [
    "Capabilities",
    "Damage",
    "ScatteredValue",
    "StorageBackend",
    "StoreStats",
    "Value",
    "VerifyReport",
]


class Value(NamedTuple):
    """Memory of a value to read or store; both parts are stored and returned unchanged.

    Attributes:
        header: 256 bytes.
        payload: at least one byte, valid until the call returns. Block-aligned and always the
            same few regions where the backend is not `synchronous`.
    """

    header: memoryview
    payload: memoryview

    @property
    def parts(self) -> tuple[memoryview, ...]:
        """All memory of the payload, in order."""
        return (self.payload,)

    @property
    def nbytes(self) -> int:
        """Bytes of the payload, all parts together."""
        return len(self.payload)


class ScatteredValue(Value):
    """A value in several places; only for backends that claim `scatter`, which use `parts`.

    The parts are one payload: it may be read into other parts than it was stored from. `payload` is
    the first of them.
    """

    rest: tuple[memoryview, ...] = ()
    """All parts but the first."""

    @classmethod
    def of(cls, header: memoryview, parts: Sequence[memoryview]) -> ScatteredValue:
        """A value of these parts, in their order."""
        made = cls(header, parts[0])
        made.rest = tuple(parts[1:])
        return made

    @property
    def parts(self) -> tuple[memoryview, ...]:
        """All memory of the payload, in order."""
        return (self.payload, *self.rest)

    @property
    def nbytes(self) -> int:
        """Bytes of the payload, all parts together."""
        return sum(map(len, self.parts))


class Capabilities(NamedTuple):
    """A backend's capabilities; the contract suite tests the claimed ones.

    Attributes:
        durable: data that `flush` acknowledged survives a killed process.
        shared: several processes may use one store at the same time.
        evicts: makes room by itself; without it a full store returns FULL.
        pin: implements `pin` and `unpin`.
        touch: `touch` keeps keys longer.
        synchronous: after a call has returned, even with an error, the backend does not touch its
            buffers any more. Such a backend reads and writes the caller's memory; others get memory
            of `Storage`'s own and cost a copy. Do not claim it if transfers may arrive after they
            were abandoned.
        max_payload_nbytes: longest payload; None without a limit.
        batch_set_nbytes: bytes of payload beyond which a `set_from` call of several keys gets no
            faster; None if more is always better.
        batch_get_nbytes: bytes of payload beyond which a `get_into` call of several keys gets no
            faster; the rest goes to other workers, which read while this one checks.
        scatter: takes a `ScatteredValue`; others get its parts joined in `Storage`'s own memory.
        registers: uses registered memory: `set_from` gets payloads in it without a copy, even if
            the backend is not `synchronous`.
        events: writes the keys that it stores and drops to `observe`'s log; for others `Storage`
            logs keys stored and removed through it.
        lru: evicts the least recently used key, and every use counts: `touch`, and `exists`,
            `get_into` and `set_from` that find a key or store it.
        keeps_versions: implements `versions` and `set_version`; eviction and `clear` leave them.
    """

    durable: bool = False
    shared: bool = False
    evicts: bool = False
    pin: bool = False
    touch: bool = False
    synchronous: bool = False
    max_payload_nbytes: int | None = None
    batch_set_nbytes: int | None = None
    batch_get_nbytes: int | None = None
    scatter: bool = False
    registers: bool = False
    events: bool = False
    lru: bool = False
    keeps_versions: bool = False


@dataclass(frozen=True)
class StoreStats:
    """Counts of a store's content.

    Attributes:
        n_records: keys that can be read.
        nbytes: bytes that it uses, overhead included.
        capacity_nbytes: bytes that it may use; None without a limit.
        details: other counts of the backend.
    """

    n_records: int
    nbytes: int
    capacity_nbytes: int | None = None
    details: Mapping[str, int] = field(default_factory=dict)


class Damage(NamedTuple):
    """A damaged part of a store: its place, its key in hex if known, and the reason."""

    where: str
    key: str
    reason: str


class VerifyReport(NamedTuple):
    """The result of a scan; `n_records` and `nbytes` count the records that were read."""

    n_records: int
    nbytes: int
    damaged: tuple[Damage, ...]


class StorageBackend(abc.ABC):
    """A store. Calls come from several threads at once, never from the scheduler's.

    A call returns within `deadline_s` seconds, with TIMEOUT for keys that it did not reach.
    Ordinary failures are statuses; an exception means DOWN for every key of the call.

    Keys of one call that are pages of one sequence come in its order. A page is useless without the
    pages before it, so a store that evicts the least recently used key must treat the first key of
    `exists`, `get_into` and `set_from` as the last one used. `touch` gives the order itself.
    """

    @property
    @abc.abstractmethod
    def capabilities(self) -> Capabilities:
        """This store's capabilities; they never change."""

    @abc.abstractmethod
    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Per key, whether it is probably there: a hint, sometimes wrong in either direction."""

    @abc.abstractmethod
    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        """Read values; a status per key, in their order.

        Returns:
            OK: both parts are filled, to their last byte. MISS. TOO_LARGE, CORRUPT: the stored
            payload is longer or shorter than the buffer, or known to be damaged. TIMEOUT. DOWN.
            After anything but OK the buffers' content is undefined.
        """

    @abc.abstractmethod
    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        """Store values; a status per key, in their order.

        An existing value may be kept or replaced as a whole: equal keys mean equal data.

        Returns:
            OK: readable from now on. TOO_LARGE, FULL, TIMEOUT, DOWN: not stored.
        """

    @abc.abstractmethod
    def remove(self, keys: Sequence[bytes]) -> Sequence[Status]:
        """Remove values; OK or MISS per key. Concurrent readers get a whole value or a miss."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Remove all of this store's data, and nothing else."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Return when everything stored before the call is durable (if the backend is).

        Raises:
            OSError: it could not be made durable.
        """

    @abc.abstractmethod
    def stats(self) -> StoreStats:
        """Counts of the store's content."""

    @abc.abstractmethod
    def verify(self) -> VerifyReport:
        """Read everything and report damaged payloads; removes nothing."""

    @abc.abstractmethod
    def healthy(self) -> bool:
        """Whether it can answer now; cheap. False for a closed store."""

    @abc.abstractmethod
    def close(self) -> None:
        """Flush and release everything; calling it again does nothing."""

    def probably_has(self, keys: Sequence[bytes]) -> Sequence[bool | None]:
        """Per key, whether it is there, from data in memory; None if that is unknown.

        Any thread may call it, a scheduler's too: no I/O, no wait for a lock that is held during
        I/O, and about a microsecond a key. By default nothing is known.
        """
        return [None] * len(keys)

    def observe(self, events: EventLog) -> None:  # noqa: B027 - most have nothing to do
        """Log every change from now on, in order; does nothing without `Capabilities.events`."""

    def register(self, memory: memoryview) -> None:  # noqa: B027 - most have nothing to do
        """Prepare memory that payloads will lie in, such as for RDMA; by default nothing.

        Raises:
            OSError: it cannot be registered; calls work without.
        """

    def unregister(self, memory: memoryview) -> None:  # noqa: B027 - most have nothing to do
        """Undo `register`; none of the memory is used any more when it returns."""

    def versions(self) -> Mapping[bytes, bytes]:
        """The versions that were set, as read when the store was opened: 32 bytes by name.

        Any thread may call it; no I/O. A version that cannot be read is any other value: the data
        of its namespace is a miss then.
        """
        return {}

    def set_version(self, name: bytes, version: bytes) -> None:
        """Keep a version, durable when the call returns, for all that open the store later.

        Args:
            name: 32 bytes.
            version: 32 bytes; it replaces the one of this name at once or not at all.

        Raises:
            ConfigError: the backend keeps none; see `Capabilities.keeps_versions`.
        """
        raise ConfigError(f"{type(self).__name__} keeps no version of {name.hex()[:16]}")

    def touch(self, keys: Sequence[bytes]) -> None:  # noqa: B027 - many stores gain nothing by it
        """Note a use of keys that were not read: a cheap hint, which may be lost.

        Args:
            keys: in the order of use: the last one is the most recently used. Missing keys are
                skipped.
        """

    def pin(self, keys: Sequence[bytes]) -> Sequence[Status]:
        """Keep keys from eviction until `unpin`; OK or MISS per key.

        Raises:
            ConfigError: the backend cannot pin; see `Capabilities.pin`.
        """
        raise ConfigError(f"{type(self).__name__} cannot pin {len(keys)} keys; see capabilities")

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Undo `pin`.

        Raises:
            ConfigError: the backend cannot pin; see `Capabilities.pin`.
        """
        raise ConfigError(f"{type(self).__name__} cannot unpin {len(keys)} keys; see capabilities")
