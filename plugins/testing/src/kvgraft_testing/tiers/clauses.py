"""The clauses: one set for every kind of tier."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvgraft_testing.tiers.clause import NotApplicable, tier_clause
from kvgraft_testing.tiers.driver import (
    PAGE_NBYTES,
    Key,
    OpenTier,
    Setting,
    key,
    keys,
    pages,
)
from kvgraft_testing.tiers.files import (
    DAMAGES,
    a_hanging_file,
    files_of,
    nbytes_of,
    place_of,
)
from kvgraft_testing.tiers.subject import TierSubject

__all__ = ["register_settings"]

FIRST = Setting()
LONG = Setting(page_nbytes=1 << 20)
"""Pages that take long to copy."""

HUGE = Setting(page_nbytes=3 << 20)
"""Pages that take long enough to be caught half-written."""

MIDDLE = Setting(page_nbytes=256 << 10)


def _each(names: list[Key]) -> list[list[Key]]:
    """Every key in a batch of its own: one that fails takes no other with it."""
    return [[name] for name in names]


# -- O1: contents


@tier_clause("O1", "Pages are found with their bytes after memory has other contents.")
def round_trip(subject: TierSubject) -> None:
    right = pages(keys(8), FIRST)
    with subject.place() as directory, subject.open(directory) as tier:
        tier.store(right)
        found = tier.load(keys(8), _each(keys(4, first=100))[0])
        subject.expect_found("O1", found, right, "8 pages were stored and looked up")


@tier_clause("O1", "Pages that nobody stored are not found.")
def absent(subject: TierSubject) -> None:
    with subject.place() as directory, subject.open(directory) as tier:
        tier.store(pages(keys(4), FIRST))
        found = tier.load(*_each(keys(6, first=50)))
        subject.expect(not found, "O1", f"{len(found)} of 6 pages that nobody stored are loaded")


@tier_clause("O1", "Keys that differ in one byte, or in the group, name different pages.")
def keys_apart(subject: TierSubject) -> None:
    base = key(1)
    near = [_with_other_byte(base, place) for place in (0, 7, 8, 15, 16, 23, 24, 31)]
    near += [Key(base.digest, group) for group in range(1, subject.kind.groups)]
    with subject.place() as directory, subject.open(directory) as tier:
        tier.store(pages([base], FIRST))
        found = tier.load(*_each(near))
        subject.expect(not found, "O1", f"one page is found under {len(found)} keys like its own")
        right = pages([base, *near], FIRST)
        tier.store(*(pages([name], FIRST) for name in near))
        found = tier.load(*_each(list(right)))
        subject.expect_found("O1", found, right, "keys that differ in one byte")


def _with_other_byte(name: Key, place: int) -> Key:
    digest = bytearray(name.digest)
    digest[place] ^= 1
    return Key(bytes(digest), name.group)


@tier_clause("O1", "A page that was missing is found when it has been stored.")
def missing_then_stored(subject: TierSubject) -> None:
    right = pages(keys(4), FIRST)
    with subject.place() as directory, subject.open(directory) as tier:
        subject.expect(not tier.load(*_each(keys(4))), "O1", "an empty tier finds pages")
        tier.store(right)
        end = time.monotonic() + 10
        found = tier.load(*_each(keys(4)))
        while len(found) < len(right) and time.monotonic() < end:
            time.sleep(0.2)
            found = tier.load(*_each(keys(4)))
        subject.expect_found("O1", found, right, "10 s after pages that were missing were stored")


@tier_clause("O1", "A page that is stored again is found as before.")
def stored_again(subject: TierSubject) -> None:
    right = pages(keys(4), FIRST)
    with subject.place() as directory, subject.open(directory) as tier:
        for _ in range(3):
            tier.store(right)
            found = tier.load(keys(4))
            subject.expect_found("O1", found, right, "pages were stored again")


# -- O2: damage


def _damage(name: str) -> Callable[[TierSubject], None]:
    def check(subject: TierSubject) -> None:
        right = pages(keys(6), FIRST)
        with subject.place() as directory:
            subject.life("O2", subject.storing(directory, *_batches(right)))
            expect_durable(subject, directory, right)
            one = place_of(directory, right[key(0)])
            other = place_of(directory, right[key(3)])
            if one == other and name == "exchanged":
                raise NotApplicable("no file in its directory holds pages as they are")
            told, damage = DAMAGES[name]
            damage(one, other)
            found = subject.life("O2", subject.loading(directory, *_each(keys(6))))
            subject.expect_right("O2", found, right, f"{told} between two lives")

    return check


for _name, (_told, _) in DAMAGES.items():
    tier_clause("O2", f"Where {_told}, no wrong bytes are loaded.", _name)(_damage(_name))


def _batches(right: dict[Key, bytes]) -> list[dict[Key, bytes]]:
    return [{name: content} for name, content in right.items()]


def expect_durable(subject: TierSubject, directory: Path, right: dict[Key, bytes]) -> None:
    """Pages are found by another process.

    Raises:
        NotApplicable: the tier keeps nothing for a next process.
    """
    found = subject.life("O7", subject.loading(directory, *_each(list(right))))
    subject.expect_right("O7", found, right, "another process looked pages up")
    if not found:
        raise NotApplicable("it keeps nothing for another process")


# -- O3: crash

ROUNDS = 12
KILLED_BATCHES = 12


@tier_clause("O3", "Pages of a process that is killed while it stores are whole or missing.")
def killed_while_storing(subject: TierSubject) -> None:
    chance = subject.random("kill")
    with subject.place() as directory:
        subject.life("O3", subject.storing(directory, pages(keys(2, first=999), FIRST)))
        start = time.monotonic()
        subject.life("O3", _storing_long(subject, directory, 0))
        took = time.monotonic() - start
        for number in range(1, ROUNDS + 1):
            killed = subject.begin(_storing_long(subject, directory, number))
            time.sleep(chance.uniform(0.1, 1.0) * took)
            killed.kill()
            right = pages(_names(number), MIDDLE)
            found = subject.life(
                "O3", subject.loading(directory, *_each(list(right)), setting=MIDDLE)
            )
            subject.expect_right("O3", found, right, f"after kill {number} of {ROUNDS}")


def _names(number: int) -> list[Key]:
    return keys(4 * KILLED_BATCHES, first=1000 * number)


def _storing_long(subject: TierSubject, directory: Path, number: int) -> Callable[[], None]:
    names = _names(number)

    def work() -> None:
        with subject.open(directory, MIDDLE) as tier:
            for first in range(0, len(names), 4):
                tier.store(pages(names[first : first + 4], MIDDLE))

    return work


# -- O4: concurrency


@tier_clause("O4", "Many jobs in flight at once store and load the right pages.")
def jobs_together(subject: TierSubject) -> None:
    right = pages(keys(48), FIRST)
    names = list(right)
    with subject.place() as directory, subject.open(directory) as tier:
        tier.store(*({each: right[each] for each in names[first::12]} for first in range(12)))
        found = tier.load(*(names[first : first + 4] for first in range(44, -1, -4)))
        subject.expect_found("O4", found, right, "12 jobs at once")


STOPS = 14
LOCKED_S = 2.0
"""Seconds after which a stopped process goes on: it may hold a lock that the reader waits for."""


@tier_clause("O4", "A process finds whole pages, or none, while another stores them.")
def read_while_written(subject: TierSubject) -> None:
    _read_beside(subject, 1)


@tier_clause("O4", "Two processes that store the same pages do not spoil them.")
def two_writers(subject: TierSubject) -> None:
    _read_beside(subject, 2)


def _read_beside(subject: TierSubject, n_writers: int) -> None:
    """Load pages while processes that store them are stopped, wherever they are.

    Raises:
        NotApplicable: a second process cannot open the tier.
    """
    names, chance = keys(24), subject.random("stop")
    right = pages(names, HUGE)

    def write() -> None:
        with subject.open(directory, HUGE, 4) as tier:
            for name in names:
                tier.store({name: right[name]})

    with subject.place() as directory:
        lives = [subject.begin(write) for _ in range(n_writers)]
        try:
            with _second(subject, directory) as tier:
                known: list[Key] = []
                for _ in range(STOPS):
                    time.sleep(chance.uniform(0.002, 0.03))
                    near = names[max(0, len(known) - 2) : len(known) + 2]
                    with _stopped([life.pid for life in lives]):
                        found = tier.load(*_each(near))
                    subject.expect_right("O4", found, right, "another process was storing them")
                    while len(known) < len(names) and names[len(known)] in found:
                        known.append(names[len(known)])
        finally:
            for life in lives:
                life.kill()


@contextlib.contextmanager
def _second(subject: TierSubject, directory: Path) -> Iterator[OpenTier]:
    """The tier, opened beside other processes."""
    try:
        opened = subject.kind.open(subject.target, directory, HUGE, 6)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise NotApplicable(f"a second process is refused: {told:.200}") from error
    yield opened
    opened.close()


@contextlib.contextmanager
def _stopped(pids: list[int]) -> Iterator[None]:
    """Processes that do nothing meanwhile, for `LOCKED_S` seconds at most."""

    def signal_all(number: signal.Signals) -> None:
        for pid in pids:
            os.kill(pid, number)

    signal_all(signal.SIGSTOP)
    later = threading.Timer(LOCKED_S, signal_all, (signal.SIGCONT,))
    later.start()
    try:
        yield
    finally:
        later.cancel()
        later.join()
        signal_all(signal.SIGCONT)


# -- O5: capacity


@tier_clause("O5", "Its files keep to its capacity, indexes aside, and the newest page is found.")
def capacity(subject: TierSubject) -> None:
    if not subject.target.is_bounded:
        raise NotApplicable("no option of it was given {capacity}")
    limit, n = subject.target.capacity_nbytes, 0
    with subject.place() as directory, subject.open(directory, MIDDLE) as tier:
        while n * MIDDLE.page_nbytes < 2 * limit:
            tier.store(pages(keys(8, first=n), MIDDLE))
            n += 8
        most = limit + limit // 16  # for indexes
        used = _settled(lambda: nbytes_of(directory), most)
        subject.expect(used <= most, "O5", f"{used} bytes of files, its capacity is {limit}")
        for first in range(0, n, 32):
            right = pages(keys(32, first=first), MIDDLE)
            subject.expect_right("O5", tier.load(*_each(list(right))), right, "a full tier")
        last = pages(keys(1, first=n), MIDDLE)
        tier.store(last)
        subject.expect_found("O5", tier.load(list(last)), last, "stored into a full tier")


def _settled(measure: Callable[[], int], limit: int) -> int:
    """A size, once it is within its limit; eviction may lag by 5 seconds."""
    end = time.monotonic() + 5
    while (used := measure()) > limit and time.monotonic() < end:
        time.sleep(0.1)
    return used


@tier_clause("O5", "When writes fail as on a full disk, no wrong bytes are loaded.")
def full_disk(subject: TierSubject) -> None:
    right = pages(keys(12), FIRST)
    for n_pages in (0.5, 4.5):  # within a page's own file, and within one that holds several

        def work(n_pages: float = n_pages) -> dict[Key, bytes]:
            with subject.open(directory) as tier:
                tier.store(pages(keys(2), FIRST))
                with _no_file_longer(int(n_pages * PAGE_NBYTES)):
                    tier.store(*_batches(pages(keys(10, first=2), FIRST)))
                    return tier.load(*_each(keys(12)))

        with subject.place() as directory:
            found = subject.life("O5", work)
            subject.expect_right("O5", found, right, f"files ended after {n_pages} pages")
            found = subject.life("O5", subject.loading(directory, *_each(keys(12))))
            subject.expect_right("O5", found, right, f"a life after one of {n_pages} pages a file")


@contextlib.contextmanager
def _no_file_longer(nbytes: int) -> Iterator[None]:
    """Writes beyond a length fail in this process, as they do on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# -- O6: slowness


