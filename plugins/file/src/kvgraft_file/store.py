"""The embedded backend: a directory of segments, shared by the processes of one machine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from kvgraft import ConfigError
from kvgraft_file.catalog import Catalog, Entry
from kvgraft_file.directory import LOCK, Directory, holds_store
from kvgraft_file.disk import DISK_ERRORS, TruncatedRead
from kvgraft_file.options import FileOptions
from kvgraft_file.record import Record, read_record
from kvgraft_file.segment import Segment
from kvgraft_file.transfer import Incoming, Scratch
from kvgraft_file.verifying import verify_segment
from kvgraft_file.versions import VersionFiles
from kvgraft_file.writer import Writer
from kvgraft_storage import (
    BLOCK_NBYTES,
    HEADER_NBYTES,
    Capabilities,
    Counters,
    Damage,
    EventLog,
    Status,
    StorageBackend,
    StoreStats,
    Value,
    VerifyReport,
    round_up,
)

__all__ = ["FileBackend"]

RUN_NBYTES = 16 << 20
"""Most bytes of one read."""

BATCH_SET_NBYTES = 2 << 20
"""Payload bytes of one write: they are still in the CPU's cache after the checksum."""

BATCH_GET_NBYTES = 8 << 20
"""Payload bytes of one read: the next read runs while this one is verified."""

LOCK_S = 10.0
"""Longest wait for the directory's lock in calls without a deadline."""


class _Wanted(NamedTuple):
    """A key to read."""

    number: int
    key: bytes
    value: Value
    entry: Entry
    stamp: int
    layout: int


