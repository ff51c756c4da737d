"""Chooses the sessions of a closed loop, and names the users left without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvgraft_replay.report.summary import count
from kvgraft_replay.workload import TraceRequest, Workload

__all__ = ["Sessions", "choose_sessions"]

Session = tuple[TraceRequest, ...]


class Sessions(NamedTuple):
    """Sessions in the order in which users take them.

    Attributes:
        chosen: non-empty sessions of consecutive requests.
        notices: notes on the choice for readers of the result.
    """

    chosen: tuple[Session, ...]
    notices: tuple[str, ...]


def choose_sessions(workload: Workload, users: int, limit: int | None) -> Sessions:
    """Choose the sessions that `users` users play, with at most `limit` requests.

    Whole sessions in the workload's order, as many as stay within the limit, if it holds the first
    session of every user. Otherwise every user plays the beginning of one session, with equal
    numbers of requests as far as the sessions allow.
    """
    first = workload.sessions[:users]
    if limit is None or sum(map(len, first)) <= limit:
        chosen = _within(workload.sessions, limit)
    else:
        chosen = tuple(part for part in _beginnings(first, limit) if part)
    return Sessions(chosen, tuple(_notices(users, limit, first, chosen)))


def _notices(
    users: int, limit: int | None, first: Sequence[Session], chosen: Sequence[Session]
) -> Iterator[str]:
    """Notes on sessions that the limit cuts and on users without one, with advice for both."""
    whole = sum(map(len, first))
    reasons, advice = [], []
    if len(first) < users:
        reasons.append(f"the workload has {count(len(first), 'session')}")
        advice.append(f"at most {count(len(first), 'user')}")
    if limit is not None and whole > limit:
        advice.append(f"a limit of {whole} or more")
    if len(chosen) < len(first):
        reasons.append(f"limit {limit} is one request for each of {count(len(chosen), 'session')}")
    give = " and ".join(advice)
    n_cut = sum(len(part) < len(session) for part, session in zip(chosen, first))
    if n_cut:
        yield (
            f"limit {limit} leaves only the beginning of {n_cut} of "
            f"{count(len(chosen), 'session')}; give {give}"
        )
    if len(chosen) < users:
        yield (
            f"{users - len(chosen)} of {users} users have no session: {' and '.join(reasons)}; "
            f"give {give}"
        )


def _within(sessions: Sequence[Session], limit: int | None) -> tuple[Session, ...]:
    """Whole sessions, in order, until the next does not fit."""
    n_requests = 0
    for position, session in enumerate(sessions):
        n_requests += len(session)
        if limit is not None and n_requests > limit:
            return tuple(sessions[:position])
    return tuple(sessions)


def _beginnings(sessions: Sequence[Session], limit: int) -> tuple[Session, ...]:
    """Equal numbers of first requests; the rest of a short session's share goes to the others."""
    counts = [0] * len(sessions)
    left = limit
    while left:
        open_ones = [i for i, session in enumerate(sessions) if counts[i] < len(session)]
        for index in open_ones[:left]:
            counts[index] += 1
        left -= min(left, len(open_ones))
    return tuple(session[:count] for session, count in zip(sessions, counts))
