"""Calls a backend and verifies every answer.

A backend's code runs only here: its errors and invalid answers become DOWN for the keys of the
call, and its payloads are compared with their headers to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvgraft.errors import ConfigError
from kvgraft_storage.backend import Capabilities, ScatteredValue, StorageBackend, Value
from kvgraft_storage.events import EventLog
from kvgraft_storage.keys import Address
from kvgraft_storage.memory import Memory, gather, nbytes_of, parts_of, scatter
from kvgraft_storage.payload import HEADER_NBYTES, check, encode_header
from kvgraft_storage.registered import Registered
from kvgraft_storage.status import Status
from kvgraft_storage.ticket import Job, Phase
from kvgraft_storage.workers import Staging

__all__ = ["BackendFailure", "Calls"]

T = TypeVar("T")


class BackendFailure(Exception):  # noqa: N818 - the outcome of a call, told to the breaker
    """A backend raised, or returned an invalid value; the text names it."""


class Calls:
    """One backend's calls, on a worker's thread; each settles its job.

    Args:
        backend: the backend to call.
        fingerprint: the one that every payload's header must carry.
        clock: as the jobs' deadlines.
        lend_memory: see `SupervisionLimits`.

    Attributes:
        capabilities: the capabilities the backend declared.
        registered: memory that the backend has registered.

    Raises:
        ConfigError: its capabilities are invalid.
    """

    def __init__(
        self,
        backend: StorageBackend,
        fingerprint: bytes,
        clock: Callable[[], float],
        *,
        lend_memory: bool = True,
    ) -> None:
        self.backend = backend
        self.capabilities = _capabilities(backend)
        self._lends = lend_memory and self.capabilities.synchronous
        self.registered = Registered()
        self._fingerprint = fingerprint
        self._clock = clock

    def get(
        self,
        job: Job,
        staging: Staging,
        addresses: Sequence[Address],
        buffers: Sequence[Memory],
    ) -> list[Status] | None:
        """Fetch, and verify the payloads in the caller's memory; None if the job was over.

        Raises:
            BackendFailure: see there.
        """
        begin = job.lend if self._lends else job.call
        if not begin(self._clock()):
            return None
        values = self._values(staging, buffers, lambda buffer: self._lends)
        keys = [address.key for address in addresses]
        told = _statuses(
            len(keys),
            lambda: self.backend.get_into(keys, values, job.deadline - self._clock()),
        )
        if not job.enter(Phase.COPYING):
            return None
        return [
            self._take(value, buffer, address) if status is Status.OK else status
            for status, value, buffer, address in zip(told, values, buffers, addresses)
        ]

    def _take(self, value: Value, buffer: Memory, address: Address) -> Status:
        header = bytes(value.header)
        if not _is_in(value, buffer):
            scatter(parts_of(buffer), value.payload)
        return check(header, buffer, address, self._fingerprint)

    def set(
        self,
        job: Job,
        staging: Staging,
        addresses: Sequence[Address],
        buffers: Sequence[Memory],
    ) -> list[Status] | None:
        """Put a header in front and store; None if the job was over.

        A synchronous backend reads the caller's memory, and so does any backend if the memory is
        registered. If it reads after the deadline, when the memory has changed, the next reader
        finds a wrong checksum.

        Raises:
            BackendFailure: see there.
        """
        if not job.enter(Phase.COPYING):
            return None
        values = self._values(staging, buffers, self._reads_from)
        for value, buffer, address in zip(values, buffers, addresses):
            mine = _is_in(value, buffer)
            if not mine:
                gather(value.payload, parts_of(buffer))
            payload = buffer if mine else value.payload
            value.header[:] = encode_header(address, self._fingerprint, payload)
        if not job.call(self._clock()):
            return None
        keys = [address.key for address in addresses]
        return _statuses(
            len(keys),
            lambda: self.backend.set_from(keys, values, job.deadline - self._clock()),
        )

    def _reads_from(self, buffer: Memory) -> bool:
        """Whether the backend may read a payload where the caller has it."""
        if self.capabilities.synchronous:
            return True
        return self.capabilities.registers and self.registered.holds(parts_of(buffer))

    def _values(
        self, staging: Staging, buffers: Sequence[Memory], is_usable: Callable[[Memory], bool]
    ) -> list[Value]:
        """Values in the callers' memory where it is usable, in a worker's where not."""
        scatters = self.capabilities.scatter
        direct = [
            (scatters or isinstance(buffer, memoryview)) and is_usable(buffer) for buffer in buffers
        ]
        if self.capabilities.synchronous and all(direct):
            headers = memoryview(bytearray(HEADER_NBYTES * len(buffers)))
            return [
                _value(headers[number * HEADER_NBYTES : (number + 1) * HEADER_NBYTES], buffer)
                for number, buffer in enumerate(buffers)
            ]
        nbytes = [0 if each else nbytes_of(buffer) for each, buffer in zip(direct, buffers)]
        staged = _guarded(lambda: staging.values(nbytes))
        return [
            _value(value.header, buffer) if each else value
            for each, value, buffer in zip(direct, staged, buffers)
        ]

    def exists(self, job: Job, addresses: Sequence[Address]) -> list[Status] | None:
        """Ask for hints: OK for probably there, MISS for probably not; None if the job was over.

        Raises:
            BackendFailure: see there.
        """
        if not job.call(self._clock()):
            return None
        hints = _guarded(lambda: list(self.backend.exists([each.key for each in addresses])))
        if len(hints) != len(addresses):
            raise BackendFailure(f"exists answered {len(hints)} of {len(addresses)} keys")
        return [Status.OK if hint else Status.MISS for hint in hints]

    def touch(self, job: Job, addresses: Sequence[Address]) -> list[Status] | None:
        """Note a use: OK for every key; None if the job was over.

        Raises:
            BackendFailure: see there.
        """
        if not job.call(self._clock()):
            return None
        _guarded(lambda: self.backend.touch([each.key for each in addresses]))
        return [Status.OK] * len(addresses)

    def probably_has(self, keys: Sequence[bytes]) -> list[bool | None]:
        """The backend's hints from memory, on the caller's thread; None where it has none."""
        try:
            hints = _guarded(lambda: list(self.backend.probably_has(keys)))
        except BackendFailure:
            hints = []
        return hints if len(hints) == len(keys) else [None] * len(keys)

    def observe(self, events: EventLog) -> None:
        """Let the backend log changes, if it can."""
        if self.capabilities.events:
            _guarded(lambda: self.backend.observe(events))

    def register(self, memory: memoryview) -> None:
        """Register memory, on a worker's thread; payloads in it are then used without a copy.

        Raises:
            BackendFailure: see there.
        """
        _guarded(lambda: self.backend.register(memory))
        self.registered.add(memory)

    def remove(self, job: Job, keys: Sequence[bytes]) -> list[Status] | None:
        """Remove; None if the job was over.

        Raises:
            BackendFailure: see there.
        """
        if not job.call(self._clock()):
            return None
        return _statuses(len(keys), lambda: self.backend.remove(keys))

    def discard(self, keys: Sequence[bytes]) -> list[Status]:
        """Remove, inside another job.

        Raises:
            BackendFailure: see there.
        """
        return _statuses(len(keys), lambda: self.backend.remove(keys))

    def ask(self, job: Job, question: Callable[[StorageBackend], object]) -> tuple[object] | None:
        """A call without keys: its answer, alone in a tuple; None if the job was over.

        Raises:
            BackendFailure: see there.
        """
        if not job.call(self._clock()):
            return None
        return (_guarded(lambda: question(self.backend)),)


def _capabilities(backend: StorageBackend) -> Capabilities:
    name = type(backend).__name__
    try:
        told: object = _guarded(lambda: backend.capabilities)
    except BackendFailure as failure:
        raise ConfigError(f"storage: {name} does not give its capabilities: {failure}") from failure
    if not isinstance(told, Capabilities):
        kind = type(told).__name__
        raise ConfigError(
            f"storage: {name}.capabilities is a {kind}; return kvgraft_storage.Capabilities"
        )
    for field, given in told._asdict().items():
        if isinstance(Capabilities._field_defaults[field], bool):
            fits, wanted = isinstance(given, bool), "True or False"
        else:
            is_nbytes = type(given) is int and given > 0
            fits, wanted = is_nbytes or given is None, "bytes, or None for no limit"
        if not fits:
            raise ConfigError(
                f"storage: {name}.capabilities: {field} is {given!r:.40}; give {wanted}"
            )
    return told


def _value(header: memoryview, buffer: Memory) -> Value:
    if isinstance(buffer, memoryview):
        return Value(header, buffer)
    return ScatteredValue.of(header, buffer)


def _is_in(value: Value, buffer: Memory) -> bool:
    """Whether a value's payload is the caller's memory itself."""
    return value.payload is (buffer if isinstance(buffer, memoryview) else buffer[0])


def _statuses(n_keys: int, call: Callable[[], Sequence[object]]) -> list[Status]:
    told = _guarded(lambda: list(call()))
    if len(told) != n_keys:
        raise BackendFailure(f"answered {len(told)} of {n_keys} keys")
    statuses = [each for each in told if isinstance(each, Status)]
    if len(statuses) != n_keys:
        strange = next(each for each in told if not isinstance(each, Status))
        raise BackendFailure(f"answered {strange!r:.40}, which is no Status")
    return statuses


def _guarded(call: Callable[[], T]) -> T:
    try:
        return call()
    except (Exception, SystemExit) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise BackendFailure(said) from error
