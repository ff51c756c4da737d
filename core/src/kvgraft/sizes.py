"""Sizes as people write them: bytes as `"40GB"`, tokens as `"4M"`.

One meaning everywhere: k, M, G, T, P and E are powers of 1000; with an i, as in `Ki` or `GiB`,
powers of 1024. A `B` at the end means bytes; M is the largest unit of tokens, since `40G` probably
means bytes. Letters may be of either case, numbers may have a fraction.
"""

from __future__ import annotations

import operator
import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from kvgraft.errors import ConfigError

__all__ = [
    "Nbytes",
    "PoolTokens",
    "Tokens",
    "expect_count",
    "format_nbytes",
    "is_nbytes",
    "parse_nbytes",
    "parse_pool_tokens",
    "parse_tokens",
]

SIZE = re.compile(r"([0-9]+(?:_[0-9]{3})*(?:\.[0-9]+)?) *(?:([kmgtpe])(i?))?(b?)", re.IGNORECASE)
BYTES_ALONE = re.compile(r"[gtpe]i?\s*", re.IGNORECASE)
PLAIN = re.compile(r"\s*[+-]?[0-9]+\s*")
POWERS = {letter: power for power, letter in enumerate("kmgtpe", 1)}


def _parsed(text: str) -> tuple[Decimal, bool] | None:
    """The number, and whether its unit is bytes; None for text that is no size."""
    found = SIZE.fullmatch(text.strip())
    if found is None:
        return None
    number, letter, binary, unit = found.groups()
    base = 1024 if binary else 1000
    factor = base ** POWERS[letter.lower()] if letter else 1
    return Decimal(number.replace("_", "")) * factor, bool(unit)


def expect_count(subject: str, value: object, least: int = 0, most: int | None = None) -> int:
    """A whole number that a call was given.

    Args:
        subject: of the message: the call and its argument.
        value: an int, or a number of another library that is whole.
        least: the smallest that is allowed.
        most: the largest; None for any.

    Raises:
        ConfigError: it is of another type, smaller, or larger.
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least:
        raise ConfigError(f"{subject} {value!r:.40}; give a whole number, {least} or more")
    if most is not None and number > most:
        raise ConfigError(f"{subject} is above {most}; give fewer")
    return number


def parse_nbytes(text: str) -> int:
    """A number of bytes, such as `"40GB"`, `"256MiB"`, `"10G"` or `"4096"`, rounded down.

    Raises:
        ValueError: it is none.
    """
    parsed = _parsed(text)
    if parsed is None:
        raise ValueError(f"{text!r} is no size; write for example 256MiB")
    return int(parsed[0])


def parse_tokens(text: str) -> int:
    """A number of tokens, such as `"4M"`, `"1.5k"`, `"64Ki"` or `"4096"`.

    Raises:
        ValueError: it is none, is of bytes, or is no whole number.
    """
    parsed = _parsed(text)
    if parsed is not None and (parsed[1] or BYTES_ALONE.search(text)):
        raise ValueError(f"{text!r} is a size in bytes; give tokens, for example 4M or 4096")
    if parsed is None or parsed[0] % 1:
        raise ValueError(f"{text!r} is no number of tokens; write for example 4M or 4096")
    return int(parsed[0])


def parse_pool_tokens(text: str) -> int:
    """A pool's size in tokens, where bytes are allowed as well.

    Raises:
        ValueError: it is none, or no whole number.
    """
    try:
        return parse_tokens(text)
    except ValueError as error:
        said = "no size" if _parsed(text) is None else "no number of tokens"
        raise ValueError(
            f"{text!r} is {said}; give tokens, such as 4M, or bytes of all pools, such as 40GB"
        ) from error


def is_nbytes(text: object) -> bool:
    """Whether a size says that it is of bytes: `"40GB"` does, `"4M"` does not."""
    parsed = _parsed(text) if isinstance(text, str) else None
    return parsed is not None and parsed[1]


def format_nbytes(nbytes: int) -> str:
    """`"131.2 GB"`: powers of 1000, one decimal from a kB on."""
    size, units = float(nbytes), ["B", "kB", "MB", "GB", "TB", "PB", "EB"]
    while size >= 999.95 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:,.1f} {units[0]}" if units[0] != "B" else f"{nbytes} B"


def _nbytes(value: Any) -> Any:
    return _read(parse_nbytes, value)


def _tokens(value: Any) -> Any:
    return _read(parse_tokens, value)


def _pool_tokens(value: Any) -> Any:
    return _read(parse_pool_tokens, value)


def _read(parse: Any, value: Any) -> Any:
    # A plain number is left to pydantic, with the errors of an integer.
    if not isinstance(value, str) or PLAIN.fullmatch(value):
        return value
    try:
        return parse(value)
    except ValueError as error:
        reason = str(error).removeprefix(f"{value!r} ")  # the message names the value already
        raise PydanticCustomError("size", "{reason}", {"reason": reason}) from error


Nbytes = Annotated[int, BeforeValidator(_nbytes)]
"""An option in bytes: a number, or text such as `"40GB"` or `"256MiB"`."""

Tokens = Annotated[int, BeforeValidator(_tokens)]
"""An option in tokens: a number, or text such as `"4M"`."""

PoolTokens = Annotated[int, BeforeValidator(_pool_tokens)]
"""As `Tokens`, of pools whose size may be given in bytes instead."""
