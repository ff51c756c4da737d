"""The form of a value on the servers: two strings of one slot, and runs per round trip.

Header and payload have separate keys, so that a payload goes directly to and from the caller's
memory. One string for both would need a copy in each direction.

Runs are short because copies dominate a transfer, and short ones stay in the CPU's caches: 8 MiB at
once took 1.3 to 2 times the CPU time of 512 KiB at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvgraft_storage import HEADER_NBYTES, Status, Value, copy

__all__ = ["RUN_KEYS", "RUN_NBYTES", "Names", "pattern", "placed", "runs", "verdict"]

RUN_NBYTES = 256 << 10
"""Most payload bytes in one run, unless a single value has more."""

RUN_KEYS = 256
"""Most values in one run."""

KEY_NBYTES = 32
_HEADER, _PAYLOAD = b"}:header", b"}:payload"


class Names(NamedTuple):
    """Names of a value's two strings on the servers: `PREFIX{KEY}:header`, `...:payload`.

    The key is hexadecimal and in braces, so a cluster keeps both strings in the slot of the text
    between the braces. (If the prefix has braces, it decides the slot, for both alike.)
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
        """The storage key of a string's name; None if the name is not this store's."""
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
    """A pattern that matches all strings of the store, and maybe others."""
    return f"{prefix}{{{'?' * (2 * KEY_NBYTES)}}}:*"


def runs(sizes: Sequence[int]) -> Iterator[range]:
    """Split values of these lengths into runs of consecutive indices."""
    first = nbytes = 0
    for number, size in enumerate(sizes):
        if number > first and (nbytes + size > RUN_NBYTES or number - first == RUN_KEYS):
            yield range(first, number)
            first, nbytes = number, 0
        nbytes += size
    if first < len(sizes):
        yield range(first, len(sizes))


def verdict(value: Value, header: int | None, payload: int | None) -> Status:
    """The status for the strings' lengths; 0 or None means a missing string.

    Half a value counts as missing: the other half was evicted, or a store is in progress.
    """
    if not header or not payload:
        return Status.MISS
    if payload > len(value.payload):
        return Status.TOO_LARGE
    return Status.OK if (header, payload) == (HEADER_NBYTES, len(value.payload)) else Status.CORRUPT


def placed(value: Value, header: bytes, payload: bytes) -> Status:
    """Copy the strings into the value, if their lengths are right."""
    told = verdict(value, len(header), len(payload))
    if told is Status.OK:
        value.header[:] = header
        copy(value.payload, memoryview(payload))
    return told
