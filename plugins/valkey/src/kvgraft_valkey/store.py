"""The backend: values as strings under prefixed keys, in few round trips."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, cast

import glide_sync as glide

from kvgraft import ConfigError
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
from kvgraft_valkey.connection import AnyConnection, Commands, one_line
from kvgraft_valkey.facts import counts, read_facts
from kvgraft_valkey.opening import connect
from kvgraft_valkey.options import ValkeyOptions, parse_location
from kvgraft_valkey.records import RUN_KEYS, RUN_NBYTES, Names, pattern, placed, runs, verdict

__all__ = ["ValkeyBackend"]

MARGIN_S = 0.02
"""Seconds kept back from a deadline, so that a call returns before it."""

Encodable = str | bytes | bytearray | memoryview
Told = Status | glide.RequestError
Carry = Callable[[range, float], list[Told]]


class _Found(NamedTuple):
    """A string in a scan, and its value.

    Attributes:
        name: the string's name.
        key: the value's key.
        memory_nbytes: memory of the string.
        nbytes: lengths of header and payload: 0 for a missing one, None for another type.
    """

    name: bytes
    key: bytes
    memory_nbytes: int
    nbytes: tuple[int | None, int | None]

    @property
    def is_payload(self) -> bool:
        """Whether it is the payload, by which values are counted."""
        return Names.is_payload(self.name)


class ValkeyBackend(StorageBackend):
    """A store on servers.

    Args:
        connection: open; closed with the store.
        options: names and times.
        clock: monotonic, in seconds.

    Raises:
        OSError: the servers do not answer.
    """

    def __init__(
        self,
        connection: AnyConnection,
        options: ValkeyOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self._connection = connection
        self._clock = clock
        self._prefix = options.prefix.encode()
        self._facts = read_facts(connection, expiring=options.ttl_s is not None)
        self._expiry = None
        if options.ttl_s is not None:
            self._expiry = glide.ExpirySet(glide.ExpiryType.MILLSEC, int(options.ttl_s * 1000))

    @classmethod
    def open(cls, location: str, options: ValkeyOptions) -> ValkeyBackend:
        """A store from the location of a URL: `HOST:PORT`, or several for a cluster.

        Raises:
            ConfigError: names the fault of location, options or servers.
        """
        connection = connect(parse_location(location), options)
        try:
            return cls(connection, options)
        except OSError as error:
            connection.close()
            raise ConfigError(f"storage 'valkey': {error}; see that it is healthy") from error

    @property
    def capabilities(self) -> Capabilities:
        """Shared and synchronous; the rest follows the servers' settings at opening."""
        return Capabilities(
            durable=self._facts.durable,
            shared=True,
            evicts=self._facts.evicts,
            touch=self._facts.by_use,
            synchronous=True,
            max_payload_nbytes=self._facts.value_nbytes,
        )

    # -- calls

    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Per key, whether the servers have both strings, damaged or not."""
        batch = self._connection.batch()
        for names in self._names_of(keys):
            for name in names:
                batch.strlen(name)
        answers = iter(self._answers(batch))
        return [bool(header) and bool(payload) for header, payload in zip(answers, answers)]

    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        """Read values; the caller verifies the payloads.

        A value that is a run by itself is read directly into its memory, by a command, since a
        batch cannot do that. The client has one time-out for all commands, so it must be short
        enough.
        """
        names = self._names_of(keys)

        def carry(run: range, seconds: float) -> list[Told]:
            first = run[0]
            if len(run) == 1 and seconds >= self.options.timeout_s:
                found = self._connection.fetch(names[first], values[first])
                if found is not None:
                    return [verdict(values[first], *found)]
            batch = self._connection.batch()
            for number in run:
                batch.getrange(names[number].header, 0, HEADER_NBYTES)
                batch.getrange(names[number].payload, 0, len(values[number].payload))
            answers = self._connection.run(batch, seconds)
            return [
                _refusal(pair) or placed(values[number], *cast("tuple[bytes, bytes]", pair))
                for number, pair in zip(run, _in_pairs(answers))
            ]

        work = runs([len(value.payload) for value in values])
        return self._carry_out(len(keys), work, carry, deadline_s)

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        """Store values; an existing one is replaced, header and payload together."""
        names = self._names_of(keys)
        longest = self._facts.value_nbytes

        def carry(run: range, seconds: float) -> list[Told]:
            told: dict[int, Told] = dict.fromkeys(run, Status.TOO_LARGE)
            fitting = [number for number in run if len(values[number].payload) <= longest]
            batch = self._connection.batch(atomic=self._expiry is not None)
            for number in fitting:
                parts: dict[Encodable, Encodable] = dict(zip(names[number], values[number]))
                if self._expiry is None:
                    batch.mset(parts)
                    continue
                for name, part in parts.items():
                    batch.set(name, part, expiry=self._expiry)
            if fitting:
                answers = self._connection.run(batch, seconds)
                n_each = len(answers) // len(fitting)
                for at, number in enumerate(fitting):
                    mine = answers[at * n_each : (at + 1) * n_each]
                    told[number] = _refusal(mine) or Status.OK
            return list(told.values())

        # a value that expires takes two commands, which only a batch of one slot carries out at
        # once
        alone = (range(number, number + 1) for number in range(len(keys)))
        work = runs([len(value.payload) for value in values]) if self._expiry is None else alone
        return self._carry_out(len(keys), work, carry, deadline_s)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make the servers count a use of both strings; their clocks count whole seconds."""
        batch = self._connection.batch()
        for names in self._names_of(keys):
            batch.touch(list(names))
        self._answers(batch)

    def remove(self, keys: Sequence[bytes]) -> Sequence[Status]:
        """Remove values; the servers free their memory in the background."""
        names = self._names_of(keys)

        def carry(run: range, seconds: float) -> list[Told]:
            batch = self._connection.batch()
            for number in run:
                batch.unlink(list(names[number]))
            answers = self._connection.run(batch, seconds)
            return [
                _refusal([answer]) or (Status.OK if answer == len(Names._fields) else Status.MISS)
                for answer in answers
            ]

        return self._carry_out(len(keys), runs([0] * len(keys)), carry, self.options.timeout_s)

    def clear(self) -> None:
        """Remove the strings that have this store's prefix and form, page by page."""
        for page in self._pages():
            batch = self._connection.batch()
            for name, _ in page:
                batch.unlink([name])
            self._answers(batch)

    def flush(self) -> None:
        """Do nothing: a durable server has a value on its disk before it says OK."""

    def stats(self) -> StoreStats:
        """Counts of the store's content, as the servers count memory; looks at every key."""
        n_records = nbytes = 0
        for found in self._scan():
            nbytes += found.memory_nbytes
            n_records += found.is_payload and all(found.nbytes)
        details = counts(self._connection)
        return StoreStats(n_records, nbytes, self._facts.capacity_nbytes, details)

    def verify(self) -> VerifyReport:
        """Read every value to its last byte; a half evicted one does not count."""
        n_records = nbytes = 0
        damaged = []
        for found in self._scan():
            if not found.is_payload or 0 in found.nbytes:
                continue
            n_records += 1
            nbytes += sum(each or 0 for each in found.nbytes)
            reason = self._damage(found)
            if reason is not None:
                damaged.append(Damage(self._connection.where, found.key.hex(), reason))
        return VerifyReport(n_records, nbytes, tuple(damaged))

    def healthy(self) -> bool:
        """Whether every primary answers."""
        try:
            self._connection.ping()
        except (OSError, ConfigError):
            return False
        return True

    def close(self) -> None:
        """Close the connection, once calls of other threads have ended."""
        self._connection.close()

    # -- inside

    def _names_of(self, keys: Sequence[bytes]) -> list[Names]:
        return [Names.of(self._prefix, key) for key in keys]

    def _carry_out(
        self, n_keys: int, work: Iterable[range], carry: Carry, deadline_s: float
    ) -> list[Status]:
        """Carry out run after run, until the deadline or until the connection is lost.

        Args:
            n_keys: number of keys of the call.
            work: indices of keys, in runs.
            carry: one round trip; a status for each key of its run, or why it was refused.
            deadline_s: seconds for all of it.

        Raises:
            ConnectionError: it is down for every key; why.
        """
        end = self._clock() + deadline_s - min(MARGIN_S, deadline_s / 4)
        statuses: list[Status] = []
        rest, reason = Status.TIMEOUT, ""
        for run in work:
            seconds = end - self._clock()
            if seconds <= 0:
                break
            try:
                told = carry(run, seconds)
            except TimeoutError:
                break
            except ConnectionError as error:
                rest, reason = Status.DOWN, str(error)
                break
            for each in told:
                if isinstance(each, Status):
                    statuses.append(each)
                else:
                    statuses.append(_refused(each))
                    reason = one_line(each)
        statuses += [rest] * (n_keys - len(statuses))
        if statuses and set(statuses) == {Status.DOWN}:
            raise ConnectionError(reason)
        return statuses

    def _answers(self, batch: Commands) -> list[object]:
        """The servers' answers to commands without a deadline; None for a key of another type.

        Raises:
            OSError: they refuse one, or do not answer.
        """
        if not batch.commands:
            return []
        return [self._answer(each) for each in self._connection.run(batch, self.options.timeout_s)]

    def _answer(self, answer: object) -> object:
        if not isinstance(answer, glide.RequestError):
            return answer
        if _refused(answer) is Status.CORRUPT:
            return None
        raise ConnectionError(f"{self._connection.where}: {one_line(answer)}")

    def _pages(self) -> Iterator[list[tuple[bytes, bytes]]]:
        """Names of this store's strings, each with its storage key, page by page."""
        for names in self._connection.names(pattern(self.options.prefix)):
            found = [(name, Names.key_of(self._prefix, name)) for name in names]
            rest = iter([(name, key) for name, key in found if key is not None])
            while page := list(islice(rest, RUN_KEYS)):
                yield page

    def _scan(self) -> Iterator[_Found]:
        """This store's strings that are there when their page is looked at."""
        for page in self._pages():
            batch = self._connection.batch()
            for name, key in page:
                batch.custom_command(["MEMORY", "USAGE", name])
                for each in Names.of(self._prefix, key):
                    batch.strlen(each)
            answers = iter(self._answers(batch))
            for (name, key), taken, header, payload in zip(page, answers, answers, answers):
                if isinstance(taken, int):
                    nbytes = cast("tuple[int | None, int | None]", (header, payload))
                    yield _Found(name, key, taken, nbytes)

    def _damage(self, found: _Found) -> str | None:
        """The fault of a value; None without one, or if it was removed meanwhile."""
        header, payload = found.nbytes
        if header is None or payload is None:
            return "is no string"
        if header != HEADER_NBYTES:
            return f"has a header of {header} bytes, not {HEADER_NBYTES}"
        value = Value(memoryview(bytearray(header)), memoryview(bytearray(payload)))
        deadline_s = self.options.timeout_s * (1 + payload / RUN_NBYTES)
        (status,) = self.get_into([found.key], [value], deadline_s)
        if status is Status.TIMEOUT:
            raise TimeoutError(f"{self._connection.where} did not answer in time")
        return damage(found.key, *value) if status is Status.OK else None


def _in_pairs(answers: Sequence[object]) -> Iterator[tuple[object, object]]:
    """The answers for header and payload, value by value."""
    rest = iter(answers)
    return zip(rest, rest)


def _refusal(answers: Iterable[object]) -> glide.RequestError | None:
    """The first refusal among answers."""
    return next((each for each in answers if isinstance(each, glide.RequestError)), None)


def _refused(error: glide.RequestError) -> Status:
    """The status of a key after a server refused a command."""
    words = str(error).replace(":", " ").split()
    if "OOM" in words:
        return Status.FULL
    if "WRONGTYPE" in words:
        return Status.CORRUPT
    return Status.DOWN