class FileBackend(StorageBackend):
    """A store in a directory; see `docs/storage.md` for its format.

    Args:
        path: an existing directory that can be written to.
        options: sizes.
        clock: monotonic, in seconds.

    Attributes:
        capacity_nbytes: as in `stats`; None if only other processes know it.

    Raises:
        ConfigError: a directory that is missing or cannot be written to; too few file descriptors.
        OSError: a segment that cannot be read.
    """

    def __init__(
        self, path: Path, options: FileOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.options = options
        self.capacity_nbytes: int | None = int(options.capacity)
        self.counters = Counters()
        self._clock = clock
        self._directory = Directory(path, options.max_open_files)
        self._catalog = Catalog(self._directory)
        self._lock = threading.RLock()
        self._writing = threading.Condition(threading.Lock())
        self._scratch = Scratch()
        self._writer = Writer(
            self._directory,
            self._catalog,
            self._lock,
            self._writing,
            options.capacity,
            options.segment_nbytes,
            self.counters,
        )
        self._refreshed = clock()
        try:
            self._catalog.refresh()
            self._catalog.sort()
            self._versions = VersionFiles(path, self._directory.open_files)
        except BaseException:
            self._catalog.close()
            self._directory.close()
            raise

    @classmethod
    def open(cls, location: str, options: FileOptions) -> FileBackend:
        """A store from the location of a URL: a path, `%` escapes decoded.

        Raises:
            ConfigError: as for the class; or no path.
        """
        if not location:
            raise ConfigError("storage 'file': no directory; write file:/path/to/directory")
        return cls(Path(unquote(location)), options)

    @classmethod
    def open_existing(cls, location: str, options: FileOptions) -> FileBackend:
        """A store that was opened before, for inspection.

        Its capacity is another process's setting, so it is known only if the options give it.

        Raises:
            ConfigError: as for `open`, or the directory does not exist or holds no store.
        """
        path = Path(unquote(location))
        if not path.exists():
            raise ConfigError(
                f"storage 'file': {path} does not exist, so it holds no store; check the path"
            )
        if path.is_dir() and not holds_store(path):
            raise ConfigError(
                f"storage 'file': {path} holds no store: 0 segments, no {LOCK}; "
                "name the directory of a store"
            )
        store = cls.open(location, options)
        if "capacity" not in options.model_fields_set:
            store.capacity_nbytes = None
        return store

    @property
    def path(self) -> Path:
        """The directory."""
        return self._directory.path

    @property
    def capabilities(self) -> Capabilities:
        """Durable, shared between processes, evicts, synchronous; payloads fit into a segment."""
        longest = self.options.segment_nbytes - 3 * BLOCK_NBYTES
        return Capabilities(
            durable=True,
            shared=True,
            evicts=True,
            touch=True,
            lru=True,
            synchronous=True,
            max_payload_nbytes=longest,
            batch_set_nbytes=BATCH_SET_NBYTES,
            batch_get_nbytes=BATCH_GET_NBYTES,
            scatter=True,
            events=True,
            keeps_versions=True,
        )

    # -- without asking the disk

    def probably_has(self, keys: Sequence[bytes]) -> Sequence[bool | None]:
        """Per key, whether its record is known; None if another process may have stored it."""
        entries = self._catalog.entries  # a lookup needs no lock
        fresh = self._clock() - self._refreshed < self.options.refresh_s
        return [True if key in entries else False if fresh else None for key in keys]

    def observe(self, events: EventLog) -> None:
        """Log the keys whose records this process adds and drops, of any writer."""
        self._catalog.events = events

    def versions(self) -> Mapping[bytes, bytes]:
        """The versions in the directory when it was opened, and those set since."""
        return dict(self._versions.found)

    # -- calls

    def set_version(self, name: bytes, version: bytes) -> None:
        """Keep a version in a file of its own, and `fsync` file and directory."""
        self._expect_open()
        self._versions.set(name, version)
        self._directory.sync()

    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Per key, whether this process knows a record of it.

        `flush` makes the record durable, whichever process wrote it.
        """
        self._look_for(keys)
        with self._lock:
            found = [self._catalog.entries.get(key) for key in keys]
            self._catalog.use(keys[::-1])
            self._catalog.write_down()
            self._catalog.unsynced.update(entry.segment for entry in found if entry is not None)
            return [entry is not None for entry in found]

    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        """Read records, adjacent ones by one read; the caller verifies the payloads."""
        end = self._clock() + deadline_s
        self._look_for(keys)
        statuses = [Status.MISS] * len(keys)
        entries = self._catalog.entries  # a lookup needs no lock
        known = [each for each in map(entries.get, keys) if each is not None]
        if not self._catalog.is_current(known):
            with self._lock:
                if not self._catalog.is_current(known):  # no other thread has refreshed meanwhile
                    self._refresh()
        with self._lock:
            wanted = []
            for number, (key, value) in enumerate(zip(keys, values)):
                entry = self._catalog.entries.get(key)
                if entry is None:
                    continue
                if entry.nbytes != value.nbytes:
                    larger = entry.nbytes > value.nbytes
                    statuses[number] = Status.TOO_LARGE if larger else Status.CORRUPT
                    continue
                stamp = int(self._catalog.hints.seen[entry.slot])
                wanted.append(_Wanted(number, key, value, entry, stamp, entry.segment.layout))
        found, layouts = _by_segment(wanted), {}
        for segment, mine in found.items():
            for each, status in zip(mine, self._read(segment, mine, end)):
                statuses[each.number] = status
        for segment in found:
            layouts[segment] = self._catalog.hints.layout(segment.header.number)
        stamps = self._catalog.hints.stamps_of([each.entry.slot for each in wanted])
        for each, stamp in zip(wanted, stamps):
            if stamp != each.stamp or layouts[each.entry.segment] != each.layout:
                statuses[each.number] = Status.MISS  # overwritten meanwhile
        with self._lock:
            read = [key for key, status in zip(keys, statuses) if status is Status.OK]
            self._catalog.use(read[::-1])
            self._catalog.write_down()
        return statuses

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        """Append records, by one write per segment; existing ones are kept."""
        end = self._clock() + deadline_s
        if not self._writing.acquire(timeout=max(0.0, deadline_s)):
            return [Status.TIMEOUT] * len(keys)
        try:
            self._expect_open()
            return self._writer.store(keys, values, end - self._clock())
        except TimeoutError:
            return [Status.TIMEOUT] * len(keys)
        finally:
            self._writing.release()

    def touch(self, keys: Sequence[bytes]) -> None:
        """Record a use; other processes see it after about a second."""
        with self._lock:
            self._expect_open()
            self._catalog.use(keys)
            self._catalog.write_down()

    def remove(self, keys: Sequence[bytes]) -> Sequence[Status]:
        """Mark records removed on disk, for every process and after a restart."""
        self._look_for(keys)
        statuses = []
        for key in keys:
            with self._lock:
                entries = self._catalog.take(key)
            try:
                self._remove_records(key, entries)
            finally:
                with self._lock:
                    self._catalog.put_back(entries)
            statuses.append(Status.OK if entries else Status.MISS)
        return statuses

    def clear(self) -> None:
        """Remove all segments, other processes' too; these begin new ones.

        It also removes files with a segment's name whose first block may be damaged.
        """
        with self._writing:
            self._expect_open()
            self._clear()

    def _clear(self) -> None:
        with self._directory.locked(LOCK_S), self._lock:
            self._catalog.refresh()
            self._writer.let_go()
            for segment in list(self._catalog.segments.values()):
                segment.unlink()
                self._catalog.drop(segment)
            for path in self._catalog.foreign:
                path.unlink(missing_ok=True)
            self._catalog.unsynced.clear()
            if self._catalog.events is not None:
                self._catalog.events.clear()
            self._directory.sync()

    def flush(self) -> None:
        """`fdatasync` every segment that got records, or already had them, since the last flush."""
        self._expect_open()
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            known = set(self._catalog.segments.values())
            segments, self._catalog.unsynced = self._catalog.unsynced & known, set()
            names = self._writer.names_unsynced or not all(each.mine for each in segments)
            self._writer.names_unsynced = False
        try:
            for segment in segments:
                with suppress(FileNotFoundError), segment.file:  # evicted meanwhile
                    os.fdatasync(segment.file.fd)
            if names:
                self._directory.sync()
        except OSError:
            with self._lock:
                self._catalog.unsynced |= segments
                self._writer.names_unsynced |= names
            raise

    def stats(self) -> StoreStats:
        """Counts of the directory's content, of all writers."""
        with self._lock:
            self._refresh()
            nbytes = sum(self._catalog.sizes().values())
            details = {
                **self.counters.snapshot(),
                "segments": len(self._catalog.segments),
                "foreign_files": len(self._catalog.foreign),
                "direct_io": int(self._directory.direct),
                "max_open_files": self._directory.open_files.most,
            }
            return StoreStats(len(self._catalog.entries), nbytes, self.capacity_nbytes, details)

    def verify(self) -> VerifyReport:
        """Read every segment from start to end."""
        with self._lock:
            self._refresh()
            segments = [self._catalog.segments[number] for number in sorted(self._catalog.segments)]
            damaged = [
                Damage(
                    str(path),
                    "",
                    "its first block is damaged, or it is no segment; clear removes it",
                )
                for path in self._catalog.foreign
            ]
        n_records = nbytes = 0
        for segment in segments:
            with suppress(FileNotFoundError):
                report = verify_segment(segment, self._catalog.hints)
                if segment.file.is_gone:  # reclaimed meanwhile
                    continue
                n_records += report.n_records
                nbytes += report.nbytes
                damaged += report.damaged
        return VerifyReport(n_records, nbytes, tuple(damaged))

    def healthy(self) -> bool:
        """Whether the directory is there and can be written to."""
        return not self._writer.closed and os.access(self.path, os.W_OK | os.X_OK)

    def close(self) -> None:
        """Flush, seal the active segment and close all files."""
        with self._writing:
            if self._writer.closed:
                return
            self._writer.closed = True
            self._writing.notify_all()
            try:
                self._writer.release(LOCK_S)
                self._flush()
            finally:
                self._writer.abandon()
                with self._lock:
                    self._catalog.close()
                self._directory.close()

    # -- inside

    def _expect_open(self) -> None:
        if self._writer.closed:
            raise ConfigError(f"storage 'file': {self.path} was closed; open it again")

    def _look_for(self, keys: Sequence[bytes]) -> None:
        """Read other processes' records if a key is unknown and the last refresh is old enough."""
        self._expect_open()
        if all(map(self._catalog.entries.__contains__, keys)):  # this needs no lock
            return
        with self._lock:
            if self._clock() - self._refreshed >= self.options.refresh_s:
                self._refresh()

    def _refresh(self) -> None:
        self._expect_open()
        self._catalog.refresh()
        self._refreshed = self._clock()

    def _remove_records(self, key: bytes, entries: Sequence[Entry]) -> None:
        """Mark records removed, unless their segment was reclaimed: its blocks may be reused."""
        if not entries:
            return
        with self._directory.locked(LOCK_S):
            for entry in entries:
                with suppress(FileNotFoundError), entry.segment.file:
                    self._kill_one(key, entry)

    def _kill_one(self, key: bytes, entry: Entry) -> None:
        """Mark a record removed, unless the place has another one now or its segment is gone."""
        segment = entry.segment
        if not segment.file.try_mark(entry.offset, entry.size):
            return
        try:
            there = None
            with suppress(TruncatedRead):
                there = read_record(segment.file.block(entry.offset), segment.place(entry.offset))
                if there is None and self._is_place(entry):
                    there = Record(key, entry.nbytes, False, bytes(HEADER_NBYTES))
            if there is not None and there.key == key:
                segment.mark_removed(entry.offset, there)
                with self._lock:
                    self._catalog.hints.end(entry.slot)
        finally:
            segment.file.unmark(entry.offset, entry.size)

    def _is_place(self, entry: Entry) -> bool:
        """Whether a place still exists; else other processes' records may cover it."""
        with self._lock:
            mine = entry.segment.places.get(entry.offset) is entry
            return mine and self._catalog.is_current([entry])

    def _read(self, segment: Segment, wanted: Sequence[_Wanted], end: float) -> list[Status]:
        """Read records of one segment, ordered by offset."""
        statuses = []
        try:
            with segment.file as file:
                for run in _runs(wanted):
                    late = self._clock() >= end
                    statuses += [Status.TIMEOUT] * len(run) if late else self._read_run(run)
                if not file.is_gone:  # else the data may be the next segment's
                    return statuses
        except FileNotFoundError:
            pass
        with self._lock:
            self._catalog.drop(segment)
        return [Status.MISS] * len(wanted)

    def _read_run(self, run: Sequence[_Wanted]) -> list[Status]:
        incoming = Incoming.of([each.value for each in run], self._scratch)
        segment, offset = run[0].entry.segment, run[0].entry.offset
        try:
            segment.file.read([piece for each in incoming for piece in each.pieces], offset)
        except (TruncatedRead, OSError) as error:
            if isinstance(error, OSError) and error.errno not in DISK_ERRORS:
                raise
            if len(run) == 1:
                return [Status.CORRUPT]
            return [self._read_run([each])[0] for each in run]
        statuses = []
        for each, coming in zip(run, incoming):
            status = coming.finish(each.key, segment.place(each.entry.offset))
            statuses.append(status)
            if status is Status.MISS:  # removed by another process
                with self._lock:
                    if each.entry.key == each.key:
                        self._catalog.forget(each.key, each.entry)
        return statuses


def _by_segment(wanted: Iterable[_Wanted]) -> dict[Segment, list[_Wanted]]:
    """Keys by segment, ordered by offset."""
    found: dict[Segment, list[_Wanted]] = {}
    for each in wanted:
        found.setdefault(each.entry.segment, []).append(each)
    for mine in found.values():
        mine.sort(key=lambda each: each.entry.offset)
    return found


def _runs(wanted: Sequence[_Wanted]) -> Iterator[list[_Wanted]]:
    """Runs of adjacent records, each for one read."""
    run: list[_Wanted] = []
    nbytes = 0
    for each in wanted:
        size = BLOCK_NBYTES + round_up(each.entry.nbytes)
        if run:
            last = run[-1].entry
            behind = last.offset + BLOCK_NBYTES + round_up(last.nbytes)
            if behind != each.entry.offset or nbytes + size > RUN_NBYTES:
                yield run
                run, nbytes = [], 0
        run.append(each)
        nbytes += size
    if run:
        yield run
