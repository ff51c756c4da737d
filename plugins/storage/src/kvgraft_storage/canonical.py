"""Values as bytes that are equal exactly when the values are, in every process.

`hash()` changes with the process and `repr()` with the type; names of data on disk must do neither.
The bytes are deterministic CBOR (RFC 8949, section 4.2): every value has one encoding, and no two
values share one.
"""

from __future__ import annotations

from typing import Any

import cbor2

from kvgraft.errors import ConfigError

__all__ = ["MAX_DEPTH", "Plain", "decode", "encode", "encode_exact"]

Plain = object
"""None, an int, a str, bytes, or a tuple of these; in a fingerprint also a bool."""

MAX_DEPTH = 16
"""Tuples inside tuples."""

SHARED = (25, 28, 29, 256)
"""Tags of CBOR by which a value stands for another one: a few bytes would mean gigabytes."""


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
            `1` and `1.0` are equal in Python and not in storage. Or a text that is no Unicode.
    """
    return cbor2.dumps(_plain(value, subject, depth), canonical=True)


def encode_exact(value: Plain, subject: str = "value", depth: int = MAX_DEPTH) -> bytes:
    """Like `encode`, but with `bool`: `True` and `1` get different bytes, although they are equal.

    For values that are only named and never looked up in a table, such as a fingerprint's.

    Args:
        value: None, a bool, an int, a str, bytes, or a tuple of these.
        subject: its name, for the message.
        depth: tuples inside tuples that are taken.

    Raises:
        ConfigError: another type, also inside a tuple, or a text that is no Unicode.
    """
    return cbor2.dumps(_plain(value, subject, depth, bools=True), canonical=True)


def decode(encoded: bytes, depth: int = MAX_DEPTH) -> Plain:
    """The value whose canonical bytes these are, as `encode` makes them.

    Args:
        encoded: the bytes.
        depth: tuples inside tuples that are taken.

    Raises:
        ValueError: they are not the canonical bytes of any value.
    """
    try:
        value: Plain = cbor2.loads(
            encoded, max_depth=depth + 1, immutable=True, semantic_decoders=NOT_SHARED
        )
        again = encode(value, depth=depth)
    except (cbor2.CBORError, ConfigError) as error:
        raise ValueError(str(error)) from None
    if again != encoded:
        raise ValueError("another encoding than the canonical one, or bytes follow the value")
    return value


def _no_reference(*given: object) -> object:
    raise ValueError("values that stand for others are not canonical")


NOT_SHARED = dict.fromkeys(SHARED, _no_reference)


def _plain(value: Any, subject: str, depth: int, *, bools: bool = False) -> Plain:
    """The value of plain types, without subclasses."""
    if value is None or (bools and isinstance(value, bool)):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, str):
        try:
            return value.encode().decode()
        except UnicodeEncodeError as error:
            said = f"{subject}: character {error.start} of {value!r:.60} is half a surrogate pair"
            raise ConfigError(f"{said}, not text; use valid Unicode or bytes") from None
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, tuple) and depth > 0:
        return tuple([_plain(each, subject, depth - 1, bools=bools) for each in value])
    if isinstance(value, tuple):
        raise ConfigError(f"{subject}: tuples nest deeper than {MAX_DEPTH}; use a flat tuple")
    kinds = "None, bool, int" if bools else "None, int"
    raise ConfigError(
        f"{subject}: {value!r:.60} is a {type(value).__name__}, which has no canonical bytes; "
        f"use {kinds}, str, bytes or tuples of them"
    )
