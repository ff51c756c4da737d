"""The backend: each value, header and payload in a row, is one string under a prefixed key."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, cast

import glide_sync as glide

from kvgraft import ConfigError
from kvgraft.storage import (
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
from kvgraft_valkey.pieces import RUN_KEYS, RUN_NBYTES, Piece, pieces, runs, take, whole

__all__ = ["ValkeyBackend"]

MARGIN_S = 0.02
"""Kept back from a deadline, so that a call has returned by then."""

KEY_NBYTES = 32

Ask = Callable[[Commands, Piece], object]
Judge = Callable[[Piece, object], "Status | None"]


class _Found(NamedTuple):
    """A key in a scan: its name, the memory it takes, its length; None if it is no string."""

    name: bytes
    memory_nbytes: int
    nbytes: int | None


class ValkeyBackend(StorageBackend):
    """A store on servers; keys are the prefix and the 32 bytes of a storage key.

    Args:
        connection: open; closed with the store.
        options: names and times.
        clock: seconds that only grow.

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
        """A store from the location of a URL: `HOST:PORT`, of a cluster several.

        Raises:
            ConfigError: what is wrong with location, options or servers.
        """
        connection = connect(parse_location(location), options)
        try:
            return cls(connection, options)
        except OSError as error:
            connection.close()
            raise ConfigError(f"storage 'valkey': {error}; see that it is healthy") from error

    @property
    def capabilities(self) -> Capabilities:
        """Shared and synchronous; the rest is what the servers were set up for at opening."""
        return Capabilities(
            durable=self._facts.durable,
            shared=True,
            evicts=self._facts.evicts,
            synchronous=True,
            max_payload_nbytes=self._facts.value_nbytes - HEADER_NBYTES,
        )

    # -- calls

    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Per key, whether the servers have it, damaged or not."""
        batch = self._connection.batch()
        for key in keys:
            batch.exists([self._prefix + key])
        return [answer == 1 for answer in self._answers(batch)]

    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        """Read values, the long ones in pieces; payloads are for the caller to verify."""

        def ask(batch: Commands, piece: Piece) -> None:
            batch.getrange(self._prefix + keys[piece.number], *piece.asked)

        def judge(piece: Piece, answer: object) -> Status | None:
            return take(piece, cast(bytes, answer), values[piece.number])

        sizes = [len(value.payload) for value in values]
        return self._carry_out([None] * len(keys), runs(pieces(sizes)), ask, judge, deadline_s)

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        """Store values; what is there is replaced."""

        def ask(batch: Commands, piece: Piece) -> None:
            value = b"".join(values[piece.number])
            batch.set(self._prefix + keys[piece.number], value, expiry=self._expiry)

        sizes = [len(value.payload) for value in values]
        longest = self._facts.value_nbytes - HEADER_NBYTES
        told = [Status.TOO_LARGE if size > longest else None for size in sizes]
        return self._carry_out(told, runs(whole(sizes)), ask, lambda *_: Status.OK, deadline_s)

    def remove(self, keys: Sequence[bytes]) -> Sequence[Status]:
        """Remove values; the servers free their memory in the background."""

        def ask(batch: Commands, piece: Piece) -> None:
            batch.unlink([self._prefix + keys[piece.number]])

        def judge(piece: Piece, answer: object) -> Status:
            return Status.OK if answer == 1 else Status.MISS

        work = runs(whole([0] * len(keys)))
        return self._carry_out([None] * len(keys), work, ask, judge, self.options.timeout_s)

    def clear(self) -> None:
        """Remove the keys that have this store's prefix and form, page by page."""
        for names in self._names():
            batch = self._connection.batch()
            for name in names:
                batch.unlink([name])
            self._answers(batch)

    def flush(self) -> None:
        """Do nothing: a durable server has a value on its disk before it says OK."""

    def stats(self) -> StoreStats:
        """What is in the store, as the servers count memory; looks at every key."""
        n_records = nbytes = 0
        for found in self._scan():
            nbytes += found.memory_nbytes
            n_records += found.nbytes is not None and found.nbytes > HEADER_NBYTES
        details = counts(self._connection)
        return StoreStats(n_records, nbytes, self._facts.capacity_nbytes, details)

    def verify(self) -> VerifyReport:
        """Read every value to its last byte."""
        n_records = nbytes = 0
        damaged = []
        for found in self._scan():
            n_records += 1
            nbytes += found.nbytes or 0
            reason = self._damage(found)
            if reason is not None:
                key = found.name[len(self._prefix) :]
                damaged.append(Damage(self._connection.where, key.hex(), reason))
        return VerifyReport(n_records, nbytes, tuple(damaged))

    def healthy(self) -> bool:
        """Whether every primary answers."""
        try:
            self._connection.ping()
        except (OSError, ConfigError):
            return False
        return True

    def close(self) -> None:
        """Let go of the servers, once calls of other threads have ended."""
        self._connection.close()

    # -- inside

    def _carry_out(
        self,
        told: Sequence[Status | None],
        work: Iterable[list[Piece]],
        ask: Ask,
        judge: Judge,
        deadline_s: float,
    ) -> list[Status]:
        """Ask run after run; a status per key.

        Args:
            told: what is known before; None for what is to be asked.
            work: pieces in runs.
            ask: adds a piece's command to a batch.
            judge: what an answer means for its key; None while there is more to come.
            deadline_s: seconds for all of it.

        Raises:
            ConnectionError: it is down for every key; why.
        """
        end = self._clock() + deadline_s - min(MARGIN_S, deadline_s / 4)
        statuses, rest, reason = list(told), Status.TIMEOUT, ""
        for run in work:
            left = [piece for piece in run if statuses[piece.number] is None]
            if not left:
                continue
            batch = self._connection.batch()
            for piece in left:
                ask(batch, piece)
            seconds = end - self._clock()
            if seconds <= 0:
                break
            try:
                answers = self._connection.run(batch, seconds)
            except TimeoutError:
                break
            except ConnectionError as error:
                rest, reason = Status.DOWN, str(error)
                break
            for piece, answer in zip(left, answers):
                if isinstance(answer, glide.RequestError):
                    statuses[piece.number] = _refused(answer)
                    reason = one_line(answer)
                elif statuses[piece.number] is None:
                    statuses[piece.number] = judge(piece, answer)
        decided = [rest if status is None else status for status in statuses]
        if decided and set(decided) == {Status.DOWN}:
            raise ConnectionError(reason)
        return decided

    def _answers(self, batch: Commands) -> list[object]:
        """What servers answer to commands that have no deadline; None for a key of another type.

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

    def _names(self) -> Iterator[list[bytes]]:
        """Names of this store's keys; one of another length is another's."""
        for names in self._connection.names(self.options.prefix + "?" * KEY_NBYTES):
            rest = iter(names)
            while page := list(islice(rest, RUN_KEYS)):
                yield page

    def _scan(self) -> Iterator[_Found]:
        """This store's keys that are there when their page is looked at; empty ones are not."""
        for names in self._names():
            batch = self._connection.batch()
            for name in names:
                batch.strlen(name)
                batch.custom_command(["MEMORY", "USAGE", name])
            answers = self._answers(batch)
            for name, nbytes, taken in zip(names, answers[::2], answers[1::2]):
                if isinstance(taken, int) and nbytes != 0:
                    yield _Found(name, taken, cast("int | None", nbytes))

    def _damage(self, found: _Found) -> str | None:
        """What is wrong with a value; None where nothing is, or it was removed since."""
        if found.nbytes is None:
            return "is no string"
        nbytes = max(1, found.nbytes - HEADER_NBYTES)
        value = Value(memoryview(bytearray(HEADER_NBYTES)), memoryview(bytearray(nbytes)))
        key = found.name[len(self._prefix) :]
        deadline_s = self.options.timeout_s * (1 + nbytes / RUN_NBYTES)
        (status,) = self.get_into([key], [value], deadline_s)
        if status is Status.TIMEOUT:
            raise TimeoutError(f"{self._connection.where} did not answer in time")
        if status is Status.CORRUPT and found.nbytes <= HEADER_NBYTES:
            return f"has {found.nbytes} bytes, no more than a header"
        return damage(key, value.header, value.payload) if status is Status.OK else None


def _refused(error: glide.RequestError) -> Status:
    """What it means for a key that a server refuses a command."""
    words = str(error).replace(":", " ").split()
    if "OOM" in words:
        return Status.FULL
    if "WRONGTYPE" in words:
        return Status.CORRUPT
    return Status.DOWN
