"""Traces of other projects: their blocks, times and sessions, and CSVs of lengths."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvgraft.errors import KvgraftError
from kvgraft_replay.detect import open_workload
from kvgraft_replay.errors import TraceError
from tests.cli.refusals import refused
from tests.commands import KVGRAFT, run_forked

from .traces import agentic_lines, mooncake_lines, shared, write_trace


def chat(number: int, parent: int, at: float, tokens: int, ids: list[int]) -> dict[str, Any]:
    """A line of Bailian's usage traces."""
    return {
        "chat_id": number,
        "parent_chat_id": parent,
        "timestamp": at,
        "input_length": tokens,
        "output_length": 20,
        "type": "text",
        "turn": 1 if parent == -1 else 2,
        "hash_ids": ids,
    }


def test_bailians_traces_have_blocks_of_16_seconds_and_parents(tmp_path: Path) -> None:
    lines = [
        chat(159, -1, 61.114, 40, [0, 1, 2]),
        chat(7, -1, 61.5, 40, [0, 8, 9]),
        chat(160, 159, 65.114, 70, [0, 1, 3, 4, 5]),
        chat(161, 160, 66.114, 100, [0, 1, 3, 4, 6, 10, 11]),
        chat(9, 5, 67.114, 10, [12]),
    ]
    workload = open_workload(write_trace(tmp_path / "qwen_traceA_blksz_16.jsonl", lines))
    assert (workload.format, workload.block_tokens) == ("bailian", 16)
    first, other, second, third, orphan = workload.requests
    assert [each.arrival_s for each in workload.requests] == pytest.approx([0, 0.386, 4, 5, 6])
    assert first.session == second.session == third.session
    assert len({first.session, other.session, orphan.session}) == 3, "its parent is not there"
    assert second.think_s == pytest.approx(4)
    assert shared(first, other) == 16
    assert shared(first, second) == 60, "prompt and output are the beginning of the next turn"


def test_the_size_of_blocks_is_found_out_from_lengths_and_numbers_of_ids(tmp_path: Path) -> None:
    """As Dynamo writes Mooncake's format, with the size of its engine's blocks."""
    lines = [
        {"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": list(range(16))},
        {"timestamp": 1500, "input_length": 130, "output_length": 1, "hash_ids": [0, 1, 20]},
    ]
    workload = open_workload(write_trace(tmp_path / "trace.jsonl", lines))
    assert (workload.format, workload.block_tokens) == ("mooncake", 64)
    assert workload.requests[1].arrival_s == 1.5
    assert shared(*workload.requests) == 128
    assert workload.notices == (
        "blocks of 64 tokens, told by the lengths of trace.jsonl; if they are of another size, "
        "give --block-tokens",
    )


