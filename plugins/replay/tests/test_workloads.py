"""Workloads: shared prefixes, errors of damaged traces, and that seeds decide."""

from __future__ import annotations

import gzip
import json
import time
import tracemalloc
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from kvgraft_replay.detect import open_workload
from kvgraft_replay.errors import TraceError
from kvgraft_replay.synthetic import SyntheticKind, synthetic_workload
from kvgraft_replay.workload import Workload

from .traces import shared

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(*lines: object, name: str = "trace.jsonl") -> Path:
        text = "".join(
            (line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines
        )
        path = tmp_path / name
        data = text.encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return _write


def chat(tokens: int, output: int, ids: Iterable[int], at: float = 0) -> dict[str, Any]:
    return {
        "timestamp": at,
        "input_length": tokens,
        "output_length": output,
        "hash_ids": list(ids),
    }


def call(at: float, tokens: int, output: int, *runs: list[int], **more: Any) -> dict[str, Any]:
    return {"t": at, "type": "n", "in": tokens, "out": output, "runs": list(runs), **more}


def session(*requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "s", "block_size": 64, "requests": list(requests), **more}


def assert_consistent(workload: Workload) -> None:
    assert [request.index for request in workload.requests] == list(range(len(workload.requests)))
    assert workload.totals.requests == len(workload.requests)
    assert workload.totals.input_tokens == sum(r.prompt_tokens for r in workload.requests)
    assert workload.totals.output_tokens == sum(r.output_tokens for r in workload.requests)
    grouped = [request for one in workload.sessions for request in one]
    assert sorted(request.index for request in grouped) == list(range(len(workload.requests)))
    for one in workload.sessions:
        assert len({request.session for request in one}) == 1
        assert [r.arrival_s for r in one] == sorted(r.arrival_s for r in one)
        assert one[0].think_s == 0
    for request in workload.requests:
        tokens = request.token_ids()
        assert tokens.dtype == np.int32
        assert tokens.shape == (request.prompt_tokens + request.output_tokens,)
        assert request.think_s >= 0
        assert tokens.min() >= 0


def test_requests_share_exactly_the_blocks_they_have_in_common(write: Write) -> None:
    workload = open_workload(
        write(
            chat(1500, 10, [0, 1, 2], at=0),
            chat(1500, 10, [0, 1, 3], at=5),
            chat(700, 10, [0, 4], at=9),
            chat(700, 10, [7, 8], at=9),
        )
    )
    one, two, three, four = workload.requests
    assert (shared(one, two), shared(one, three), shared(one, four)) == (1024, 512, 0)
    assert_consistent(workload)


def test_equal_prompts_share_their_partial_block_but_not_their_outputs(write: Write) -> None:
    one, two = open_workload(write(chat(600, 50, [0, 1]), chat(600, 50, [0, 1], at=1))).requests
    assert shared(one, two) == 600


def test_an_output_becomes_the_start_of_the_prompt_that_continues_it(write: Write) -> None:
    first, other, following = open_workload(
        write(
            chat(1100, 300, [0, 1, 2]),
            chat(600, 300, [9, 10], at=1),
            chat(1600, 20, [0, 1, 3, 4], at=2),
        )
    ).requests
    assert shared(first, following) == 1400
    assert shared(other, following) == 0
    assert first.session == following.session != other.session


def test_a_chain_of_short_turns_inside_one_block_resolves_to_the_last(write: Write) -> None:
    requests = open_workload(
        write(
            chat(520, 20, [0, 1]),
            chat(560, 20, [0, 2], at=1),
            chat(600, 20, [0, 3], at=2),
            chat(1300, 20, [0, 4, 5], at=3),
        )
    ).requests
    assert [shared(request, requests[-1]) for request in requests[:3]] == [540, 580, 620]


def test_a_prompt_continues_one_other_however_many_open_like_it(write: Write) -> None:
    one, two, three = open_workload(
        write(
            chat(650, 100, [0, 1]),
            chat(600, 100, [0, 2]),
            chat(900, 100, [0, 3]),
        )
    ).requests
    assert (shared(one, three), shared(two, three), shared(one, two)) == (512, 700, 512)


def test_prompts_of_different_length_that_meet_in_one_block_are_told_apart(write: Write) -> None:
    one, one_on, two, two_on = open_workload(
        write(
            chat(600, 9, [0, 1]),
            chat(1200, 9, [0, 5, 6]),
            chat(650, 9, [0, 2]),
            chat(1100, 9, [0, 5, 7]),
        )
    ).requests
    assert shared(one, one_on) == 609
    assert (shared(two, two_on), shared(one, two)) == (512, 512)


def test_a_common_block_behind_different_ones_is_no_continuation(write: Write) -> None:
    one, two = open_workload(
        write(chat(1100, 9, [5, 1, 2]), chat(1700, 9, [6, 1, 3, 4], at=9))
    ).requests
    assert shared(one, two) == 0
    assert one.session != two.session


def test_a_prompt_without_a_whole_block_is_continued_by_nothing(write: Write) -> None:
    one, two = open_workload(write(chat(100, 50, [0]), chat(300, 50, [1]))).requests
    assert shared(one, two) == 0


def test_an_output_longer_than_the_prompt_that_continues_it_keeps_its_own_rest(
    write: Write,
) -> None:
    one, two, three = open_workload(
        write(
            chat(512, 900, [0]),
            chat(700, 10, [0, 1], at=1),
            chat(1500, 10, [0, 2, 3], at=2),
        )
    ).requests
    assert (shared(one, two), shared(one, three), shared(two, three)) == (700, 700, 710)


def test_strangers_with_a_common_system_prompt_are_different_sessions(write: Write) -> None:
    workload = open_workload(
        write(
            chat(1100, 9, [0, 1, 2], at=0),
            chat(600, 9, [0, 5], at=1000),
            chat(900, 9, [0, 6], at=2000),
            chat(1700, 9, [0, 1, 7, 8], at=63_000),
        )
    )
    assert [request.session for request in workload.requests] == [0, 1, 2, 0]
    assert [request.think_s for request in workload.requests] == [0, 0, 0, 63]
    assert [request.arrival_s for request in workload.requests] == [0, 1, 2, 63]
    assert workload.has_absolute_time


def test_arrivals_count_from_the_first_request(write: Write) -> None:
    workload = open_workload(write(chat(9, 1, [0], at=5000), chat(9, 1, [1], at=5500)))
    assert [request.arrival_s for request in workload.requests] == [0, 0.5]


def test_sessions_of_a_coding_agent_trace_share_nothing(write: Write) -> None:
    workload = open_workload(
        write(
            session(call(0, 200, 30, [1, 3])),
            session(call(0, 200, 30, [1, 3])),
        )
    )
    one, two = workload.requests
    assert not set(one.token_ids().tolist()) & set(two.token_ids().tolist())
    assert one.session != two.session
    assert not workload.has_absolute_time
    assert_consistent(workload)


def test_runs_are_the_same_content_however_they_are_cut(write: Write) -> None:
    one, two, three = open_workload(
        write(
            session(
                call(0, 320, 0, [1, 5]),
                call(1, 320, 0, [1, 2], [3, 3]),
                call(2, 330, 0, [1, 2], [9, 3]),
            )
        )
    ).requests
    assert one.content == two.content
    assert (shared(one, two), shared(one, three)) == (320, 128)


def test_an_agents_output_and_unnamed_tail_return_in_its_next_prompt(write: Write) -> None:
    one, two, three = open_workload(
        write(
            session(
                call(0, 200, 30, [1, 2], [3, 1]),
                call(5, 300, 40, [1, 4]),
                call(9, 700, 40, [1, 3], [50, 7]),
            )
        )
    ).requests
    assert shared(one, two) == 230
    assert shared(two, three) == 192


def test_a_prompt_of_whole_blocks_only_has_no_tail_of_its_own(write: Write) -> None:
    workload = open_workload(
        write(
            session(
                call(0, 192, 10, [1, 3]),
                call(1, 200, 10, [20, 3]),
                call(2, 300, 10, [20, 4]),
                call(3, 320, 10, [1, 5]),
            )
        )
    )
    assert_consistent(workload)
    whole, tailed, tailed_on, whole_on = workload.requests
    assert (shared(whole, whole_on), shared(tailed, tailed_on)) == (202, 210)


def test_sessions_that_repeat_another_are_left_out(write: Write) -> None:
    workload = open_workload(
        write(
            session(call(0, 64, 1, [1, 1])),
            session(call(0, 64, 1, [1, 1]), dup_of="s"),
            session(call(0, 64, 1, [1, 1]), dup_of=None),
        )
    )
    assert len(workload.sessions) == 2


def test_a_subagents_requests_run_inside_the_session_in_order_of_time(write: Write) -> None:
    nested = {
        "t": 10,
        "type": "subagent",
        "requests": [
            call(0, 64, 1, [9, 1], api_time=2),
            call(30, 65, 1, [9, 1], think_time=4),
        ],
    }
    workload = open_workload(
        write(
            session(
                call(0, 66, 1, [1, 1], api_time=5),
                nested,
                call(20, 67, 1, [1, 1], api_time=1, think_time=15),
                call(90, 68, 1, [1, 1], think_time=2000),
                call(95, 69, 1, [1, 1], think_time=2000),
            )
        )
    )
    (requests,) = workload.sessions
    assert [r.prompt_tokens for r in requests] == [66, 64, 67, 65, 68, 69]
    assert [r.arrival_s for r in requests] == [0, 10, 20, 40, 90, 95]
    # after another agent's request: since the last end; after the agent's own: as recorded
    assert [r.think_s for r in requests] == [0, 5, 8, 19, 50, 300]


def test_a_limit_reads_that_many_requests_and_no_line_more(write: Write) -> None:
    path = write(*(chat(600, 1, [0, i], at=i) for i in range(1, 4)), "not json")
    assert open_workload(path, limit=3).totals.requests == 3
    two_calls = session(call(0, 64, 1, [1, 1]), call(1, 65, 1, [1, 1]))
    path = write(two_calls, two_calls, "not json", name="agents.jsonl")
    workload = open_workload(path, limit=3)
    assert [len(one) for one in workload.sessions] == [2, 1]


def test_gzip_and_plain_files_read_the_same_under_any_name(write: Write) -> None:
    lines = [chat(600, 9, [0, 1]), chat(1200, 9, [0, 2, 3], at=7)]
    packed = write(*lines, name="trace.jsonl.gz")
    renamed = packed.rename(packed.with_name("renamed.jsonl"))
    plain = open_workload(write(*lines))
    assert open_workload(renamed).requests == plain.requests
    assert plain.format == "mooncake"


GOOD = chat(600, 9, [0, 1], at=10)
GOOD_CALL = call(0, 64, 1, [1, 1])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", ":2: not JSON: it is cut off at column 1; repair or remove the line"),
        ("[1]", ":2: [1] instead of a JSON object; expected one object per line"),
        ("[", ':2: "[" instead of a JSON object; expected one object per line'),
        ("[" * 100_000, ":2: not usable JSON"),
        ({"timestamp": 10}, ":2: field 'input_length' is missing, found: timestamp"),
        ({**GOOD, "input_length": "6"}, ":2: 'input_length' is \"6\", expected an integer"),
        ({**GOOD, "input_length": True}, ":2: 'input_length' is true, expected an integer"),
        ({**GOOD, "input_length": 0}, ":2: 'input_length' is 0, expected at least 1"),
        ({**GOOD, "output_length": 10**15}, ":2: 'output_length' is 1000000000000000, expected at"),
        ({**GOOD, "output_length": -4}, ":2: 'output_length' is -4, expected at least 0"),
        ({**GOOD, "hash_ids": [0]}, ":2: 'hash_ids' has 1 ids, but an 'input_length' of 600"),
        ({**GOOD, "hash_ids": [0, -1]}, ":2: 'hash_ids' holds -1"),
        ({**GOOD, "hash_ids": [0, "x"]}, ":2: 'hash_ids' holds \"x\""),
        ({**GOOD, "hash_ids": 7}, ":2: 'hash_ids' is 7, expected a list"),
        ({**GOOD, "input_length": 650}, ":2: block 1 has 138 tokens here and 88 in an earlier"),
        ({**GOOD, "timestamp": float("nan")}, ":2: 'timestamp' is NaN, expected a finite"),
        ({**GOOD, "timestamp": None}, ":2: 'timestamp' is null, expected a number"),
        ({**GOOD, "timestamp": True}, ":2: 'timestamp' is true, expected a number"),
        ({**GOOD, "timestamp": -1}, ":2: 'timestamp' is -1, expected a finite"),
        ({**GOOD, "timestamp": 10**400}, ":2: 'timestamp' is 1000"),
        ({**GOOD, "timestamp": 3.5}, ":2: 'timestamp' goes back from 10 to 4"),
    ],
)
def test_a_damaged_line_is_named_with_its_number_and_fault(
    write: Write, line: object, expected: str
) -> None:
    path = write(GOOD, line)
    with pytest.raises(TraceError) as caught:
        open_workload(path)
    assert str(caught.value).startswith(f"{path}{expected}")
    assert "; " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 700


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (session(5), ":2: request 1 is 5, expected an object"),  # type: ignore[arg-type]
        (session(GOOD_CALL, {**GOOD_CALL, "in": 0}), ":2: request 2: 'in' is 0"),
        (session({**GOOD_CALL, "out": -1}), ":2: request 1: 'out' is -1"),
        (session({**GOOD_CALL, "runs": [[1, 2]]}), ":2: request 1: 'runs' holds 2 blocks"),
        (session({**GOOD_CALL, "runs": [[1, 0]]}), ":2: request 1: 'runs' holds [1, 0]"),
        (session({**GOOD_CALL, "runs": [[-1, 1]]}), ":2: request 1: 'runs' holds [-1, 1]"),
        (session({**GOOD_CALL, "runs": [1, 1]}), ":2: request 1: 'runs' holds 1"),
        (session({**GOOD_CALL, "think_time": -1}), ":2: request 1: 'think_time' is -1"),
        (session({"t": 0}), ":2: request 1: field 'in' is missing"),
        (session({**GOOD_CALL, "t": 5}, GOOD_CALL), ":2: request 2: 't' goes back from 5 to 0"),
        (session({"t": 0, "requests": 3}), ":2: request 1: 'requests' is 3, expected a list"),
        (session({"t": 0, "requests": [{"t": 0}]}), ":2: request 1, request 1: field 'in'"),
        (session(block_size=0), ":2: 'block_size' is 0"),
        (session({**GOOD_CALL, "runs": [[2**30, 1]]}), ": 68719476"),
    ],
)
def test_a_damaged_session_is_named_with_its_request(
    write: Write, line: object, expected: str
) -> None:
    path = write(session(GOOD_CALL), line)
    with pytest.raises(TraceError) as caught:
        open_workload(path)
    assert str(caught.value).startswith(f"{path}{expected}")
    assert "; " in str(caught.value)


