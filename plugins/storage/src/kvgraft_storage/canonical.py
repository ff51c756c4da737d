"""Values as bytes that are equal exactly when the values are, in every process.

`hash()` changes with the process and `repr()` with the type; names of data on disk must do neither.
An encoding is a tag, a length and the content, so no two values share one.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from kvgraft.errors import ConfigError

__all__ = ["MAX_DEPTH", "Plain", "decode", "encode", "encode_exact"]

Plain = object
"""None, an int, a str, bytes, or a tuple of these; in a fingerprint also a bool."""

MAX_DEPTH = 16
"""Tuples inside tuples."""

BOOLS: Mapping[bool, bytes] = {True: b"T", False: b"F"}
"""Tags of the two bools, which have no content."""


def encode(value: Plain, subject: str = "value", depth: int = MAX_DEPTH) -> bytes:
    """A value as canonical bytes (S8, T11).

    Values that are equal for the tree get equal bytes: a `NamedTuple` is its tuple, a `str`
    enumeration its text.

    Args:
        value: None, an int, a str, bytes, or a tuple of these.
        subject: its name, for the message.
        depth: most tuples inside tuples.

    Raises:
        ConfigError: another type, also inside a tuple; bool and float among them, because `True`,
            `1` and `1.0` are equal in Python and not in storage.
    """
    return _encode(value, subject, depth, {})


def encode_exact(value: Plain, subject: str = "value", depth: int = MAX_DEPTH) -> bytes:
    """Like `encode`, but with `bool`: `True` and `1` get different bytes, although they are equal.

    For values that are only named and never looked up in a table, such as a fingerprint's.

    Args:
        value: None, a bool, an int, a str, bytes, or a tuple of these.
        subject: its name, for the message.
        depth: tuples inside tuples that are taken.

    Raises:
        ConfigError: another type, also inside a tuple.
    """
    return _encode(value, subject, depth, BOOLS)


def decode(encoded: bytes, depth: int = MAX_DEPTH) -> Plain:
    """The value whose canonical bytes these are.

    Args:
        encoded: the bytes.
        depth: tuples inside tuples that are taken.

    Raises:
        ValueError: they encode no value.
    """
    value, end = _decode(memoryview(encoded), 0, depth)
    if end != len(encoded):
        raise ValueError(f"{len(encoded) - end} bytes follow the value")
    return value


def _encode(value: object, subject: str, depth: int, bools: Mapping[bool, bytes]) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, bool) and bools:
        return bools[value]
    if isinstance(value, int) and not isinstance(value, bool):
        number = int(value)
        return _tagged(b"i", number.to_bytes(number.bit_length() // 8 + 1, "big", signed=True))
    if isinstance(value, str):
        return _tagged(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return _tagged(b"b", bytes(value))
    if isinstance(value, tuple) and depth > 0:
        return _tagged(b"t", b"".join(_encode(each, subject, depth - 1, bools) for each in value))
    if isinstance(value, tuple):
        raise ConfigError(f"{subject}: tuples nest deeper than {MAX_DEPTH}; use a flat tuple")
    kinds = "None, bool, int" if bools else "None, int"
    raise ConfigError(
        f"{subject}: {value!r:.60} is a {type(value).__name__}, which has no canonical bytes; "
        f"use {kinds}, str, bytes or tuples of them"
    )


def _tagged(tag: bytes, content: bytes) -> bytes:
    return tag + struct.pack("<Q", len(content)) + content


def _decode(encoded: memoryview, start: int, depth: int) -> tuple[Plain, int]:
    tag = bytes(encoded[start : start + 1])
    if tag == b"n":
        return None, start + 1
    if tag in BOOLS.values():
        return tag == BOOLS[True], start + 1
    if len(encoded) < start + 9:
        raise ValueError(f"cut at byte {start}")
    (length,) = struct.unpack_from("<Q", encoded, start + 1)
    first = start + 9
    end = first + length
    if end > len(encoded):
        raise ValueError(f"cut at byte {start}")
    if tag == b"t" and depth > 0:
        items = []
        while first < end:
            item, first = _decode(encoded[:end], first, depth - 1)
            items.append(item)
        return tuple(items), end
    content = bytes(encoded[first:end])
    if tag == b"i":
        return int.from_bytes(content, "big", signed=True), end
    if tag == b"s":
        return content.decode("utf-8", "surrogatepass"), end
    if tag == b"b":
        return content, end
    raise ValueError(f"no value at byte {start}")
