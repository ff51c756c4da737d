"""Reads trace files line by line; errors name place and fault.

Every reader of a trace format gets its lines here, so a truncated archive, a binary file or a wrong
type has the same message for every format: `path:line: fault; next action`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kvgraft_replay.errors import TraceError
from kvgraft_replay.numbers import number_of

__all__ = ["Record", "cells_of", "read_records", "read_rows", "read_texts", "shown"]

LINE_LIMIT_BYTES = 1 << 28
MOST_TOKENS = 2**31 - 1
"""Most tokens of one request: a replay numbers distinct tokens with int32."""
GZIP_MAGIC = b"\x1f\x8b"


class Record:
    """A JSON object or a CSV row of a trace, and its place.

    Args:
        path: the trace file.
        line: line number, from 1.
        fields: the object.
        part: the part of the line, such as `"request 3"`; empty for the whole line.
    """

    __slots__ = ("fields", "line", "part", "path")

    def __init__(self, path: Path, line: int, fields: dict[str, object], part: str = "") -> None:
        self.path = path
        self.line = line
        self.fields = fields
        self.part = part

    def error(self, what: str, action: str) -> TraceError:
        """The error to raise about this record."""
        part = f"{self.part}: " if self.part else ""
        return TraceError(f"{self.path}:{self.line}: {part}{what}; {action}")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.fields.get(name) is not None

    def has_any(self, *names: str) -> bool:
        """Whether one of the fields is there and not null."""
        return any(map(self.has, names))

    def any_of(self, *names: str) -> object:
        """The value of the first of these fields that is there; None if none is."""
        return next((self.fields[name] for name in names if self.has(name)), None)

    def integer(self, *names: str, least: int) -> int:
        """A number of tokens, at least `least`; with several names, the first that is there."""
        name, value = self._field(*names)
        if type(value) is not int:
            raise self._wrong_type(name, value, "an integer")
        if not least <= value <= MOST_TOKENS:
            bound = f"at least {least}" if value < least else f"at most {MOST_TOKENS:,}"
            raise self.error(
                f"{name!r} is {shown(value)}, expected {bound}", "repair or remove the line"
            )
        return value

    def seconds(self, *names: str) -> float:
        """A number that is finite and not negative; with several names, as `integer`."""
        name, value = self._field(*names)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._wrong_type(name, value, "a number")
        if not 0 <= value < 1e19:  # also false for NaN
            raise self.error(
                f"{name!r} is {shown(value)}, expected a finite number of at least 0",
                "repair or remove the line",
            )
        return float(value)

    def array(self, name: str) -> list[object]:
        """A list field."""
        _, value = self._field(name)
        if not isinstance(value, list):
            raise self._wrong_type(name, value, "a list")
        return value

    def nested(self, value: object, part: str) -> Record:
        """An object inside this one."""
        part = f"{self.part}, {part}" if self.part else part
        if not isinstance(value, dict):
            raise self.error(
                f"{part} is {shown(value)}, expected an object", "repair or remove the line"
            )
        return Record(self.path, self.line, value, part)

    def _field(self, *names: str) -> tuple[str, object]:
        for name in names:
            if name in self.fields:
                return name, self.fields[name]
        found = ", ".join(sorted(map(str, self.fields))[:8]) or "none"
        raise self.error(
            f"field {names[0]!r} is missing, found: {found}", "repair or remove the line"
        )

    def _wrong_type(self, name: str, value: object, expected: str) -> TraceError:
        return self.error(
            f"{name!r} is {shown(value)}, expected {expected}", "repair or remove the line"
        )


def read_records(path: Path) -> Iterator[Record]:
    """The JSON objects of a file, one per line, plain or gzip; skips blank lines.

    Raises:
        TraceError: the file cannot be opened, is empty, not text, or damaged; or a line is not
            a JSON object.
    """
    for line, text in read_texts(path):
        yield Record(path, line, _parse(path, line, text))


def cells_of(path: Path, line: int, text: str) -> list[str]:
    """The cells of a line of a CSV file.

    Raises:
        TraceError: it is not one.
    """
    try:
        return next(csv.reader([text], skipinitialspace=True))
    except csv.Error as error:
        raise TraceError(f"{path}:{line}: no line of a CSV file: {error}") from error


def read_rows(path: Path) -> Iterator[Record]:
    """The rows of a CSV file by the names in its first line; converts numbers.

    Raises:
        TraceError: as `read_records`; or the first line names a column twice, or a row has more or
            fewer cells than that.
    """
    names: list[str] | None = None
    for line, text in read_texts(path):
        cells = cells_of(path, line, text)
        if names is None:
            names = cells
            twice = [name for name, n in Counter(names).items() if n > 1]
            if twice:
                raise TraceError(
                    f"{path}:{line}: the column {twice[0]!r} is there twice; rename or remove one"
                )
            continue
        if len(cells) != len(names):
            raise TraceError(
                f"{path}:{line}: {len(cells)} cells, and the first line names {len(names)}; repair "
                "or remove the line"
            )
        yield Record(path, line, dict(zip(names, map(_cell, cells))))


def _cell(text: str) -> object:
    try:
        number = number_of(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def read_texts(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that are not blank, with their numbers from 1 on; plain or gzip.

    Raises:
        TraceError: the file cannot be opened, is empty, not text, or damaged.
    """
    line = 0
    empty = True
    try:
        with _open(path) as file:
            while text := file.readline(LINE_LIMIT_BYTES):
                line += 1
                if text.strip():
                    empty = False
                    yield line, _decoded(path, line, text)
    except EOFError:
        raise TraceError(
            f"{path}:{line + 1}: the gzip stream ends after {line} whole lines; "
            "the file is truncated, fetch it again"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(
            f"{path}:{line + 1}: the gzip stream is damaged ({error}); fetch the file again"
        ) from None
    except OSError as error:
        raise TraceError(
            f"{path}: cannot be read: {error.strerror or error}; check path and permissions"
        ) from None
    if empty:
        raise TraceError(f"{path}: 0 requests in {line} lines; the file is empty, fetch it again")


def _open(path: Path) -> io.BufferedReader | gzip.GzipFile:
    if path.is_dir():
        raise TraceError(f"{path}: is a directory; name a trace file (.jsonl or .jsonl.gz) in it")
    if not path.exists():
        raise TraceError(f"{path}: no such file; check the path")
    if not path.is_file():
        raise TraceError(f"{path}: is not a regular file; save the trace to a file first")
    file = path.open("rb")
    if file.peek(2)[:2] != GZIP_MAGIC:
        return file
    file.close()
    return gzip.open(path, "rb")


def _decoded(path: Path, line: int, text: bytes) -> str:
    where = f"{path}:{line}"
    if len(text) >= LINE_LIMIT_BYTES:
        raise TraceError(
            f"{where}: more than {LINE_LIMIT_BYTES} bytes in a line; expected JSON lines or CSV"
        )
    try:
        if b"\0" in text:
            raise ValueError("NUL byte")
        return text.decode("utf-8-sig")
    except ValueError as error:
        raise TraceError(
            f"{where}: not UTF-8 text ({error}); expected JSON lines or CSV, plain or gzip"
        ) from None


def _parse(path: Path, line: int, text: str) -> dict[str, object]:
    where = f"{path}:{line}"
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        n_columns = len(text.rstrip())
        reason = f"{error.msg.removesuffix(' at')}, column {error.colno} of {n_columns}"
        if error.pos >= n_columns or error.msg.startswith("Unterminated"):
            reason = f"it is cut off at column {n_columns}"
            if text.lstrip().startswith("["):
                raise _no_object(where, shown(text.strip())) from None
        raise TraceError(f"{where}: not JSON: {reason}; repair or remove the line") from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: not usable JSON: {error}; repair or remove the line") from None
    if not isinstance(value, dict):
        raise _no_object(where, shown(value))
    return value


def _no_object(where: str, found: str) -> TraceError:
    return TraceError(f"{where}: {found} instead of a JSON object; expected one object per line")


def shown(value: object) -> str:
    """A JSON value for an error message, shortened if it is long."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
