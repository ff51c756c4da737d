"""`kvgraft replay` over traces and synthetic workloads."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, get_type_hints

import pytest

from kvgraft_replay.report import ReplayResult
from tests.cli.refusals import Refusal, refused
from tests.commands import KVGRAFT, run, run_forked

from .traces import agentic_lines, mooncake_lines, write_trace

Replay = Callable[..., dict[str, Any]]

TRACES = {"mooncake": mooncake_lines, "agentic": agentic_lines}
MOONCAKE_HITS = 512 + 2 * ((1124 + 20) // 16 * 16 + (1636 + 20) // 16 * 16)
"""The system prompt once, then both conversations' earlier turns, outputs included."""
AGENTIC_HITS = 2 * sum((64 * (call + 4) + 10 + 30) // 16 * 16 for call in range(3))
"""Each call's predecessor, output included."""
SMALL = ("--device-tokens", "100000", "--page-size", "16")
LLAMA = "full:n_layers=80,n_kv_heads=8,head_dim=128"
"""Keys and values of a model of 70 billion parameters: 328 kB a token."""
HIDDEN = "hisparse:n_layers=80,n_kv_heads=8,head_dim=128,max_running=4500"
"""Hot rows stand behind a private pool: 1.3 GB a request."""


def replay(*arguments: object) -> CompletedProcess[str]:
    return run_forked(KVGRAFT, "replay", *(str(each) for each in arguments))


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
    assert (
        result["hit_tokens"]["device"]
        == {"mooncake": MOONCAKE_HITS, "agentic": AGENTIC_HITS}[format]
    )
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
        source["device"] + source["host"] + source["computed"] + source["unserved"]
        for source in result["sources"]
    )
    assert result["settings"]["concurrency"] == (f"users:{loop[1]}" if loop else "open")
    assert result["out_of_memory"] == result["payload_mismatches"] == 0


def test_the_result_has_the_fields_its_schema_names(replayed: Replay) -> None:
    result = replayed("--synthetic", "chat", "--requests", 10)
    assert result.keys() == get_type_hints(ReplayResult).keys()
    assert {"device", "host", "storage"} == result["hit_tokens"].keys()
    assert result["storage"] is None
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


def test_policies_are_replayed_one_after_another_and_shown_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    workload = ("--synthetic", "chat", "--requests", 60, "--component", "full", "--verify", "off")
    arguments = (*workload, "--device-tokens", "20k", "--policy", "lru,density")
    done = replay(*arguments, "--json", path)
    assert (done.returncode, done.stderr) == (0, "")
    results = json.loads(path.read_text())
    assert [each["settings"]["eviction_policy"] for each in results] == ["lru", "density"]
    (rates,) = (line for line in done.stdout.splitlines() if line.startswith("token hit rate  "))
    assert rates.split()[3::2] == [f"{100 * each['token_hit_rate']:.1f}" for each in results]


def test_pools_without_payload_decide_as_those_with_it(replayed: Replay) -> None:
    results = [
        replayed(
            *("--synthetic", "agents", "--requests", 40, "--verify", verify, "--component", "full"),
            *("--component", "swa:window=1024", "--component", "mamba:states=24"),
            *("--device-tokens", 100_000, "--host-tokens", 300_000),
        )
        for verify in ("full", "off")
    ]
    for result in results:
        assert result["load_backs"]["completed"] > 0
        for each in ("cpu_us_per_request", "wall_s", "payloads_verified"):
            del result[each]
        del result["settings"]["payload"], result["settings"]["verify"]
    assert results[0] == results[1]


def test_a_small_device_pool_evicts_and_a_host_tier_hits(replayed: Replay) -> None:
    arguments = ("--synthetic", "chat", "--requests", 60, "--device-tokens", 40_000)
    alone = replayed(*arguments)
    both = replayed(*arguments, "--host-tokens", 400_000, "--load-policy", "always")
    assert sum(alone["evictions"]["full"]["device"].values()) > 0
    assert both["hit_tokens"]["host"] > 0
    assert both["load_backs"]["completed"] > 0
    assert both["token_hit_rate"] >= alone["token_hit_rate"]


