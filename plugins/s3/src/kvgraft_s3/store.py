"""The backend: one object per key, which is the value's header and payload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvgraft import ConfigError
from kvgraft_s3.failure import S3Error, reason_of, status_of
from kvgraft_s3.location import Location, key_of, path_of
from kvgraft_s3.options import S3Options
from kvgraft_storage import (
    HEADER_NBYTES,
    Capabilities,
    Damage,
    Status,
    StorageBackend,
    StoreStats,
    Value,
    VerifyReport,
    copy,
    damage,
)

if TYPE_CHECKING:
    from kvgraft_s3.client import Client

__all__ = ["S3Backend"]

LARGEST_PUT = 5 << 30
"""Most bytes that one request may store."""

PROBE = "kvgraft-probe"
"""Name of an object that nobody stores: a request for it shows whether the store works."""

WAITED = 0.95
"""Share of a deadline that requests may take; the rest is for handing over results."""

VERIFIED_AT_ONCE = 8
"""Most objects that a scan holds in memory."""


class S3Backend(StorageBackend):
    """A store in a bucket; acknowledged data is durable.

    Args:
        location: bucket and prefix.
        options: concurrency and time limits.
        client: makes the requests.

    Raises:
        ConfigError: no such bucket, access that is denied, or a server that does not answer.
    """

    def __init__(self, location: Location, options: S3Options, client: Client) -> None:
        self.location = location
        self.options = options
        self._client = client
        self._closed = False
        try:
            self._probe()
        except S3Error as error:
            self.close()
            raise ConfigError(
                f"storage 's3': {error}; check bucket, endpoint and credentials"
            ) from error

    @classmethod
    def open(cls, location: str, options: S3Options) -> S3Backend:
        """A store from the location of a URL, `BUCKET/PREFIX`.

        Raises:
            ConfigError: as for the class; or obstore cannot be loaded or configured.
        """
        where = Location.parse(location)
        try:
            from kvgraft_s3.client import Client
        except ImportError as error:
            raise ConfigError(
                f"storage 's3': obstore cannot be loaded: {error}; "
                "pip install 'obstore>=0.12,<0.13'"
            ) from error
        return cls(where, options, Client(where, options))

    @property
    def capabilities(self) -> Capabilities:
        """Durable, shared, synchronous; never evicts: a bucket's lifecycle is its owner's."""
        return Capabilities(
            durable=True,
            shared=True,
            synchronous=True,
            max_payload_nbytes=LARGEST_PUT - HEADER_NBYTES,
        )

    # -- calls

    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Per key, whether its object is there; one request per key.

        Raises:
            S3Error: a request failed.
        """
        return [status is Status.OK for status in self._look(keys)]

    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        """Read objects of exactly the expected length; of others only read the length."""
        client = self._expect_open()
        sizes = [HEADER_NBYTES + len(value.payload) for value in values]
        found = client.each(client.get, WAITED * deadline_s, [path_of(key) for key in keys], sizes)
        statuses = _statuses(found)
        for number, (told, size, value) in enumerate(zip(found, sizes, values)):
            if isinstance(told, int):
                statuses[number] = Status.TOO_LARGE if told > size else Status.CORRUPT
            elif isinstance(told, memoryview):
                value.header[:] = told[:HEADER_NBYTES]
                copy(value.payload, told[HEADER_NBYTES:])
        return statuses

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        """Store objects, replacing existing ones; after a time-out one may still be stored."""
        client = self._expect_open()
        if deadline_s <= 0:
            return [Status.TIMEOUT] * len(keys)
        objects = [b"".join(value) for value in values]
        paths = [path_of(key) for key in keys]
        return _statuses(client.each(client.put, WAITED * deadline_s, paths, objects))

    def remove(self, keys: Sequence[bytes]) -> Sequence[Status]:
        """Check which objects are there, and delete them.

        Raises:
            S3Error: a request failed.
        """
        statuses = self._look(keys)
        self._delete([path_of(key) for key, told in zip(keys, statuses) if told is Status.OK])
        return statuses

    def clear(self) -> None:
        """Delete the store's objects, of all writers; objects with other names stay."""
        for own, _ in self._listed():
            self._delete(list(own))

    def flush(self) -> None:
        """Do nothing: acknowledged data is durable."""
        self._expect_open()

    def stats(self) -> StoreStats:
        """Count objects by listing them, a request per thousand."""
        n_records = nbytes = n_foreign = 0
        for own, foreign in self._listed():
            n_records += len(own)
            nbytes += sum(own.values())
            n_foreign += foreign
        return StoreStats(n_records, nbytes, None, {"foreign_objects": n_foreign})

    def verify(self) -> VerifyReport:
        """Read all objects of the store, a few at a time."""
        client = self._expect_open()
        n_records = nbytes = 0
        damaged = []
        for own, _ in self._listed():
            paths = list(own)
            for first in range(0, len(paths), VERIFIED_AT_ONCE):
                some = paths[first : first + VERIFIED_AT_ONCE]
                found = client.each(client.read, self.options.timeout_s, some)
                _certain(found)
                for path, told in zip(some, found):
                    if isinstance(told, Exception):
                        continue  # removed meanwhile
                    n_records += 1
                    nbytes += len(told)
                    reason = _damage(path, told)
                    if reason is not None:
                        damaged.append(
                            Damage(f"{self.location}/{path}", path.rpartition("/")[2], reason)
                        )
        return VerifyReport(n_records, nbytes, tuple(damaged))

    def healthy(self) -> bool:
        """Whether a request for a missing object gets the right answer."""
        if not self._closed:
            try:
                self._probe()
            except S3Error:
                return False
        return not self._closed

    def close(self) -> None:
        """Send no more requests; those in flight end by themselves, within `timeout_s`."""
        self._closed = True
        self._client.close()

    # -- inside

    def _expect_open(self) -> Client:
        if self._closed:
            raise ConfigError(f"storage 's3': {self.location} was closed; open it again")
        return self._client

    def _probe(self) -> None:
        _certain(self._client.each(self._client.read, self.options.timeout_s, [PROBE]))

    def _look(self, keys: Sequence[bytes]) -> list[Status]:
        client = self._expect_open()
        paths = [path_of(key) for key in keys]
        return _certain(client.each(client.head, self.options.timeout_s, paths))

    def _delete(self, paths: Sequence[str]) -> None:
        if paths:
            _certain(self._client.each(self._client.delete, self.options.timeout_s, [paths]))

    def _listed(self) -> Iterator[tuple[dict[str, int], int]]:
        """Per request: paths and lengths of the store's objects, and the number of others."""
        client = self._expect_open()
        stream = client.list()
        while True:
            (listed,) = found = client.each(next, self.options.timeout_s, [stream], [None])
            _certain(found)
            if listed is None or isinstance(listed, Exception):
                return
            own = {path: size for path, size in listed if key_of(path) is not None}
            yield own, len(listed) - len(own)


def _statuses(outcomes: Sequence[object]) -> list[Status]:
    """The statuses of requests, each for one key.

    Raises:
        S3Error: all of them failed, and not by a time-out.
    """
    errors = [told for told in outcomes if isinstance(told, Exception)]
    statuses = [status_of(told) if isinstance(told, Exception) else Status.OK for told in outcomes]
    if errors and all(status is Status.DOWN for status in statuses):
        raise S3Error(reason_of(errors[0]))
    return statuses


def _certain(outcomes: Sequence[object]) -> list[Status]:
    """The statuses of requests, OK or MISS.

    Raises:
        S3Error: one of them failed.
    """
    for told in outcomes:
        if isinstance(told, Exception) and status_of(told) is not Status.MISS:
            raise S3Error(reason_of(told)) from told
    return _statuses(outcomes)


def _damage(path: str, content: memoryview) -> str | None:
    key = key_of(path)
    assert key is not None
    return damage(key, content[:HEADER_NBYTES], content[HEADER_NBYTES:])
