"""Calls a backend and verifies every answer.

Here, and nowhere else, a backend's code runs: its errors and invalid answers become DOWN for the
keys of the call, and its payloads are compared with their headers to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvgraft.errors import ConfigError
from kvgraft.storage.backend import Capabilities, StorageBackend, Value
from kvgraft.storage.keys import Address
from kvgraft.storage.memory import copy
from kvgraft.storage.payload import HEADER_NBYTES, check, encode_header
from kvgraft.storage.status import Status
from kvgraft.storage.ticket import Job, Phase
from kvgraft.storage.workers import Staging

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

    Attributes:
        capabilities: the capabilities the backend declared.

    Raises:
        ConfigError: it does not say so in a way that makes sense.
    """

    def __init__(
        self, backend: StorageBackend, fingerprint: bytes, clock: Callable[[], float]
    ) -> None:
        self.backend = backend
        self.capabilities = _capabilities(backend)
        self._fingerprint = fingerprint
        self._clock = clock

    def get(
        self,
        job: Job,
        staging: Staging,
        addresses: Sequence[Address],
        buffers: Sequence[memoryview],
    ) -> list[Status] | None:
        """Fetch, and verify the payloads in the caller's memory; None if the job was over.

        Raises:
            BackendFailure: see there.
        """
        begin = job.lend if self.capabilities.synchronous else job.call
        if not begin(self._clock()):
            return None
        values = self._values(staging, buffers)
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

    def _take(self, value: Value, buffer: memoryview, address: Address) -> Status:
        header = bytes(value.header)
        if value.payload is not buffer:
            copy(buffer, value.payload)
        return check(header, buffer, address, self._fingerprint)

    def set(
        self,
        job: Job,
        staging: Staging,
        addresses: Sequence[Address],
        buffers: Sequence[memoryview],
    ) -> list[Status] | None:
        """Put a header in front and store; None if the job was over.

        A synchronous backend reads the caller's memory. Should it do so after the deadline, when
        that holds something else, the checksum shows it to the next reader.

        Raises:
            BackendFailure: see there.
        """
        if not job.enter(Phase.COPYING):
            return None
        values = self._values(staging, buffers)
        for value, buffer, address in zip(values, buffers, addresses):
            if value.payload is not buffer:
                copy(value.payload, buffer)
            value.header[:] = encode_header(address, self._fingerprint, value.payload)
        if not job.call(self._clock()):
            return None
        keys = [address.key for address in addresses]
        return _statuses(
            len(keys),
            lambda: self.backend.set_from(keys, values, job.deadline - self._clock()),
        )

    def _values(self, staging: Staging, buffers: Sequence[memoryview]) -> list[Value]:
        if self.capabilities.synchronous:
            headers = memoryview(bytearray(HEADER_NBYTES * len(buffers)))
            return [
                Value(headers[number * HEADER_NBYTES : (number + 1) * HEADER_NBYTES], buffer)
                for number, buffer in enumerate(buffers)
            ]
        return _guarded(lambda: staging.values([len(buffer) for buffer in buffers]))

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

    def remove(self, job: Job, keys: Sequence[bytes]) -> list[Status] | None:
        """Remove; None if the job was over.

        Raises:
            BackendFailure: see there.
        """
        if not job.call(self._clock()):
            return None
        return _statuses(len(keys), lambda: self.backend.remove(keys))

    def discard(self, keys: Sequence[bytes]) -> list[Status]:
        """Remove, in the middle of another job.

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
            f"storage: {name}.capabilities is a {kind}; return kvgraft.storage.Capabilities"
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
