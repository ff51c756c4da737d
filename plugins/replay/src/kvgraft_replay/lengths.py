"""CSV traces of lengths and times: Azure's LLM inference traces, and BurstGPT's.

Azure's have `TIMESTAMP` (a date and a time), `ContextTokens` and `GeneratedTokens`; BurstGPT's
`Timestamp` (seconds), `Request tokens` and `Response tokens`, and some of them a `Session ID`. They
do not name content, so no two prompts share a prefix: every token of every request is new.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from kvgraft_replay.errors import TraceError
from kvgraft_replay.lines import Record, read_rows, shown
from kvgraft_replay.workload import Addresses, TraceRequest, Workload, doubtful_times, join_spans

__all__ = ["LAYOUTS", "Layout", "read_lengths"]


class Layout(NamedTuple):
    """The names of a format's columns; without sessions that column is missing."""

    format: str
    time: str
    prompt: str
    output: str
    session: str

    def fits(self, names: Sequence[str]) -> bool:
        """Whether a first line has the columns."""
        return {self.time, self.prompt, self.output} <= set(names)


LAYOUTS = (
    Layout("azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", ""),
    Layout("burstgpt", "Timestamp", "Request tokens", "Response tokens", "Session ID"),
)

DATE = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(?:Z|([+-]\d\d:\d\d))?")
"""Fractions of seconds have up to seven digits, more than Python's parser takes."""


class _Row(NamedTuple):
    arrival_s: float
    is_dated: bool
    session: object
    prompt_tokens: int
    output_tokens: int


def read_lengths(
    path: Path, layout: Layout, *, limit: int | None = None, time_unit_s: float | None = None
) -> Workload:
    """Read a trace of lengths; sorts requests by time and leaves out empty prompts.

    Args:
        path: a CSV file, plain or gzip, with the layout's columns.
        layout: its columns.
        limit: read only this many requests of the file.
        time_unit_s: seconds of one unit of times that are numbers; 1 by default.

    Raises:
        TraceError: the file or a line of it is damaged, or it has no request.
    """
    rows: list[_Row] = []
    n_empty = 0
    for record in read_rows(path):
        row = _row(record, layout, time_unit_s or 1.0)
        if row.prompt_tokens:
            rows.append(row)
        else:
            n_empty += 1
        if len(rows) == limit:
            break
    if not rows:
        found = (
            f"{n_empty} lines with a prompt of 0 tokens" if n_empty else "no line but its header"
        )
        raise TraceError(f"{path}: {found}; use a trace of requests with a prompt")
    rows.sort(key=lambda row: row.arrival_s)
    notices = [
        f"{path.name} has lengths and times, and no ids of content: no prefix is shared, so hits "
        "are 0; it shows the memory that running requests need"
    ]
    if time_unit_s is None and not rows[0].is_dated:
        notices += doubtful_times(path.name, 1.0, [each.arrival_s for each in rows])
    if n_empty:
        notices.append(f"{n_empty} lines of {path.name} with a prompt of 0 tokens are left out")
    return Workload.of(
        _requests(rows, Addresses(str(path))),
        name=path.name,
        format=layout.format,
        has_absolute_time=True,
        block_tokens=1,
        notices=tuple(notices),
    )


def _row(record: Record, layout: Layout, time_unit_s: float) -> _Row:
    value = record.fields[layout.time]
    found = DATE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        if isinstance(value, str):
            raise record.error(
                f"{layout.time!r} is {shown(value)}, expected a number, or a date such as "
                "2023-11-16 18:15:46.68",
                "repair or remove the line",
            )
        arrival_s = record.seconds(layout.time) * time_unit_s
    else:
        second, fraction, offset = found.groups()
        try:
            date = datetime.fromisoformat(f"{second}{offset or '+00:00'}")
        except ValueError as error:
            raise record.error(f"{layout.time!r}: {error}", "repair or remove the line") from None
        arrival_s = date.timestamp() + float(fraction or 0)
    prompt, output = (record.integer(name, least=0) for name in (layout.prompt, layout.output))
    session = record.fields.get(layout.session)
    name = record.line if session in (None, "") else str(session)
    return _Row(arrival_s, found is not None, name, prompt, output)


def _requests(rows: Sequence[_Row], addresses: Addresses) -> Iterator[TraceRequest]:
    sessions: dict[object, int] = {}
    latest: dict[int, float] = {}
    for index, row in enumerate(rows):
        session = sessions.setdefault(row.session, len(sessions))
        arrival_s = row.arrival_s - rows[0].arrival_s
        yield TraceRequest(
            index=index,
            session=session,
            arrival_s=arrival_s,
            think_s=arrival_s - latest.get(session, arrival_s),
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            content=join_spans([addresses.take(row.prompt_tokens + row.output_tokens)]),
        )
        latest[session] = arrival_s