def test_times_that_may_be_of_another_unit_are_noticed(tmp_path: Path) -> None:
    nanoseconds = [
        {"timestamp": number * 10**8, "input_length": 9, "output_length": 1, "hash_ids": [number]}
        for number in range(60)
    ]
    path = write_trace(tmp_path / "ns.jsonl", nanoseconds)
    assert open_workload(path).notices == (
        "60 requests of ns.jsonl come over 5,900,000 s, one in 98,333 s: its times are read in "
        "units of 0.001 s; if that is wrong, give theirs with --time-unit",
    )
    assert open_workload(path, time_unit="ns").notices == ()
    assert open_workload(path, time_unit="ms").notices == (), "as it was told"
    seconds = [{**each, "timestamp": number / 4} for number, each in enumerate(nanoseconds)]
    path = write_trace(tmp_path / "s.jsonl", seconds)
    assert open_workload(path).notices == (
        "60 requests of s.jsonl come over 15 ms, one in 0.2 ms: its times are read in units of "
        "0.001 s; if that is wrong, give theirs with --time-unit",
    )
    assert open_workload(path, time_unit="s").notices == ()
    crowd = [{**each, "timestamp": number // 4} for number, each in enumerate(nanoseconds)]
    assert open_workload(write_trace(tmp_path / "crowd.jsonl", crowd)).notices == ()
    rows = "".join(f"{number * 1000},9,1\n" for number in range(60))
    path = tmp_path / "ms.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    assert "of 1 s; if that is wrong" in open_workload(path).notices[1]
    path.write_text(f"{AZURE}2023-11-18 18:16:00,5,7\n")
    assert not any("--time-unit" in each for each in open_workload(path).notices), "dates"


def test_blocks_and_unit_can_be_given(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 100, "output_length": 1, "hash_ids": [0, 1, 2]},
        {"timestamp": 3, "input_length": 99, "output_length": 1, "hash_ids": [0, 1, 3]},
    ]
    path = write_trace(tmp_path / "trace.jsonl", lines)
    with pytest.raises(
        TraceError, match=r"takes 1 blocks of 512 .*; .* or give its size as --block-tokens$"
    ):
        open_workload(path)
    workload = open_workload(path, block_tokens=48, time_unit="s")
    assert workload.block_tokens == 48
    assert shared(*workload.requests) == 96
    assert workload.requests[1].arrival_s == 3


def test_dynamos_sessions_come_in_any_order_and_their_later_turns_by_delay(tmp_path: Path) -> None:
    turn = {"output_tokens": 5, "hash_ids": [0]}
    lines = [
        {**turn, "session_id": "a", "timestamp": 1000, "input_tokens": 64},
        {**turn, "session_id": "a", "delay": 4000, "input_tokens": 70, "hash_ids": [0, 1]},
        {**turn, "session_id": "b", "created_time": 0, "input_tokens": 64, "hash_ids": [2]},
        {**turn, "session_id": "b", "delay_ms": 500, "input_tokens": 128, "hash_ids": [2, 3]},
    ]
    requests = open_workload(write_trace(tmp_path / "trace.jsonl", lines)).requests
    assert [each.session for each in requests] == [0, 0, 1, 1]
    assert [each.arrival_s for each in requests] == [0, 0.5, 1, 5]
    assert requests[3].think_s == 4
    assert [each.prompt_tokens for each in requests] == [64, 128, 64, 70]


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:00,0,7
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 02:00:01.017335+02:00,2399,6
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,"GPT-4",1087,230,1317,API log
118,GPT-4,417,0,417,Conversation log
"""
BURST_SESSIONS = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens
9,7c,1.5,GPT-4,900,30
1,7c,2.5,GPT-4,472,18
4,,0.5,GPT-4,100,18
"""


@pytest.mark.parametrize(
    ("text", "format", "arrivals", "prompts", "outputs", "sessions"),
    [
        (AZURE, "azure", [0, 4.314579], [374, 396], [44, 109], [0, 1]),
        (AZURE_2024, "azure", [0, 1.007405], [2162, 2399], [5, 6], [0, 1]),
        (BURST, "burstgpt", [0, 40.5, 113], [472, 1087, 417], [18, 230, 0], [0, 1, 2]),
        (BURST_SESSIONS, "burstgpt", [0, 3, 8], [472, 100, 900], [18, 18, 30], [0, 1, 0]),
    ],
    ids=["azure", "azure 2024", "burstgpt", "burstgpt with sessions"],
)
@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_a_csv_of_lengths_is_read_and_shares_nothing(  # noqa: PLR0917
    tmp_path: Path,
    text: str,
    format: str,
    arrivals: list[float],
    prompts: list[int],
    outputs: list[int],
    sessions: list[int],
    name: str,
) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    workload = open_workload(path)
    assert workload.format == format
    assert [each.arrival_s for each in workload.requests] == pytest.approx(arrivals, abs=1e-6)
    assert [each.prompt_tokens for each in workload.requests] == prompts
    assert [each.output_tokens for each in workload.requests] == outputs
    assert [each.session for each in workload.requests] == sessions
    assert all(shared(a, b) == 0 for a, b in pairwise(workload.requests))
    assert sum("no prefix is shared" in each for each in workload.notices) == 1
    left_out = [each for each in workload.notices if "left out" in each]
    assert left_out == (
        [f"1 lines of {path.name} with a prompt of 0 tokens are left out"] * (text is AZURE)
    )


def test_a_replay_of_a_csv_says_once_that_nothing_is_shared(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(BURST)
    sizes = ("--component", "full", "--device-tokens", "10k", "--policy", "lru,density")
    done = run_forked(KVGRAFT, "replay", str(path), *sizes, "--time-unit", "ms")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("no prefix is shared") == 1
    written = tmp_path / "plan.json"
    size = ("--component", "full", "--device", "10k,2000M", "--no-growth", "--processes", "1")
    done = run_forked(KVGRAFT, "plan", str(path), *size, "--json", str(written))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("no prefix is shared") == 1
    assert "2000M" in done.stdout
    assert sum("no prefix" in each for each in json.loads(written.read_text())["notices"]) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{AZURE}2023-11-16 18:17:99,1,2\n", ":5: 'TIMESTAMP': second must be in 0..59; repair"),
        (f"{AZURE}soon,1,2\n", ":5: 'TIMESTAMP' is \"soon\", expected a number, or a date"),
        (
            f"{AZURE}16.11.2023 18:15:01,1,2\n",
            ":5: 'TIMESTAMP' is \"16.11.2023 18:15:01\", expected a number, or a date such as "
            "2023-11-16 18:15:46.68; repair or remove the line",
        ),
        (f"{AZURE}5,many,2\n", ":5: 'ContextTokens' is \"many\", expected an integer; repair"),
        (f"{AZURE}5,5_0,2\n", ":5: 'ContextTokens' is \"5_0\", expected an integer; repair"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens,ContextTokens\n1,2,3,4\n",
            ":1: the column 'ContextTokens' is there twice; rename or remove one",
        ),
        (f"{AZURE}5,-1,2\n", ":5: 'ContextTokens' is -1, expected at least 0; repair"),
        (f"{AZURE}5,1\n", ":5: 2 cells, and the first line names 3; repair"),
        (
            AZURE[: AZURE.index("\n") + 1],
            ": no line but its header; use a trace of requests with a prompt",
        ),
        (
            "prompt,output\n1,2\n",
            ":1: a CSV of the columns prompt, output; expected TIMESTAMP, ContextTokens, Generated",
        ),
    ],
)
def test_a_damaged_csv_is_refused_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(KvgraftError) as caught:
        open_workload(path)
    assert str(caught.value).startswith(f"{path}{expected}")