def test_one_budget_finds_the_shares_of_pools_that_begin_wrong(replayed: Replay) -> None:
    """Pages for 150,000 tokens and 16 states, which are the bottleneck."""
    arguments = (
        *("--synthetic", "chat", "--requests", 300, "--page-size", 16),
        *("--component", "full:n_layers=2,n_kv_heads=2,head_dim=16", "--device-tokens", 150_000),
        *("--component", "mamba:states=16,n_layers=2,n_heads=4,head_dim=32,state_dim=64"),
    )
    fixed = replayed(*arguments, "--verify", "off")
    shared = replayed(*arguments, "--device-memory", "40MB", "--verify", "off")
    assert fixed["settings"]["slots"]["mamba"]["device"] == 16
    assert shared["settings"]["slots"]["mamba"]["device"] > 40
    assert shared["settings"]["slots"]["full"]["device"] < 150_000 // 16
    assert shared["token_hit_rate"] > fixed["token_hit_rate"]
    assert shared["settings"]["device_memory"] == 40_000_000
    assert shared["ledger_violations"] == 0


def test_cuts_of_a_prefill_may_be_kept_apart(replayed: Replay) -> None:
    """A prompt is cut at its last page where that is farther than this from where it began."""
    workload = ("--synthetic", "chat", "--requests", 20, "--component", "full")
    arguments = (*workload, "--component", "mamba", "--verify", "off")
    near, far = (replayed(*arguments, "--cut-tokens", each) for each in (0, "1M"))
    assert (near["settings"]["cut_tokens"], far["settings"]["cut_tokens"]) == (0, 1_000_000)
    assert near["resume_points"]["made"]["repeat"] > far["resume_points"]["made"]["repeat"]


def test_a_limit_replays_the_first_requests_only(replayed: Replay, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", mooncake_lines())
    assert replayed(path, *SMALL, "--limit", 4)["requests"] == 4


def test_a_report_is_one_page_that_loads_nothing(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = replay("--synthetic", "chat", "--requests", 10, "--html", page)
    assert done.returncode == 0
    text = page.read_text(encoding="utf-8")
    assert text.lower().startswith("<!doctype html>")
    assert 'src="http' not in text
    assert "payload mismatches" in done.stdout


DAMAGED: dict[str, tuple[str, str]] = {
    "cut line": ('{"timestamp": 0, "input_len', "not JSON"),
    "not an object": ("[1, 2]", "instead of a JSON object"),
    "field missing": ('{"timestamp": 9000, "hash_ids": [1], "output_length": 3}', "input_length"),
    "wrong type": (
        '{"timestamp": 9000, "input_length": "8", "output_length": 1, "hash_ids": [0]}',
        "'input_length' is \"8\", expected an integer",
    ),
    "too few blocks": (
        '{"timestamp": 9000, "input_length": 5000, "output_length": 1, "hash_ids": [0]}',
        "takes 10 blocks of 512 tokens",
    ),
}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Refusal]]:
    directory = tmp_path_factory.mktemp("damaged")
    paths = {}
    for case, (line, _) in DAMAGED.items():
        paths[case] = write_trace(directory / f"{case}.jsonl", mooncake_lines()[:2])
        paths[case].write_text(paths[case].read_text() + line + "\n")
    refusals = refused({case: ["replay", str(path)] for case, path in paths.items()})
    return {case: (paths[case], refusals[case]) for case in DAMAGED}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_line_is_one_line_with_file_and_number(
    damaged: dict[str, tuple[Path, Refusal]], damage: str
) -> None:
    path, refusal = damaged[damage]
    assert refusal.status == 2
    assert refusal.errors.startswith(f"kvgraft: {path}:3: ")
    assert DAMAGED[damage][1] in refusal.errors
    assert refusal.errors.count("\n") == 1
    assert refusal.output == ""