def test_a_truncated_archive_is_named_with_the_last_whole_line(tmp_path: Path) -> None:
    data = gzip.compress("".join(json.dumps(GOOD) + "\n" for _ in range(5000)).encode())
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(TraceError, match=r"cut\.jsonl\.gz:\d+: the gzip stream ends after \d+ wh"):
        open_workload(path)


def test_a_damaged_archive_is_an_error_of_its_line(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(json.dumps(GOOD).encode() * 50))
    data[12:20] = b"\xff" * 8
    path = tmp_path / "bad.jsonl.gz"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=r"bad\.jsonl\.gz:1: the gzip stream is damaged"):
        open_workload(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", ": 0 requests in 0 lines; the file is empty"),
        (b"\n  \n", ": 0 requests in 2 lines; the file is empty"),
        (b"\x7fELF\x02\x01\x00\x00", ":1: not UTF-8 text (NUL byte)"),
        (b"\xff\xfe\xfa", ":1: not UTF-8 text ("),
        (b"a,b\n1,2\n", ":1: a CSV of the columns a, b; expected TIMESTAMP, Context"),
        (b'{"prompt": 1, "id": 2}\n', ":1: unknown trace format, fields: id, prompt; expected"),
        (b"{}\n", ":1: unknown trace format, fields: none"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_its_own_format(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        open_workload(path)
    assert str(caught.value).startswith(f"{path}{expected}")


def test_a_path_that_is_no_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file; check the path"):
        open_workload(tmp_path / "absent.jsonl")
    with pytest.raises(TraceError, match="is a directory; name a trace file"):
        open_workload(tmp_path)


def test_a_trace_of_repeats_only_or_a_limit_of_nothing_is_refused(write: Write) -> None:
    path = write(session(GOOD_CALL, dup_of="x"))
    with pytest.raises(TraceError, match="0 requests left after leaving out sessions"):
        open_workload(path)
    with pytest.raises(TraceError, match="limit 0 leaves no request"):
        open_workload(path, limit=0)


def test_a_prompt_of_118_000_tokens_is_written_out_in_well_under_a_millisecond(
    write: Write,
) -> None:
    (request,) = open_workload(
        write(session(call(0, 118_000, 0, [1, 900], [1000, 900], [2000, 43])))
    ).requests
    fastest = min(_seconds(request.token_ids) for _ in range(20))
    assert fastest < 1e-3


def test_billions_of_tokens_take_megabytes(write: Write) -> None:
    n_requests = 10_000
    turns = [call(i, 128_000 + 640 * i, 90, [1, 2000 + 10 * i]) for i in range(n_requests // 20)]
    path = write(*(session(*turns) for _ in range(20)))
    tracemalloc.start()
    workload = open_workload(path)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert workload.totals.input_tokens > 10**9
    assert held < n_requests * 1000


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


@pytest.mark.parametrize("kind", get_args(SyntheticKind))
def test_a_synthetic_workload_is_decided_by_its_seed(kind: SyntheticKind) -> None:
    workload = synthetic_workload(kind, requests=300, seed=4)
    assert workload == synthetic_workload(kind, requests=300, seed=4)
    assert workload.requests != synthetic_workload(kind, requests=300, seed=5).requests
    assert workload.requests[:100] == synthetic_workload(kind, requests=100, seed=4).requests
    assert workload.totals.requests == 300
    assert_consistent(workload)


@pytest.mark.parametrize("kind", get_args(SyntheticKind))
def test_synthetic_sessions_interleave_and_leave_time_for_each_turn(kind: SyntheticKind) -> None:
    workload = synthetic_workload(kind, requests=400, seed=1)
    arrivals = [request.arrival_s for request in workload.requests]
    assert arrivals == sorted(arrivals)
    switches = sum(one.session != two.session for one, two in pairwise(workload.requests))
    assert switches > 200
    for one in workload.sessions:
        for earlier, later in pairwise(one):
            assert later.arrival_s - earlier.arrival_s >= later.think_s


@pytest.mark.parametrize("kind", ["chat", "rag"])
def test_a_synthetic_turn_repeats_everything_said_before(kind: SyntheticKind) -> None:
    workload = synthetic_workload(kind, requests=300, seed=2)
    turns = [pair for one in workload.sessions for pair in pairwise(one)]
    assert len(turns) > 50
    for earlier, later in turns:
        assert shared(earlier, later) == earlier.prompt_tokens + earlier.output_tokens
        assert later.prompt_tokens > earlier.prompt_tokens + earlier.output_tokens


def test_agents_fork_from_a_shared_prefix_and_the_parent_goes_on() -> None:
    workload = synthetic_workload("agents", requests=600, seed=3)
    n_forks = 0
    for one in workload.sessions:
        tokens = [request.token_ids() for request in one]
        for position, mine in enumerate(tokens):
            followed_by = {
                int(later[len(mine)])
                for later in tokens[position + 1 :]
                if len(later) > len(mine) and later[len(mine) - 1] == mine[-1]
            }
            n_forks += len(followed_by) > 1
    assert n_forks > 5


def test_synthetic_sessions_share_a_few_preambles_or_documents() -> None:
    for kind, sharing in (("agents", 3), ("chat", 4)):
        workload = synthetic_workload(kind, requests=400, seed=6)  # type: ignore[arg-type]
        assert len({one[0].content[0].first for one in workload.sessions}) <= sharing
    workload = synthetic_workload("rag", requests=1000, seed=6)
    tokens = [int(one[0].token_ids()[300]) for one in workload.sessions]
    counts = sorted((tokens.count(token) for token in set(tokens)), reverse=True)
    assert counts[0] > 5 * counts[len(counts) // 2]


def test_an_impossible_synthetic_workload_is_refused() -> None:
    with pytest.raises(TraceError, match="synthetic 'search': unknown kind; use agents, chat"):
        synthetic_workload("search", requests=3, seed=1)  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="0 requests; ask for at least 1"):
        synthetic_workload("chat", requests=0, seed=1)