@tier_clause("O6", "While one page's file hangs, others are stored and loaded.")
def hanging_file(subject: TierSubject) -> None:
    right = pages(keys(4), FIRST)
    with subject.place() as directory, subject.open(directory) as tier:
        tier.store(*_batches(right))
        place = place_of(directory, right[key(0)])
        if place.nbytes != PAGE_NBYTES or place_of(directory, right[key(1)]).path == place.path:
            raise NotApplicable("no page has a file of its own")
        with a_hanging_file(place.path, right[key(0)]) as release:
            tier.begin({}, [key(0)])
            tier.store(pages(keys(2, first=10), FIRST))
            found: dict[Key, bytes] = {}
            others = keys(3, first=1) if subject.kind.loads_in_parallel else []
            if others:
                found = tier.load_beside(*_each(others))
            in_time = release()
        subject.expect(in_time, "O6", "other pages had to wait until the file no longer hung")
        wanted = {name: right[name] for name in others}
        subject.expect_found("O6", found, wanted, "while one file hung")


# -- O7: restart


@tier_clause("O7", "Pages are found with their bytes by the next process.")
def restart(subject: TierSubject) -> None:
    right = pages(keys(12), FIRST)
    with subject.place() as directory:
        subject.life("O7", subject.storing(directory, right))
        found = subject.life("O7", subject.loading(directory, *_each(list(right))))
        subject.expect_right("O7", found, right, "after a restart")
        if not (found or subject.target.is_durable):
            raise NotApplicable("it keeps nothing for another process")
        subject.expect_found("O7", found, right, "after a restart")


