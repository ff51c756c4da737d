"""Mooncake traces: one request per line, with arrival times and ids of 512-token blocks.

A line holds `timestamp` (ms since the trace began), `input_length`, `output_length` and
`hash_ids`, one id per block of the prompt, the last block possibly partial. Equal ids mean equal
prompts up to and including that block.

Sessions are not recorded. A request joins the session of the one it continues (see
`continuation`) if that session was the first to use the last whole block they share: a system
prompt everybody opens with does not make strangers a conversation. The trace records no
durations, so `think_s` is the whole time between two arrivals.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvgraft_replay.continuation import Recorded, contents, continuations
from kvgraft_replay.lines import Record, read_records, shown
from kvgraft_replay.workload import Addresses, Span, TraceRequest, Workload, join_spans

__all__ = ["MOONCAKE_BLOCK_TOKENS", "read_mooncake"]

MOONCAKE_BLOCK_TOKENS = 512


def read_mooncake(
    path: str | os.PathLike[str],
    *,
    limit: int | None = None,
    block_tokens: int = MOONCAKE_BLOCK_TOKENS,
) -> Workload:
    """Read a Mooncake trace.

    Args:
        path: JSON lines, plain or gzip.
        limit: read this many requests and leave the rest of the file alone.
        block_tokens: tokens per block id.

    Raises:
        TraceError: the file or a line of it is damaged or contradicts itself.
    """
    path = Path(path)
    blocks = _Blocks(str(path), block_tokens)
    recorded: list[Recorded] = []
    arrivals: list[float] = []
    for record in read_records(path):
        arrival_s = record.seconds("timestamp") / 1000
        if arrivals and arrival_s < arrivals[-1]:
            raise record.error(
                f"'timestamp' goes back from {arrivals[-1] * 1000:.0f} to {arrival_s * 1000:.0f}",
                "sort the lines by timestamp",
            )
        arrivals.append(arrival_s)
        recorded.append(blocks.request(record, len(recorded)))
        if len(recorded) == limit:
            break

    links, known_tails = continuations(recorded)
    spans = contents(recorded, links, known_tails, blocks.addresses)
    sessions = _sessions(recorded, links, blocks)
    latest: dict[int, float] = {}
    requests = []
    for index, (request, content) in enumerate(zip(recorded, spans, strict=True)):
        session, arrival_s = sessions[index], arrivals[index] - arrivals[0]
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
    return Workload.of(
        requests,
        name=path.name,
        format="mooncake",
        has_absolute_time=True,
        block_tokens=block_tokens,
    )


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
        prompt_tokens = record.integer("input_length", least=1)
        output_tokens = record.integer("output_length", least=0)
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
                "repair or remove the line, or check the trace's block size",
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