def test_a_refusal_is_the_same_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", mooncake_lines()[:1])
    path.write_text(path.read_text() + "{")
    done = run(KVGRAFT, "replay", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kvgraft: {path}:2: not JSON")
    assert done.stderr.count("\n") == 1


def test_a_truncated_archive_is_one_line(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl.gz", mooncake_lines())
    path.write_bytes(path.read_bytes()[:-20])
    done = replay(path)
    assert done.returncode == 2
    assert f"{path}:" in done.stderr
    assert "fetch" in done.stderr
    assert done.stderr.count("\n") == 1


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "no such file": (("TRACE.none",), "no such file"),
    "nothing to replay": ((), "give a trace's PATH or --synthetic agents|chat|rag"),
    "two workloads": (("TRACE", "--synthetic", "chat"), "one of the two"),
    "unknown component": (
        ("TRACE", "--component", "sinks"),
        "component 'sinks' is not installed; installed: full, hisparse, mamba, swa; "
        "in a clone of kvgraft, pip install ./plugins/NAME brings its own",
    ),
    "components in one": (
        ("TRACE", "--component", "full,swa"),
        "component 'full,swa': one --component names one; repeat it, as in --component full --c",
    ),
    "an option without its name": (
        ("TRACE", "--component", "swa=1024"),
        "component 'swa=1024': a name and its options have ':' between them; write swa:window=1024",
    ),
    "a component's option twice": (
        ("TRACE", "--component", "swa:window=64,window=128"),
        "component 'swa:window=64,window=128': option 'window' is given twice; keep one\n",
    ),
    "an option of no component": (
        ("TRACE", "--component", "=128"),
        "component '=128': a name and its options have ':' between them; write NAME:OPTION=128\n",
    ),
    "an option twice": (
        ("TRACE", "--component", "full", "--host-tokens", "4k", "--host-tokens", "8k"),
        "--host-tokens is given 2 times; give it once\n",
    ),
    "component twice": (
        ("TRACE", "--component", "swa:window=64", "--component", "swa:window=128"),
        "component 'swa' is given 2 times; give it once",
    ),
    "unknown option": (
        ("TRACE", "--component", "swa:windw=64"),
        "component 'swa': no option 'windw'; did you mean 'window'? options: ",
    ),
    "impossible option": (
        ("TRACE", "--component", "swa:window=-1"),
        "component 'swa': option window='-1': give more than 0",
    ),
    "not an option": (
        ("TRACE", "--component", "swa:window"),
        "component 'swa:window': 'window' is not OPTION=VALUE",
    ),
    "no component named": (
        ("TRACE", "--component", ":window=1"),
        "component ':window=1' has no name",
    ),
    "no device memory": (
        ("TRACE", "--component", "full", "--device-tokens", "0"),
        "invalid value for '--device-tokens': 0 is not in the range x>=1",
    ),
    "less than a page": (
        ("TRACE", "--component", "full", "--device-tokens", "10"),
        "component 'full': --device-tokens: 10 tokens make no page of 64; give 64 or more",
    ),
    "page of nothing": (
        ("TRACE", "--component", "full", "--page-size", "0"),
        "invalid value for '--page-size': 0 is not in the range x>=1",
    ),
    "negative host": (
        ("TRACE", "--component", "full", "--host-tokens", "-5"),
        "invalid value for '--host-tokens': -5 is not in the range x>=0",
    ),
    "home without host": (
        ("TRACE", "--component", "hisparse"),
        "component 'hisparse': host_tokens is 0, but keys and values live on HOST",
    ),
    "policy of nobody": (
        ("TRACE", "--component", "full", "--policy", "mru"),
        "eviction policy 'mru' is not installed; did you mean 'lru'? use one of density, lru",
    ),
    "home without host, in bytes": (
        ("TRACE", "--component", "hisparse", "--device-tokens", "3MB"),
        "component 'hisparse': host_tokens is 0, but keys and values live on HOST",
    ),
    "the size of a trace": (
        ("TRACE", "--component", "full", "--requests", "5"),
        "--requests is of --synthetic, and PATH is a trace; give --limit instead",
    ),
    "no number": (
        ("--synthetic", "chat", "--requests", "ten"),
        "invalid value for '--requests': 'ten' is no whole number",
    ),
    "a negative seed": (
        ("--synthetic", "chat", "--seed", "-3"),
        "invalid value for '--seed': -3 is not in the range x>=0",
    ),
    "digits of no thousands": (
        ("--synthetic", "chat", "--requests", "5_0"),
        "invalid value for '--requests': '5_0' is no whole number",
    ),
    "a rate of no thousands": (
        ("--synthetic", "chat", "--decode-rate", "5_0"),
        "invalid value for '--decode-rate': '5_0' is no number",
    ),
    "a rate that is none": (
        ("--synthetic", "chat", "--prefill-rate", "nan"),
        "invalid value for '--prefill-rate': 'nan' is no number",
    ),
    "bytes without their unit": (
        ("TRACE", "--component", "full", "--device-tokens", "40G"),
        "'40G' is no number of tokens; give tokens, such as 4M, or bytes of all pools, such as ",
    ),
    "more memory than there is": (
        ("TRACE", "--component", "full:n_layers=2000,head_dim=4096", "--device-tokens", "1000M"),
        " available; lower --device-tokens",
    ),
    "layers by their count": (
        ("TRACE", "--component", "full:layers=3"),
        "component 'full': option layers='3': give the layers' numbers, such as [0, 2]; n_layers ",
    ),
    "memory out of the host's reach": (
        ("TRACE", "--component", "full", "--device-tokens", "6400", "--device", "simulated"),
        "device 'simulated': a replay writes and reads pools from the host, which does not reach ",
    ),
    "policies in one store": (
        ("TRACE", "--host-tokens", "10000", "--storage", "file:DIR", "--policy", "lru,density"),
        "--policy lru,density and --storage: a replay would find what the one before stored",
    ),
    "policies on one page": (
        ("TRACE", "--component", "full", "--policy", "lru,density", "--html", "DIR/r.html"),
        "--policy lru,density and --html: the report is of one replay",
    ),
    "storage without host": (
        ("TRACE", "--component", "full", "--storage", "file:DIR"),
        "component 'full' has no HOST mirror to store from; set host_tokens (--host-tokens), ",
    ),
    "storage of no kind": (
        ("TRACE", "--component", "full", "--host-tokens", "10000", "--storage", "tape:DIR"),
        "storage 'tape' is not installed; installed: ",
    ),
    "storage nowhere": (
        ("TRACE", "--component", "full", "--host-tokens", "10000", "--storage", "file:DIR/none"),
        "DIR/none",
    ),
    "storage option": (
        ("TRACE", "--component", "full", "--host-tokens", "10000", "--storage", "file:DIR?size=1"),
        "storage 'file': no option 'size'; options: capacity, segment, refresh_s",
    ),
    "prefetch without storage": (
        ("TRACE", "--component", "full", "--prefetch-threshold", "256"),
        "--prefetch-threshold needs a store; give --storage URL as well",
    ),
    "memory that is no size": (
        ("TRACE", "--storage", "file:DIR", "--prefetch-memory", "many"),
        "invalid value for '--prefetch-memory': 'many' is no size; write for example 256MiB",
    ),
    "memory without its unit": (
        ("TRACE", "--device-memory", "4M"),
        "invalid value for '--device-memory': '4M' has no unit of bytes; write 4MB",
    ),
    "memory of nothing": (
        ("TRACE", "--storage", "file:DIR", "--store-memory", "0"),
        "invalid value for '--store-memory': 0 is not in the range x>=1",
    ),
    "size of nothing": (
        ("TRACE", "--component", "full", "--device-tokens", "4 apples"),
        "invalid value for '--device-tokens': '4 apples' is no size; give tokens, such as 4M, or "
        "bytes of all pools, such as 40GB",
    ),
    "half a token": (
        ("TRACE", "--component", "full", "--chunk-tokens", "1.5"),
        "invalid value for '--chunk-tokens': '1.5' is no number of tokens; write for example 4M",
    ),
    "bytes below a page": (
        ("TRACE", "--component", "full", "--device-tokens", "1kB"),
        "kvgraft: --device-tokens: 1.0 kB are less than the smallest pools take, 2.0 kB; give more",
    ),
    "a budget below a page": (
        ("TRACE", "--device-memory=1B"),
        "kvgraft: --device-memory: 1 B are less than the smallest pools take",
    ),
    "bytes of a component": (
        ("TRACE", "--component", "full:device_tokens=4GB"),
        "option device_tokens='4GB' is a size in bytes; give the tokens of this component, such "
        "as '4M'; bytes are those of all components together: setting device_tokens of the cache",
    ),
    "more than the machine": (
        ("TRACE", "--component", LLAMA, "--device-tokens", "10M", "--host-tokens", "40M"),
        "pools need 16.4 TB (full: device 3.3 TB, host 13.1 TB), the machine has ",
    ),
    "more than the machine, hidden": (
        ("TRACE", "--component", HIDDEN, "--host-tokens", "640"),
        "pools need 6.1 TB (hisparse: device 6.1 TB, host ",
    ),
    "one file twice": (
        ("TRACE", "--json", "DIR/one", "--html", "DIR/./one"),
        "are the same file; give each a path of its own",
    ),
    "one file twice, by a link": (
        ("TRACE", "--json", "DIR/link", "--html", "DIR/linked"),
        "are the same file; give each a path of its own",
    ),
    "standard output twice": (("TRACE", "--json", "-", "--html", "-"), "are the same file"),
    "the trace itself": (
        ("TRACE", "--json", "TRACE"),
        "trace.jsonl is the trace that is replayed; choose another path",
    ),
    "json nowhere": (("TRACE", "--json", "DIR/none/r.json"), "No such file or directory"),
    "html is a directory": (("TRACE", "--html", "DIR"), "Is a directory"),
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Refusal]:
    directory = tmp_path_factory.mktemp("refused")
    (directory / "link").symlink_to("linked")
    trace = write_trace(directory / "trace.jsonl", mooncake_lines())
    return refused(
        {
            case: [
                "replay",
                *(
                    part.replace("TRACE", str(trace)).replace("DIR", str(directory))
                    for part in given
                ),
            ]
            for case, (given, _) in REFUSED.items()
        }
    )


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_naming_the_subject_and_exit_status_2(
    refusals: dict[str, Refusal], case: str
) -> None:
    refusal = refusals[case]
    assert refusal.status == 2
    assert REFUSED[case][1].removeprefix("DIR") in refusal.errors
    assert refusal.errors.startswith("kvgraft: ")
    assert refusal.errors.count("\n") == 1
    assert refusal.output == "", "it was refused after the work was done"


def test_a_trace_without_absolute_times_asks_for_users(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", agentic_lines())
    done = replay(path)
    assert done.returncode == 2
    assert "replay it closed loop, for example --users 8" in done.stderr


def test_a_choice_that_does_not_exist_is_refused_with_the_choices() -> None:
    done = replay("--synthetic", "poems")
    assert done.returncode == 2
    assert "'agents', 'chat', 'rag'" in done.stderr


def test_a_replay_that_serves_no_request_exits_with_1(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", mooncake_lines())
    done = replay(path, "--device-tokens", "64")
    assert done.returncode == 1
    assert "0 served" in done.stdout
    assert "note: 6 of 6 requests were rejected" in done.stdout
    assert "Evictions" not in done.stdout
    assert (
        done.stderr == "kvgraft: no request was served; see the note above and give more memory\n"
    )


def test_requests_that_fit_no_pool_are_rejected_and_the_rest_is_served(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", mooncake_lines())
    result = tmp_path / "result.json"
    done = replay(path, "--device-tokens", "1280", "--json", result)
    counts = json.loads(result.read_text())
    assert done.returncode == 0
    assert counts["rejections"] > 0
    assert counts["served"] + counts["rejections"] == counts["requests"] == 6
    assert counts["out_of_memory"] == 0
    assert f"6 of 6 requests, {counts['served']} served" in done.stdout
    assert counts["notices"][0] in done.stdout


def test_ctrl_c_stops_with_130_and_without_a_traceback(tmp_path: Path) -> None:
    # A process started in the background ignores SIGINT, and so would its children.
    heed = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    result = tmp_path / "result.json"
    replay = [KVGRAFT, "replay", "--synthetic", "agents", "--requests", "20000"]
    process = subprocess.Popen(
        [sys.executable, "-c", heed, *replay, "--json", str(result)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline, untouched = time.monotonic() + 60, tmp_path.stat().st_mtime_ns
    # a file is made and removed beside the result's just before the replay begins
    while tmp_path.stat().st_mtime_ns == untouched and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1)
    assert process.poll() is None, "the replay ended before it could be stopped"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.strip() == "kvgraft: stopped"
    assert output == ""
    assert list(tmp_path.iterdir()) == []