# -- O8, O9: layout, partition

LAYOUT = frozenset({"dtype", "page_tokens", "page_blocks", "layers", "layout"})
"""Differences that change a page's meaning; the others tell whose it is."""


CONVERTED = frozenset({"dtype", "layout"})
"""Differences between which a tier can convert values; equal bytes are no conversion."""


def register_settings(differing: dict[str, tuple[Setting, Setting]]) -> None:
    """Register a clause for each thing in which two engines of a kind can differ."""
    for name, (one, other) in differing.items():
        rule = "O8" if name in LAYOUT else "O9"
        sentence = f"A page is not found by an engine that differs in {name} alone."
        tier_clause(rule, sentence, name.replace("_", "-"))(_apart(rule, name, one, other))


def _apart(rule: str, name: str, one: Setting, other: Setting) -> Callable[[TierSubject], None]:
    def check(subject: TierSubject) -> None:
        right, rights = pages(keys(4), one), pages(keys(4), other)
        with subject.place() as directory:
            subject.life(rule, subject.storing(directory, right, setting=one))
            here = subject.life(rule, subject.loading(directory, keys(4), setting=one))
            if not here:
                raise NotApplicable("it keeps nothing for another process")
            found = subject.life(rule, subject.loading(directory, *_each(keys(4)), setting=other))
            if found and name in CONVERTED and all(found[each] != right[each] for each in found):
                raise NotApplicable(f"it may convert pages for an engine of another {name}")
            subject.expect(
                not found, rule, f"{len(found)} of 4 pages are found by an engine of another {name}"
            )
            subject.life(rule, subject.storing(directory, rights, setting=other))
            found = subject.life(rule, subject.loading(directory, keys(4), setting=one))
            subject.expect_right(rule, found, right, f"an engine of another {name} stored its own")

    return check


