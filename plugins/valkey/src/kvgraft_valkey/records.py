"""The form of a value on the servers: two strings of one slot, and runs per round trip.

Header and payload have keys of their own, so that a payload goes to and from the caller's memory
as it is; in one string, each way would cost a copy that puts them in a row or takes them apart.

A run is short because a transfer's cost is its copies, and short ones stay in the processor's
caches: 8 MiB at once took 1.3 to 2 times the processor time of 512 KiB at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvgraft_storage import HEADER_NBYTES, Status, Value, copy

__all__ = ["RUN_KEYS", "RUN_NBYTES", "Names", "pattern", "placed", "runs", "verdict"]

RUN_NBYTES = 256 << 10
"""Most payload in one run unless a single value has more."""

RUN_KEYS = 256
"""Most values in one run."""

KEY_NBYTES = 32
_HEADER, _PAYLOAD = b"}:header", b"}:payload"


class Names(NamedTuple):
    """Names of a value's two strings on the servers: `PREFIX{KEY}:header`, `...:payload`.

    The key is in hexadecimal, and braced: a cluster keeps both in the slot of the text between the
    braces (or of the prefix's own braces; that is the same for both as well).
    """

    header: bytes
    payload: bytes

    @classmethod
    def of(cls, prefix: bytes, key: bytes) -> Names:
        """The names of a storage key's strings."""
        stem = prefix + b"{" + key.hex().encode()
        return cls(stem + _HEADER, stem + _PAYLOAD)

    @classmethod
    def key_of(cls, prefix: bytes, name: bytes) -> bytes | None:
        """The storage key one of whose strings has this name; None if it is another's name."""
        digits, _, _ = name[len(prefix) + 1 :].partition(b"}")
        try:
            key = bytes.fromhex(digits.decode())
        except ValueError:
            return None
        return key if len(key) == KEY_NBYTES and name in cls.of(prefix, key) else None

    @classmethod
    def is_payload(cls, name: bytes) -> bool:
        """Whether a name is a payload's."""
        return name.endswith(_PAYLOAD)


def pattern(prefix: str) -> str:
    """The pattern with which servers find all strings; others' may match it too."""
    return f"{prefix}{{{'?' * (2 * KEY_NBYTES)}}}:*"


def runs(sizes: Sequence[int]) -> Iterator[range]:
    """Numbers of neighbours among values of these lengths, as many as go together."""
    first = nbytes = 0
    for number, size in enumerate(sizes):
        if number > first and (nbytes + size > RUN_NBYTES or number - first == RUN_KEYS):
            yield range(first, number)
            first, nbytes = number, 0
        nbytes += size
    if first < len(sizes):
        yield range(first, len(sizes))


def verdict(value: Value, header: int | None, payload: int | None) -> Status:
    """The status that the strings' lengths imply; 0 or None is a missing string.

    Half a value counts as missing: a server has evicted the other half, or is in the middle of a
    store.
    """
    if not header or not payload:
        return Status.MISS
    if payload > len(value.payload):
        return Status.TOO_LARGE
    return Status.OK if (header, payload) == (HEADER_NBYTES, len(value.payload)) else Status.CORRUPT


def placed(value: Value, header: bytes, payload: bytes) -> Status:
    """Copy the strings found into the value, if their lengths are right."""
    told = verdict(value, len(header), len(payload))
    if told is Status.OK:
        value.header[:] = header
        copy(value.payload, memoryview(payload))
    return told
