"""`kvgraft replay` over traces and synthetic workloads."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, get_type_hints

import pytest

from kvgraft.report import ReplayResult

from ..commands import KVGRAFT, run
from .traces import agentic_lines, mooncake_lines, write_trace

Replay = Callable[..., dict[str, Any]]

TRACES = {"mooncake": mooncake_lines, "agentic": agentic_lines}
SMALL = ("--device-tokens", "100000", "--page-size", "16")


def replay(*arguments: object) -> CompletedProcess[str]:
    return run(KVGRAFT, "replay", *(str(each) for each in arguments))


@pytest.fixture
def replayed(tmp_path: Path) -> Replay:
    """Replay, expect success and return the JSON result."""

    def _replayed(*arguments: object) -> dict[str, Any]:
        path = tmp_path / "result.json"
        done = replay(*arguments, "--json", path)
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(path.read_text())  # type: ignore[no-any-return]

    return _replayed


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize("format", TRACES)
def test_a_trace_of_either_format_is_replayed_plain_or_zipped(
    replayed: Replay, tmp_path: Path, format: str, suffix: str
) -> None:
    path = write_trace(tmp_path / f"trace{suffix}", TRACES[format]())
    loop = ("--users", 2) if format == "agentic" else ()
    result = replayed(path, *SMALL, *loop)
    assert result["workload"]["format"] == format
    assert result["requests"] == {"mooncake": 6, "agentic": 8}[format]
    # What the trace shares, page by page: the first request of each kind of prefix misses.
    expected = {"mooncake": 4 * 512 + 2 * 512 + 512, "agentic": None}[format]
    if expected is not None:
        assert result["hit_tokens"]["device"] == expected
    assert 0 < result["token_hit_rate"] < 1
    assert result["hit_tokens"]["host"] == 0
    assert result["out_of_memory"] == result["payload_mismatches"] == 0
    assert result["ledger_violations"] == result["rejections"] == 0
    assert result["payloads_verified"] > 0


@pytest.mark.parametrize("kind", ["agents", "chat", "rag"])
@pytest.mark.parametrize("loop", [(), ("--users", "3")], ids=["open loop", "closed loop"])
def test_every_synthetic_workload_is_replayed_in_both_loops(
    replayed: Replay, kind: str, loop: tuple[str, ...]
) -> None:
    result = replayed("--synthetic", kind, "--requests", 30, *loop)
    assert result["requests"] == result["admissions"] == 30
    assert result["input_tokens"] == sum(
        source["device"] + source["host"] + source["computed"] for source in result["sources"]
    )
    assert result["settings"]["concurrency"] == (f"users:{loop[1]}" if loop else "open")
    assert result["out_of_memory"] == result["payload_mismatches"] == 0


def test_the_result_has_the_fields_its_schema_names(replayed: Replay) -> None:
    result = replayed("--synthetic", "chat", "--requests", 10)
    assert result.keys() == get_type_hints(ReplayResult).keys()
    assert {"device", "host"} == result["hit_tokens"].keys()
    assert {"p50", "p99", "mean"} == result["cpu_us_per_request"]["total"].keys()
    assert result["cpu_us_per_request"].keys() >= {"total", "match", "admit", "allocate", "finish"}
    assert {"device", "host"} == result["evictions"]["full"].keys()
    assert {"started", "completed", "failed", "slots"} <= result["load_backs"].keys()


def test_equal_seeds_give_equal_results_but_for_the_timings(replayed: Replay) -> None:
    def once(seed: int) -> dict[str, Any]:
        result = replayed(
            *("--synthetic", "agents", "--requests", 40, "--seed", seed, "--component", "full"),
            *("--component", "swa:window=1024", "--component", "mamba:states=24"),
            *("--device-tokens", 150_000, "--host-tokens", 300_000),
        )
        for timing in ("cpu_us_per_request", "wall_s"):
            del result[timing]
        return result

    first = once(3)
    assert once(3) == first
    assert once(4) != first


def test_a_small_device_pool_evicts_and_a_host_tier_hits(replayed: Replay) -> None:
    arguments = ("--synthetic", "chat", "--requests", 60, "--device-tokens", 40_000)
    alone = replayed(*arguments)
    both = replayed(*arguments, "--host-tokens", 400_000, "--load-policy", "always")
    assert sum(alone["evictions"]["full"]["device"].values()) > 0
    assert both["hit_tokens"]["host"] > 0
    assert both["load_backs"]["completed"] > 0
    assert both["token_hit_rate"] >= alone["token_hit_rate"]


def test_a_limit_replays_the_first_requests_only(replayed: Replay, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", mooncake_lines())
    assert replayed(path, *SMALL, "--limit", 4)["requests"] == 4


def test_a_report_is_one_page_that_loads_nothing(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = replay("--synthetic", "chat", "--requests", 10, "--html", page)
    assert done.returncode == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") or text.startswith("<!DOCTYPE html>")
    assert 'src="http' not in text
    assert "payload mismatches" in done.stdout


DAMAGED: dict[str, tuple[str, str]] = {
    "cut line": ('{"timestamp": 0, "input_len', "not JSON"),
    "not an object": ("[1, 2]", "instead of a JSON object"),
    "field missing": ('{"timestamp": 0, "hash_ids": [1], "output_length": 3}', "input_length"),
    "wrong type": (
        '{"timestamp": 0, "input_length": "8", "output_length": 1, "hash_ids": [0]}',
        "'input_length' is \"8\", expected an integer",
    ),
    "too few blocks": (
        '{"timestamp": 9000, "input_length": 5000, "output_length": 1, "hash_ids": [0]}',
        "takes 10 blocks of 512 tokens",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_line_is_one_line_with_file_and_number(tmp_path: Path, damage: str) -> None:
    line, reason = DAMAGED[damage]
    path = write_trace(tmp_path / "trace.jsonl", mooncake_lines()[:2])
    path.write_text(path.read_text() + line + "\n")
    done = replay(path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"kvgraft: {path}:3: ")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_truncated_archive_is_one_line(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl.gz", mooncake_lines())
    path.write_bytes(path.read_bytes()[:-20])
    done = replay(path)
    assert done.returncode == 2
    assert f"{path}:" in done.stderr
    assert "fetch" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.jsonl", mooncake_lines())


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "no such file": (("TRACE.none",), "no such file"),
    "nothing to replay": ((), "give a trace's PATH or --synthetic agents|chat|rag"),
    "two workloads": (("TRACE", "--synthetic", "chat"), "one of the two"),
    "unknown component": (
        ("TRACE", "--component", "sinks"),
        "component 'sinks' is not installed; installed: full, hisparse, mamba, swa; "
        "try: pip install kvgraft-sinks",
    ),
    "component twice": (
        ("TRACE", "--component", "swa:window=64", "--component", "swa:window=128"),
        "component 'swa' is given 2 times; give it once",
    ),
    "unknown option": (
        ("TRACE", "--component", "swa:windw=64"),
        "component 'swa': option windw='64': Extra inputs are not permitted; options: ",
    ),
    "impossible option": (
        ("TRACE", "--component", "swa:window=-1"),
        "component 'swa': option window='-1': Input should be greater than 0",
    ),
    "not an option": (
        ("TRACE", "--component", "swa:window"),
        "--component 'swa:window': 'window' is not OPTION=VALUE",
    ),
    "no component named": (("TRACE", "--component", ":window=1"), "names no component"),
    "no device memory": (
        ("TRACE", "--component", "full", "--device-tokens", "0"),
        "setting device_tokens=0: Input should be greater than 0",
    ),
    "less than a page": (
        ("TRACE", "--component", "full", "--device-tokens", "10"),
        "component 'full': option device_tokens: 10 tokens make no page of 64; give 64 or more",
    ),
    "page of nothing": (
        ("TRACE", "--component", "full", "--page-size", "0"),
        "setting page_size=0: Input should be greater than 0",
    ),
    "negative host": (
        ("TRACE", "--component", "full", "--host-tokens", "-5"),
        "setting host_tokens=-5",
    ),
    "home without host": (
        ("TRACE", "--component", "hisparse"),
        "give the cache host_tokens",
    ),
    "json nowhere": (("TRACE", "--json", "DIR/none/r.json"), "No such file or directory"),
    "html is a directory": (("TRACE", "--html", "DIR"), "Is a directory"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_naming_the_subject_and_exit_status_2(trace: Path, case: str) -> None:
    arguments, reason = REFUSED[case]
    done = replay(
        *(part.replace("TRACE", str(trace)).replace("DIR", str(trace.parent)) for part in arguments)
    )
    assert done.returncode == 2
    assert reason in done.stderr
    assert done.stderr.startswith("kvgraft: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_a_path_that_cannot_be_written_is_refused_before_anything_is_replayed(
    trace: Path,
) -> None:
    done = replay(trace, "--json", trace.parent / "none" / "result.json")
    assert done.returncode == 2
    assert done.stdout == ""


def test_a_trace_without_absolute_times_asks_for_users(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", agentic_lines())
    done = replay(path)
    assert done.returncode == 2
    assert "replay it closed loop, for example --users 8" in done.stderr


def test_a_choice_that_does_not_exist_is_refused_with_the_choices() -> None:
    done = replay("--synthetic", "poems")
    assert done.returncode == 2
    assert "'agents', 'chat', 'rag'" in done.stderr


def test_requests_that_fit_no_pool_are_rejected_and_the_rest_is_served(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", mooncake_lines())
    result = tmp_path / "result.json"
    done = replay(path, "--device-tokens", "1280", "--json", result)
    counts = json.loads(result.read_text())
    assert done.returncode == 0
    assert counts["rejections"] > 0
    assert counts["requests"] + counts["rejections"] == 6
    assert counts["out_of_memory"] == 0


def test_ctrl_c_stops_with_130_and_without_a_traceback() -> None:
    process = subprocess.Popen(
        [KVGRAFT, "replay", "--synthetic", "agents", "--requests", "20000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(6)
    assert process.poll() is None, "the replay ended before it could be stopped"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.strip() == "kvgraft: stopped"
    assert output == ""