# -- O10: completion


@tier_clause("O10", "Every job ends once, whether its pages are there or not.")
def jobs_end_once(subject: TierSubject) -> None:
    right = pages(keys(16), FIRST)
    with subject.place() as directory, subject.open(directory) as tier:
        for first in range(0, 16, 4):
            tier.store(pages(keys(4, first=first), FIRST))
        mixed = [[key(number), key(number + 100)] for number in range(16)]
        for _ in range(3):
            found = tier.load(*mixed)
            subject.expect_right("O10", found, right, "jobs with pages that are missing")


@tier_clause("O10", "A page that is lost while the tier is open is a miss; the others stay.")
def page_lost(subject: TierSubject) -> None:
    right = pages(keys(5), FIRST)
    with subject.place() as directory, subject.open(directory) as tier:
        tier.store(right)
        place = place_of(directory, right[key(2)])
        place.path.unlink()
        left = {
            name: content
            for name, content in right.items()
            if any(content[:64] in each.read_bytes() for each in files_of(directory))
        }
        found = tier.load(keys(5))
        subject.expect_right("O10", found, right, "a page's file was removed")
        found = tier.load(*_each(list(left)))
        if place.nbytes == PAGE_NBYTES:
            subject.expect_found("O10", found, left, "another page's file was removed")


@tier_clause("O10", "A page that is damaged while the tier is open is a miss, or its own bytes.")
def page_cut(subject: TierSubject) -> None:
    right = pages(keys(5), FIRST)
    with subject.place() as directory, subject.open(directory) as tier:
        tier.store(right)
        place = place_of(directory, right[key(2)])
        if place.nbytes != PAGE_NBYTES:
            raise NotApplicable("no file in its directory holds pages as they are")
        with place.path.open("r+b") as file:
            file.truncate(place.start + place.nbytes // 2)
        for _ in range(2):
            found = tier.load(keys(5))
            subject.expect_right("O10", found, right, "a page's file was cut")


# -- O11: shutdown


@tier_clause("O11", "A shutdown with jobs in flight ends, and memory is not touched afterwards.")
def shutdown_in_flight(subject: TierSubject) -> None:
    right, new = pages(keys(48), LONG), pages(keys(8, first=100), LONG)

    def work() -> None:
        with subject.open(directory, LONG, 64) as tier:
            for first in range(0, 48, 8):
                tier.store(pages(keys(8, first=first), LONG))
            tier.begin(new, keys(48))

    with subject.place() as directory:
        subject.life("O11", work)
        both = {**right, **new}
        for first in (0, 30):
            names = list(both)[first : first + 30]
            found = subject.life("O11", subject.loading(directory, *_each(names), setting=LONG))
            subject.expect_right("O11", found, both, "after a shutdown with jobs in flight")


@tier_clause("O11", "After jobs in flight were drained, memory is not touched.")
def drained(subject: TierSubject) -> None:
    if not subject.kind.drains:
        raise NotApplicable("its engine has no call that drains")
    with subject.place() as directory, subject.open(directory, LONG, 64) as tier:
        for first in range(0, 48, 8):
            tier.store(pages(keys(8, first=first), LONG))
        tier.begin(pages(keys(8, first=100), LONG), keys(48))
        subject.kind.drain(tier)


@tier_clause("O11", "A tier that was shut down can be opened again, four times over.")
def opened_again(subject: TierSubject) -> None:
    with subject.place() as directory:
        for number in range(4):
            right = pages([key(number)], FIRST)

            def work(right: dict[Key, bytes] = right) -> dict[Key, bytes]:
                with subject.open(directory) as tier:
                    tier.store(right)
                    return tier.load(list(right))

            found = subject.life("O11", work)
            subject.expect_found("O11", found, right, f"in life {number + 1}")
