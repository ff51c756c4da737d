"""Which sessions a closed loop plays, and whom that leaves without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvgraft.replay.workload import TraceRequest, Workload

__all__ = ["Sessions", "choose_sessions"]

Session = tuple[TraceRequest, ...]


class Sessions(NamedTuple):
    """Sessions in the order in which users take them.

    Attributes:
        chosen: each not empty; its requests follow one another.
        notices: what a reader of the result must know about the choice.
    """

    chosen: tuple[Session, ...]
    notices: tuple[str, ...]


def choose_sessions(workload: Workload, users: int, limit: int | None) -> Sessions:
    """The sessions `users` users play, of at most `limit` requests.

    Whole sessions in the workload's order, as many as stay within the limit, if it holds the first
    session of every user. Otherwise every user plays the beginning of one session: as many requests
    each, as far as their sessions reach.
    """
    first = workload.sessions[:users]
    whole = sum(map(len, first))
    notices = []
    if limit is not None and whole > limit:
        chosen = _beginnings(first, limit)
        n_cut = sum(len(part) < len(session) for part, session in zip(chosen, first))
        notices.append(
            f"limit {limit} leaves only the beginning of {n_cut} of {len(first)} sessions; for "
            f"whole sessions of {users} users give {whole} or more"
        )
    else:
        chosen = _within(workload.sessions, limit)
    chosen = tuple(session for session in chosen if session)
    if len(chosen) < users:
        notices.append(
            f"{users - len(chosen)} of {users} users have no session: "
            f"{len(chosen)} sessions are replayed; give fewer users or more sessions"
        )
    return Sessions(chosen, tuple(notices))


def _within(sessions: Sequence[Session], limit: int | None) -> tuple[Session, ...]:
    """Whole sessions, in order, until the next does not fit."""
    n_requests = 0
    for position, session in enumerate(sessions):
        n_requests += len(session)
        if limit is not None and n_requests > limit:
            return tuple(sessions[:position])
    return tuple(sessions)


def _beginnings(sessions: Sequence[Session], limit: int) -> tuple[Session, ...]:
    """Equal numbers of first requests; what a short session leaves goes to the others."""
    counts = [0] * len(sessions)
    left = limit
    while left:
        open_ones = [i for i, session in enumerate(sessions) if counts[i] < len(session)]
        for index in open_ones[:left]:
            counts[index] += 1
        left -= min(left, len(open_ones))
    return tuple(session[:count] for session, count in zip(sessions, counts))
