"""One client of a server, or of a cluster, that any thread may use.

Failures are builtin exceptions: `TimeoutError`, or `ConnectionError` with the reason. If a server
refuses a command of a batch, its answer is a `RequestError`.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar, cast

import glide_sync as glide

from kvgraft import ConfigError

__all__ = [
    "AnyConnection",
    "ClusterConnection",
    "Commands",
    "SingleConnection",
    "milliseconds",
    "one_line",
    "unseen",
]

Client = TypeVar("Client", glide.GlideClient, glide.GlideClusterClient)
Commands = glide.Batch | glide.ClusterBatch
Table = dict[str, str]

LONGEST_S = 1e6
"""The client's value for no time-out."""

EVERYTHING = "*"
"""A pattern for all settings: servers before version 7 take only one name or pattern."""

SCAN_STEP = 1000
"""Names that a server checks in one step of a scan."""


class Connection(abc.ABC, Generic[Client]):
    """A client in use.

    Args:
        client: open.
        where: its servers, for messages.
    """

    def __init__(self, client: Client, where: str) -> None:
        self.where = where
        self._client: Client = client
        self._lock = threading.Lock()
        self._n_running = 0
        self._closed = False

    @abc.abstractmethod
    def batch(self, *, atomic: bool = False) -> Commands:
        """An empty batch for one round trip; an atomic one has keys of one slot."""

    @abc.abstractmethod
    def run(self, batch: Commands, timeout_s: float) -> list[object]:
        """Run a batch; returns an answer per command.

        Raises:
            TimeoutError: not done in time; any part of it may have been carried out.
            ConnectionError: the servers cannot be reached.
        """

    def fetch(
        self, names: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[int | None] | None:
        """Copy strings into memory; returns the length of each, None for a missing one.

        It waits as long as the client's time-out for any answer, and not less.

        Returns:
            None if the server refuses, or a string is longer than its memory.

        Raises:
            TimeoutError: not done in time.
            ConnectionError: the servers cannot be reached.
        """
        told: list[list[bytes | None]] = []
        with self._using() as client, _refusals_aside():
            told.append(client.mget(list(names), buffers=list(buffers)))
        return [None if each is None else int(each) for each in told[0]] if told else None

    @abc.abstractmethod
    def names(self, pattern: str) -> Iterator[list[bytes]]:
        """Names of keys that match, each once; keys added or removed meanwhile may be included."""

    @abc.abstractmethod
    def info(self) -> list[Table]:
        """Each primary's `INFO`."""

    @abc.abstractmethod
    def settings(self) -> list[Table]:
        """Each primary's settings; nothing if reading them is not permitted."""

    @abc.abstractmethod
    def ping(self) -> None:
        """Return if every primary answers."""

    def close(self) -> None:
        """Release the client once no thread uses it; does not wait."""
        with self._lock:
            closing = not self._closed and not self._n_running
            self._closed = True
        if closing:
            self._client.close()

    @property
    def closed(self) -> bool:
        """Whether it takes no more calls."""
        return self._closed

    @contextmanager
    def _using(self) -> Iterator[Client]:
        """The client, for one call."""
        with self._lock:
            if self._closed:
                raise ConfigError(f"storage 'valkey': {self.where} was closed; open it again")
            self._n_running += 1
        try:
            yield self._client
        except glide.TimeoutError as error:
            raise TimeoutError(f"{self.where} did not answer in time") from error
        except glide.GlideError as error:
            raise ConnectionError(f"{self.where}: {one_line(error)}") from error
        finally:
            with self._lock:
                self._n_running -= 1
                closing = self._closed and not self._n_running
            if closing:
                self._client.close()


class SingleConnection(Connection[glide.GlideClient]):
    """A client of one server."""

    def batch(self, *, atomic: bool = False) -> Commands:
        return glide.Batch(is_atomic=atomic)

    def run(self, batch: Commands, timeout_s: float) -> list[object]:
        options = glide.BatchOptions(timeout=milliseconds(timeout_s))
        with self._using() as client:
            return list(client.exec(cast(glide.Batch, batch), False, options) or ())

    def names(self, pattern: str) -> Iterator[list[bytes]]:
        cursor, seen = b"0", set[bytes]()
        while True:
            with self._using() as client:
                found = client.scan(cursor, match=pattern, count=SCAN_STEP)
            cursor = cast(bytes, found[0])
            yield unseen(cast(list[bytes], found[1]), seen)
            if cursor == b"0":
                return

    def info(self) -> list[Table]:
        with self._using() as client:
            return [_table(client.info())]

    def settings(self) -> list[Table]:
        told: list[Table] = []
        with self._using() as client, _refusals_aside():
            told.append(_decoded(client.config_get([EVERYTHING])))
        return told or [{}]

    def ping(self) -> None:
        with self._using() as client:
            client.ping()


class ClusterConnection(Connection[glide.GlideClusterClient]):
    """A client of a cluster; it finds the servers, and follows keys that move."""

    def batch(self, *, atomic: bool = False) -> Commands:
        return glide.ClusterBatch(is_atomic=atomic)

    def run(self, batch: Commands, timeout_s: float) -> list[object]:
        options = glide.ClusterBatchOptions(timeout=milliseconds(timeout_s))
        with self._using() as client:
            return list(client.exec(cast(glide.ClusterBatch, batch), False, options) or ())

    def names(self, pattern: str) -> Iterator[list[bytes]]:
        cursor: glide.ClusterScanCursor = glide.ClusterScanCursor()  # type: ignore[no-untyped-call]
        seen = set[bytes]()
        while not cursor.is_finished():
            with self._using() as client:
                found = client.scan(cursor, match=pattern, count=SCAN_STEP)
            cursor = cast(glide.ClusterScanCursor, found[0])
            yield unseen(cast(list[bytes], found[1]), seen)

    def info(self) -> list[Table]:
        with self._using() as client:
            told = client.info(route=glide.AllPrimaries())
        return [_table(each) for each in cast(dict[bytes, bytes], told).values()]

    def settings(self) -> list[Table]:
        told: list[Table] = []
        with self._using() as client, _refusals_aside():
            found = client.config_get([EVERYTHING], glide.AllPrimaries())
            nodes = cast(dict[bytes, dict[bytes, bytes]], found)
            told.extend(_decoded(each) for each in nodes.values())
        return told or [{}]

    def ping(self) -> None:
        with self._using() as client:
            client.ping(route=glide.AllPrimaries())


AnyConnection = SingleConnection | ClusterConnection


def one_line(error: BaseException) -> str:
    """An error's text, without line breaks."""
    return " ".join(str(error).split())


@contextmanager
def _refusals_aside() -> Iterator[None]:
    """Suppress the error of a refused command; other errors are raised."""
    try:
        yield
    except (glide.TimeoutError, glide.ConnectionError):
        raise
    except glide.RequestError:
        pass


def milliseconds(seconds: float) -> int:
    """Seconds as milliseconds, at least one and within the client's range."""
    return int(1000 * min(max(seconds, 0.001), LONGEST_S))


def unseen(names: Sequence[bytes], seen: set[bytes]) -> list[bytes]:
    """Drop repeated names; a scan repeats some when a server resizes its table."""
    fresh = [name for name in dict.fromkeys(names) if name not in seen]
    seen.update(fresh)
    return fresh


def _table(text: bytes) -> Table:
    """The lines `name:value` of INFO."""
    lines = (line.partition(":") for line in text.decode("utf-8", "replace").splitlines())
    return {name: value.strip() for name, colon, value in lines if colon}


def _decoded(pairs: dict[bytes, bytes]) -> Table:
    return {name.decode(): value.decode("utf-8", "replace") for name, value in pairs.items()}
