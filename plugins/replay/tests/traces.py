"""Small traces in the two formats the command reads."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from kvgraft_replay.workload import TraceRequest

__all__ = ["agentic_lines", "mooncake_lines", "shared", "write_trace"]


def mooncake_lines() -> list[dict[str, Any]]:
    """Two conversations of three turns behind one system prompt of a block.

    Every prompt ends 100 tokens into a block; every output has 20 tokens.
    """
    return [
        {
            "timestamp": 1000 * turn + 300 * user,
            "input_length": 512 * (turn + 2) + 100,
            "output_length": 20,
            "hash_ids": [
                0,
                *(100 * user + block for block in range(1, turn + 2)),
                900 + 10 * user + turn,
            ],
        }
        for turn in range(3)
        for user in range(2)
    ]


def agentic_lines() -> list[dict[str, Any]]:
    """Two sessions of four calls that grow by a block of 64 tokens each."""
    return [
        {
            "id": f"session {number}",
            "block_size": 64,
            "requests": [
                {
                    "t": 5.0 * call,
                    "type": "n",
                    "in": 64 * (call + 4) + 10,
                    "out": 30,
                    "api_time": 1.0,
                    "think_time": 4.0,
                    "runs": [[1, call + 4]],
                }
                for call in range(4)
            ],
        }
        for number in range(2)
    ]


def write_trace(path: Path, lines: list[dict[str, Any]]) -> Path:
    """Write JSON lines, gzipped if the name ends in .gz."""
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def shared(first: TraceRequest, second: TraceRequest) -> int:
    """Length of the common token prefix, counted one by one."""
    count = 0
    for mine, theirs in zip(first.token_ids(), second.token_ids(), strict=False):
        if mine != theirs:
            break
        count += 1
    return count
