"""Coding-agent traces: one session per line, each a list of requests with run-length block ids.

A session holds `requests`, `block_size` (64 tokens if absent) and optionally `dup_of`, the session
that it repeats; repeated sessions are left out. A request holds `t` (seconds since the session
began), `in` and `out` (tokens), `runs` (`[first id, count]` pairs, whole blocks only), and, where
they were recorded, `api_time` (its duration), `think_time` (idle seconds before it) and `stop` (why
its output ended: a tool was called, or the turn ended; a hint for eviction). Ids belong to their
session: two sessions share nothing. The model is ignored: equal ids mean equal content.

A request of type `subagent` nests the requests of another agent, with times since it began. They
run inside the session, in order of time with the parent's requests: a replay runs one request of a
session at a time, and keeps the agent's order. Sessions have no absolute times.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvgraft.policies import Hint
from kvgraft_replay.continuation import Recorded, contents, continuations
from kvgraft_replay.lines import Record, read_records, shown
from kvgraft_replay.workload import (
    ADDRESS_LIMIT,
    Addresses,
    Span,
    TraceRequest,
    Workload,
    join_spans,
)

__all__ = ["AGENTIC_BLOCK_TOKENS", "THINK_LIMIT_S", "read_agentic"]

AGENTIC_BLOCK_TOKENS = 64
THINK_LIMIT_S = 300.0
"""Idle gaps are capped at this many seconds, so a replay leaves out nights and lunch breaks."""

HINTS = {"tool_use": Hint.CONTINUES, "end_turn": Hint.TURN_ENDED}
"""Stop reasons that say whether the session goes on."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A request of a session, with its agent and time."""

    agent: int
    start_s: float
    think_s: float | None
    end_s: float
    blocks: tuple[Span, ...]
    """Whole blocks, in ids of the session."""
    prompt_tokens: int
    output_tokens: int
    hint: Hint | None


def read_agentic(
    path: str | os.PathLike[str],
    *,
    limit: int | None = None,
    users: int | None = None,
    block_tokens: int | None = None,
) -> Workload:
    """Read a coding-agent trace.

    Args:
        path: JSON lines, plain or gzip.
        limit: read only this many requests of the file; the last session may be cut.
        users: with a limit, read whole sessions: one more than fit the limit, and at least one for
            each user.
        block_tokens: tokens per block id, whatever the file says.

    Raises:
        TraceError: the file or a line of it is damaged or contradicts itself.
    """
    path = Path(path)
    addresses = Addresses(str(path))
    requests: list[TraceRequest] = []
    n_sessions = 0
    largest = 0
    for record in read_records(path):
        if record.has("dup_of"):
            continue
        size = block_tokens or AGENTIC_BLOCK_TOKENS
        if record.has("block_size") and block_tokens is None:
            size = record.integer("block_size", least=1)
        largest = max(largest, size)
        room = None if limit is None or users is not None else limit - len(requests)
        calls = sorted(_calls(record, size), key=lambda call: call.start_s)[:room]
        if calls:
            requests += _session(calls, n_sessions, len(requests), size, addresses)
            n_sessions += 1
        if limit is not None and len(requests) >= limit and n_sessions >= (users or 0):
            break
    return Workload.of(
        requests,
        name=path.name,
        format="agentic",
        has_absolute_time=False,
        block_tokens=largest,
    )


def _calls(session: Record, block_tokens: int) -> Iterator[_Call]:
    """All requests of a session, agent by agent."""
    agents: list[tuple[Record, float]] = [(session, 0.0)]
    for number, (owner, began_s) in enumerate(agents):
        before_s = 0.0
        for position, value in enumerate(owner.array("requests"), start=1):
            record = owner.nested(value, f"request {position}")
            start_s = record.seconds("t")
            if start_s < before_s:
                raise record.error(
                    f"'t' goes back from {before_s:g} to {start_s:g} s",
                    "sort the session's requests by 't'",
                )
            before_s = start_s
            if record.has("requests"):
                agents.append((record, began_s + start_s))
            else:
                yield _call(record, number, began_s + start_s, block_tokens)


def _call(record: Record, agent: int, start_s: float, block_tokens: int) -> _Call:
    prompt_tokens = record.integer("in", least=1)
    blocks = [_run(record, run) for run in record.array("runs")]
    n_blocks = sum(count for _, count in blocks)
    if n_blocks != prompt_tokens // block_tokens:
        raise record.error(
            f"'runs' holds {n_blocks} blocks, but an 'in' of {prompt_tokens} has "
            f"{prompt_tokens // block_tokens} whole blocks of {block_tokens} tokens",
            "repair or remove the line, or give --block-tokens",
        )
    return _Call(
        agent=agent,
        start_s=start_s,
        think_s=record.seconds("think_time") if record.has("think_time") else None,
        end_s=start_s + (record.seconds("api_time") if record.has("api_time") else 0.0),
        blocks=join_spans(blocks),
        prompt_tokens=prompt_tokens,
        output_tokens=record.integer("out", least=0),
        hint=HINTS.get(str(record.fields.get("stop"))),
    )


def _run(record: Record, run: object) -> Span:
    if isinstance(run, list) and len(run) == 2:
        first, count = run
        # One id cannot need more addresses than exist.
        if type(first) is type(count) is int and 0 <= first < ADDRESS_LIMIT and count > 0:
            return Span(first, count)
    raise record.error(
        f"'runs' holds {shown(run)}, expected [first id >= 0, count >= 1]",
        "repair or remove the line",
    )


def _session(
    calls: Sequence[_Call], session: int, index: int, block_tokens: int, addresses: Addresses
) -> Iterator[TraceRequest]:
    n_ids = max((sum(run) for call in calls for run in call.blocks), default=0)
    base = addresses.take(n_ids * block_tokens).first
    recorded = []
    for call in calls:
        n_whole = call.prompt_tokens // block_tokens * block_tokens
        whole = tuple(
            Span(base + first * block_tokens, count * block_tokens) for first, count in call.blocks
        )
        tail = addresses.take(call.prompt_tokens - n_whole).first
        recorded.append(Recorded(whole, n_whole, tail, call.prompt_tokens, call.output_tokens))
    links, known_tails = continuations(recorded)
    spans = contents(recorded, links, known_tails, addresses)
    previous: _Call | None = None
    busy_until_s = 0.0
    for call, content in zip(calls, spans, strict=True):
        yield TraceRequest(
            index=index,
            session=session,
            arrival_s=call.start_s,
            think_s=_think_s(call, previous, busy_until_s),
            prompt_tokens=call.prompt_tokens,
            output_tokens=call.output_tokens,
            content=content,
            hint=call.hint,
        )
        index += 1
        busy_until_s = max(busy_until_s, call.end_s)
        previous = call


def _think_s(call: _Call, previous: _Call | None, busy_until_s: float) -> float:
    """The recorded idle time if the same agent continues, else the time since the last end."""
    if previous is None:
        return 0.0
    if call.think_s is not None and call.agent == previous.agent:
        return min(call.think_s, THINK_LIMIT_S)
    return min(max(call.start_s - busy_until_s, 0.0), THINK_LIMIT_S)