def test_blocks_and_units_that_a_format_has_not_are_refused(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text(AZURE)
    write_trace(tmp_path / "agents.jsonl", agentic_lines())
    write_trace(tmp_path / "blocks.jsonl", mooncake_lines())
    cases = {
        "csv": ["lengths.csv", "--block-tokens", "16"],
        "agents": ["agents.jsonl", "--time-unit", "ms", "--users", "1"],
        "wrong": ["blocks.jsonl", "--block-tokens", "64"],
        "synthetic": ["--synthetic", "chat", "--block-tokens", "64"],
    }
    here = {
        case: ["replay", *(str(tmp_path / part) if "." in part else part for part in parts)]
        for case, parts in cases.items()
    }
    told = {case: each.errors for case, each in refused(here).items()}
    assert "lengths.csv: --block-tokens: a CSV names no blocks; leave it out" in told["csv"]
    assert "agents.jsonl: --time-unit ms: its times are seconds; leave it out" in told["agents"]
    assert "takes 18 blocks of 64 tokens; repair" in told["wrong"]
    assert "--block-tokens is of a trace, and --synthetic reads none" in told["synthetic"]


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("x" * 140_000 + ",y", "no line of a CSV file: field larger"),
        ('"a","b"', "a CSV of the columns a, b; expected TIMESTAMP, .*, between commas"),
        ("TIMESTAMP;ContextTokens", "a CSV of the columns TIMESTAMP;ContextTokens; expected"),
        ("TIMESTAMP\tContextTokens", r"a CSV of the columns TIMESTAMP\tContextTokens; expected"),
    ],
)
def test_a_csv_that_cannot_be_read_is_no_broken_json(tmp_path: Path, first: str, said: str) -> None:
    path = tmp_path / "odd.csv"
    path.write_text(f"{first}\n1,2\n")
    with pytest.raises(TraceError, match=said):
        open_workload(path)


def test_a_csv_may_quote_its_names(tmp_path: Path) -> None:
    path = tmp_path / "quoted.csv"
    path.write_text(
        '"TIMESTAMP","ContextTokens","GeneratedTokens"\n2023-11-16 18:15:46.6805900,4808,10\n'
    )
    assert len(open_workload(path).requests) == 1
