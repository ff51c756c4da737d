"""The files of a tier: where a page's bytes are in them, and damage to them."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvgraft_testing.tiers.clause import NotApplicable

__all__ = ["DAMAGES", "Place", "a_hanging_file", "files_of", "nbytes_of", "place_of"]

SAMPLE = 64
"""First bytes of a page that find it in a file; no two pages share them."""

RELEASE_S = 15.0
"""Seconds after which a file no longer hangs, whatever was told."""


class Place(NamedTuple):
    """Bytes of a page in a file."""

    path: Path
    start: int
    nbytes: int


def files_of(directory: Path) -> list[Path]:
    """The tier's files, in order."""
    return sorted(each for each in directory.rglob("*") if each.is_file())


def nbytes_of(directory: Path) -> int:
    """The bytes of all its files, without holes."""
    total = 0
    for each in files_of(directory):
        with contextlib.suppress(FileNotFoundError):
            found = each.stat()
            total += min(found.st_size, 512 * found.st_blocks)
    return total


def place_of(directory: Path, page: bytes) -> Place:
    """Where a page is, as it is; else the middle of the longest file, which holds it in some way.

    Raises:
        NotApplicable: no file is as long as a quarter of a page.
    """
    found = files_of(directory)
    for path in found:
        start = path.read_bytes().find(page[:SAMPLE])
        if start >= 0:
            return Place(path, start, len(page))
    longest = max(found, key=lambda each: each.stat().st_size, default=None)
    if longest is None or longest.stat().st_size < len(page) // 4:
        raise NotApplicable("no file in its directory holds a page")
    return Place(longest, 0, longest.stat().st_size)


def _flip(place: Place, other: Place) -> None:
    with place.path.open("r+b") as file:
        file.seek(place.start + place.nbytes // 2)
        (byte,) = file.read(1)
        file.seek(place.start + place.nbytes // 2)
        file.write(bytes([byte ^ 1]))


def _truncate(place: Place, other: Place) -> None:
    os.truncate(place.path, place.start + place.nbytes // 2)


def _zero(place: Place, other: Place) -> None:
    with place.path.open("r+b") as file:
        file.seek(place.start + place.nbytes // 2)
        file.write(bytes(place.nbytes - place.nbytes // 2))


def _exchange(place: Place, other: Place) -> None:
    """Both pages' bytes, or the whole files where each has its own."""
    if place.path != other.path:
        aside = place.path.with_name(f"{place.path.name}.aside")
        place.path.rename(aside)
        other.path.rename(place.path)
        aside.rename(other.path)
        return
    content = bytearray(place.path.read_bytes())
    one, two = (slice(each.start, each.start + each.nbytes) for each in (place, other))
    content[one], content[two] = content[two], content[one]
    place.path.write_bytes(content)


def _remove(place: Place, other: Place) -> None:
    place.path.unlink()


DAMAGES: dict[str, tuple[str, Callable[[Place, Place], None]]] = {
    "flipped": ("a byte is flipped", _flip),
    "truncated": ("the file ends in the middle of the page", _truncate),
    "zeroed": ("the second half is zero, as after a power failure", _zero),
    "exchanged": ("two pages have changed places", _exchange),
    "removed": ("the file is gone", _remove),
}
"""Damage by name: its description, and the function that does it."""


@contextlib.contextmanager
def a_hanging_file(path: Path, content: bytes) -> Iterator[Callable[[], bool]]:
    """A file whose reads do not come back, until the function that this gives is called.

    The function says whether the file was still hanging. Half a page is read then, and the end.
    Another process lets go after `RELEASE_S` seconds: the caller itself may hang.
    """
    aside = path.with_name(f"{path.name}.aside")
    path.rename(aside)
    os.mkfifo(path)
    read, write = os.pipe()
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(write)
        os.close(told)
        held = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # a reader's open comes back, a read waits
        os.write(tell, b"held")
        asked, _, _ = select.select([read], [], [], RELEASE_S)
        os.rename(aside, path)
        os.write(held, content[: min(len(content) // 2, 32 << 10)])
        os.write(tell, b"in time" if asked else b"late")
        os.close(held)
        os._exit(0)
    os.close(read)
    os.close(tell)
    assert os.read(told, 4) == b"held"
    outcome: list[bool] = []

    def release() -> bool:
        if not outcome:
            with contextlib.suppress(BrokenPipeError):
                os.write(write, b"x")
            outcome.append(os.read(told, 7) == b"in time")
            os.waitpid(pid, 0)
        return outcome[0]

    try:
        yield release
    finally:
        release()
        os.close(write)
        os.close(told)
