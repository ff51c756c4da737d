"""Traces of block ids: Mooncake's, and those of Bailian and Dynamo, one request per line.

A line holds `timestamp` since the trace began, `input_length`, `output_length` and `hash_ids`, one
id per block of the prompt, the last block possibly partial. Equal ids mean equal blocks, and equal
ids before them mean equal prefixes.

| trace | blocks | times | sessions |
|---|---|---|---|
| Mooncake | 512 tokens | ms | not recorded |
| Bailian: lines with `chat_id` | 16 tokens | s | `parent_chat_id`, -1 for none |
| Dynamo | of any size | ms | `session_id`; later turns may have `delay` and no `timestamp` |

If lengths and numbers of ids contradict the usual block size, another one is inferred from them.

If no session is recorded, a request joins the session of the request that it continues (see
`continuation`) if that session was the first to use the last whole block that both share. So a
common system prompt does not join unrelated requests. The traces record no durations, so `think_s`
is the whole time between two arrivals.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kvgraft_replay.continuation import Recorded, contents, continuations
from kvgraft_replay.errors import TraceError
from kvgraft_replay.lines import Record, read_records, shown
from kvgraft_replay.workload import (
    Addresses,
    Span,
    TraceRequest,
    Workload,
    doubtful_times,
    join_spans,
)

__all__ = ["MOONCAKE_BLOCK_TOKENS", "read_mooncake"]

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16

LOOKED_AT = 100
"""Number of lines from whose lengths the block size is inferred."""

MOST_BLOCK_TOKENS = 1 << 20


def read_mooncake(
    path: str | os.PathLike[str],
    *,
    limit: int | None = None,
    block_tokens: int | None = None,
    unit_s: float | None = None,
) -> Workload:
    """Read a trace of block ids.

    Args:
        path: JSON lines, plain or gzip.
        limit: read only this many requests of the file.
        block_tokens: tokens per block id; by default as the format or the lengths say.
        unit_s: seconds of a unit of its times; by default the format's.

    Raises:
        TraceError: the file or a line of it is damaged or contradicts itself.
    """
    path = Path(path)
    is_bailian = next(read_records(path)).has("chat_id")
    usual = BAILIAN_BLOCK_TOKENS if is_bailian else MOONCAKE_BLOCK_TOKENS
    size = block_tokens or _block_tokens(path, usual, limit or LOOKED_AT)
    blocks = _Blocks(str(path), size)
    usual_s = 1.0 if is_bailian else 1e-3
    times = _Times(unit_s or usual_s)
    recorded: list[Recorded] = []
    arrivals: list[_Arrival] = []
    for record in read_records(path):
        arrivals.append(times.arrival(record))
        recorded.append(blocks.request(record, len(recorded)))
        if len(recorded) == limit:
            break

    if any(each.session is not None for each in arrivals):
        order = sorted(range(len(arrivals)), key=lambda index: arrivals[index].s)
        arrivals, recorded = [arrivals[i] for i in order], [recorded[i] for i in order]
    links, known_tails = continuations(recorded)
    spans = contents(recorded, links, known_tails, blocks.addresses)
    sessions = _numbered([each.session for each in arrivals]) or _sessions(recorded, links, blocks)
    latest: dict[int, float] = {}
    requests = []
    for index, (request, content) in enumerate(zip(recorded, spans, strict=True)):
        session, arrival_s = sessions[index], arrivals[index].s - arrivals[0].s
        requests.append(
            TraceRequest(
                index=index,
                session=session,
                arrival_s=arrival_s,
                think_s=arrival_s - latest.get(session, arrival_s),
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                content=content,
            )
        )
        latest[session] = arrival_s
    notices = []
    if block_tokens is None and size != usual:
        notices.append(
            f"blocks of {size} tokens, told by the lengths of {path.name}; if they are of another "
            "size, give --block-tokens"
        )
    if unit_s is None:
        notices += doubtful_times(path.name, usual_s, [each.s for each in arrivals])
    return Workload.of(
        requests,
        name=path.name,
        format="bailian" if is_bailian else "mooncake",
        has_absolute_time=True,
        block_tokens=size,
        notices=tuple(notices),
    )


def _block_tokens(path: Path, usual: int, n_lines: int) -> int:
    """Tokens per block: the usual number, or the one that the first lines' lengths allow.

    For a prompt of `n` tokens in `k` blocks, a block has from `n / k` to `(n - 1) / (k - 1)`.
    """
    low, high = 1, MOST_BLOCK_TOKENS
    with suppress(TraceError):  # a damaged line is refused when it is read
        for record in islice(read_records(path), min(n_lines, LOOKED_AT)):
            n_tokens, n_ids = record.integer(*LENGTH, least=1), len(record.array("hash_ids"))
            if not 0 < n_ids <= n_tokens:
                break
            least = max(low, -(-n_tokens // n_ids))
            most = min(high, (n_tokens - 1) // (n_ids - 1)) if n_ids > 1 else high
            if least > most:
                break
            low, high = least, most
    powers = [1 << power for power in range(high.bit_length()) if low <= 1 << power <= high]
    if low <= usual <= high or len(powers) != 1:
        return low if low == high else usual
    return powers[0]


LENGTH = ("input_length", "input_tokens")
OUTPUT = ("output_length", "output_tokens")
TIME = ("timestamp", "created_time")
DELAY = ("delay", "delay_ms")
"""Names of fields; Dynamo's traces may use the second ones."""


