"""Opens a trace of any format kvgraft reads."""

from __future__ import annotations

import os
from pathlib import Path

from kvgraft_replay.agentic import read_agentic
from kvgraft_replay.errors import TraceError
from kvgraft_replay.lines import read_records
from kvgraft_replay.mooncake import read_mooncake
from kvgraft_replay.workload import Workload

__all__ = ["open_workload"]


def open_workload(
    path: str | os.PathLike[str], *, limit: int | None = None, users: int | None = None
) -> Workload:
    """Read a trace, plain or gzip, whose format its first line tells.

    Args:
        path: a Mooncake trace (lines with `hash_ids`) or a coding-agent trace (lines with
            `requests`).
        limit: read this many requests and leave the rest of the file alone.
        users: read enough for a closed loop of that many users: whole sessions, at least
            one for each user.

    Raises:
        TraceError: the file cannot be read, is of no known format, or a line of it is damaged
            or contradicts itself.
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise TraceError(f"{path}: limit {limit} leaves no request; use a limit of at least 1")
    first = next(read_records(path))
    if first.has("hash_ids"):
        # Sessions show only when all requests are known.
        return read_mooncake(path, limit=limit if users is None else None)
    if first.has("requests"):
        workload = read_agentic(path, limit=limit, users=users)
        if not workload.requests:
            raise TraceError(
                f"{path}: 0 requests left after leaving out sessions with 'dup_of'; "
                "use a trace with sessions of its own"
            )
        return workload
    fields = ", ".join(sorted(first.fields)[:8]) or "none"
    raise first.error(
        f"unknown trace format, fields: {fields}",
        "expected 'hash_ids' (Mooncake) or 'requests' (coding agents) in the first line",
    )
