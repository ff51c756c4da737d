"""Opens a trace of any supported format."""

from __future__ import annotations

import os
from pathlib import Path

from kvgraft_replay.agentic import read_agentic
from kvgraft_replay.errors import TraceError
from kvgraft_replay.lengths import LAYOUTS, read_lengths
from kvgraft_replay.lines import cells_of, read_records, read_texts
from kvgraft_replay.mooncake import read_mooncake
from kvgraft_replay.workload import Workload

__all__ = ["TIME_UNITS", "open_workload"]

TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Seconds of the units that times may be in."""


def open_workload(
    path: str | os.PathLike[str],
    *,
    limit: int | None = None,
    users: int | None = None,
    block_tokens: int | None = None,
    time_unit: str | None = None,
) -> Workload:
    """Read a trace, plain or gzip; its first line gives the format.

    Args:
        path: a trace of blocks (lines with `hash_ids`: Mooncake's, Bailian's, Dynamo's), a
            coding-agent trace (lines with `requests`), or a CSV of lengths (Azure's, BurstGPT's).
        limit: read only this many requests of the file.
        users: read enough for a closed loop of that many users: whole sessions, at least
            one for each user.
        block_tokens: tokens of a block; by default as the format or the file says.
        time_unit: one of `TIME_UNITS`; by default the format's.

    Raises:
        TraceError: the file cannot be read, is of no known format, or a line of it is damaged
            or contradicts itself; or blocks or a unit are given for a format that has none.
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise TraceError(f"{path}: limit {limit} leaves no request; use a limit of at least 1")
    unit_s = None if time_unit is None else TIME_UNITS[time_unit]
    line, text = next(read_texts(path))
    whole = limit if users is None else None  # sessions are known only after the last request
    if any(mark in text for mark in ",;\t") and text.lstrip()[:1] not in tuple("{["):
        if block_tokens is not None:
            raise TraceError(f"{path}: --block-tokens: a CSV names no blocks; leave it out")
        names = cells_of(path, line, text)
        for layout in LAYOUTS:
            if layout.fits(names):
                return read_lengths(path, layout, limit=whole, time_unit_s=unit_s)
        known = " or ".join(f"{each.time}, {each.prompt}, {each.output}" for each in LAYOUTS)
        raise TraceError(
            f"{path}:{line}: a CSV of the columns {', '.join(names)[:200]}; expected {known}, "
            "between commas"
        )
    first = next(read_records(path))
    if first.has("hash_ids"):
        return read_mooncake(path, limit=whole, block_tokens=block_tokens, unit_s=unit_s)
    if first.has("requests"):
        if unit_s not in (None, 1.0):
            raise TraceError(
                f"{path}: --time-unit {time_unit}: its times are seconds; leave it out"
            )
        workload = read_agentic(path, limit=limit, users=users, block_tokens=block_tokens)
        if not workload.requests:
            raise TraceError(
                f"{path}: 0 requests left after leaving out sessions with 'dup_of'; "
                "use a trace with sessions of its own"
            )
        return workload
    fields = ", ".join(sorted(first.fields)[:8]) or "none"
    raise first.error(
        f"unknown trace format, fields: {fields}",
        "expected 'hash_ids' (Mooncake, Bailian, Dynamo) or 'requests' (coding agents) in the "
        "first line",
    )