class _Arrival(NamedTuple):
    """A request's arrival, and its session if the trace has sessions."""

    s: float
    session: object


class _Times:
    """Arrival times and sessions, line by line."""

    def __init__(self, unit_s: float) -> None:
        self.unit_s = unit_s
        self._last: float | None = None
        self._chats: dict[object, object] = {}
        self._ends: dict[object, float] = {}

    def arrival(self, record: Record) -> _Arrival:
        session = self._session(record)
        if session in self._ends and record.any_of(*TIME) is None and record.has_any(*DELAY):
            at = self._ends[session] + record.seconds(*DELAY) * self.unit_s
        else:
            at = record.seconds(*TIME) * self.unit_s
        if session is None:
            if self._last is not None and at < self._last:
                raise record.error(
                    f"'timestamp' goes back from {self._last / self.unit_s:.0f} to "
                    f"{at / self.unit_s:.0f}",
                    "sort the lines by timestamp",
                )
            self._last = at
        else:
            self._ends[session] = at
        return _Arrival(at, session)

    def _session(self, record: Record) -> object:
        """The session's name: the first chat of a chain of parents, or as given."""
        if record.has("chat_id"):
            chat, parent = record.fields["chat_id"], record.fields.get("parent_chat_id", -1)
            return self._chats.setdefault(str(chat), self._chats.get(str(parent), str(chat)))
        return str(record.fields["session_id"]) if record.has("session_id") else None


def _numbered(names: Sequence[object]) -> list[int]:
    """Numbers of sessions in order of appearance; none if no request has a session."""
    if all(name is None for name in names):
        return []
    numbers: dict[object, int] = {}
    return [
        numbers.setdefault(index if name is None else name, len(numbers))
        for index, name in enumerate(names)
    ]


class _Blocks:
    """Gives block ids addresses, in order of appearance."""

    def __init__(self, subject: str, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.addresses = Addresses(subject)
        self.introduced_by: dict[int, int] = {}
        """Address of a block to the first request that has it."""
        self._address: dict[int, int] = {}
        self._partial: dict[int, int] = {}

    def request(self, record: Record, index: int) -> Recorded:
        prompt_tokens = record.integer(*LENGTH, least=1)
        output_tokens = record.integer(*OUTPUT, least=0)
        ids = self._ids(record, prompt_tokens)
        size = self.block_tokens
        n_whole, tail_tokens = divmod(prompt_tokens, size)
        whole = []
        tail = 0
        for position, block in enumerate(ids):
            address = self._address.get(block)
            if address is None:
                address = self._address[block] = self.addresses.take(size).first
                self.introduced_by[address] = index
                if position == n_whole:
                    self._partial[block] = tail_tokens
            n_tokens = size if position < n_whole else tail_tokens
            if self._partial.get(block, size) != n_tokens:
                raise record.error(
                    f"block {block} has {n_tokens} tokens here and "
                    f"{self._partial.get(block, size)} in an earlier line",
                    "equal ids must mean equal prompts; generate the trace again",
                )
            if position < n_whole:
                whole.append(Span(address, size))
            else:
                tail = address
        return Recorded(join_spans(whole), n_whole * size, tail, prompt_tokens, output_tokens)

    def _ids(self, record: Record, prompt_tokens: int) -> list[int]:
        ids = record.array("hash_ids")
        expected = -(-prompt_tokens // self.block_tokens)
        if len(ids) != expected:
            raise record.error(
                f"'hash_ids' has {len(ids)} ids, but an 'input_length' of {prompt_tokens} takes "
                f"{expected} blocks of {self.block_tokens} tokens",
                "repair or remove the line, or give its size as --block-tokens",
            )
        checked = [block for block in ids if type(block) is int and block >= 0]
        if len(checked) != len(ids):
            wrong = next(block for block in ids if type(block) is not int or block < 0)
            raise record.error(
                f"'hash_ids' holds {shown(wrong)}, expected integers of at least 0",
                "repair or remove the line",
            )
        return checked


def _sessions(
    requests: Sequence[Recorded], links: Sequence[int | None], blocks: _Blocks
) -> list[int]:
    previous = {later: earlier for earlier, later in enumerate(links) if later is not None}
    sessions: list[int] = []
    n_sessions = 0
    for index in range(len(requests)):
        earlier = previous.get(index)
        if earlier is not None:
            last_block = sum(requests[earlier].whole[-1]) - blocks.block_tokens
            first_user = blocks.introduced_by[last_block]
            if sessions[first_user] == sessions[earlier]:
                sessions.append(sessions[earlier])
                continue
        sessions.append(n_sessions)
        n_sessions += 1
    return sessions
