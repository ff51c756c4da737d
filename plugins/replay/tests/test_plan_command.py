"""`kvgraft plan`: sizes from a model's configuration, replayed side by side."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from kvgraft.errors import ConfigError, KvgraftError
from kvgraft.optional import Published
from kvgraft_replay.detect import open_workload
from kvgraft_replay.payload import Verify
from kvgraft_replay.planning.models import components_of, quantized
from kvgraft_replay.planning.schema import PlanResult, SizeResult
from kvgraft_replay.planning.sizes import all_sizes
from kvgraft_replay.planning.sweep import Sweep
from kvgraft_replay.planning.workers import Replays
from kvgraft_replay.replay import ReplaySettings
from tests.cli.refusals import Refusal, refused
from tests.commands import KVGRAFT, run_forked

from .traces import agentic_lines, mooncake_lines, write_trace

Plan = Callable[..., dict[str, Any]]

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}
"""A model of 70 billion parameters: 80 layers, 8 heads of 128, keys and values of 2 bytes."""
LLAMA_TOKEN_NBYTES = 80 * 8 * 128 * 2 * 2


@pytest.fixture
def planned(tmp_path: Path) -> Plan:
    """Plan, expect success and return the JSON result."""

    def _planned(*arguments: object) -> dict[str, Any]:
        path = tmp_path / "plan.json"
        given = () if "--processes" in arguments else ("--processes", "1")
        command = ("plan", *given, *map(str, arguments), "--json", str(path))
        done = run_forked(KVGRAFT, *command)
        # a busy machine takes so long that the command shows its progress
        said = [line for line in done.stderr.splitlines() if " replays in " not in line]
        assert (done.returncode, said) == (0, [])
        return json.loads(path.read_text())  # type: ignore[no-any-return]

    return _planned


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Processes that the test starts, in order."""
    processes: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def _started(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        processes.append(start(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", _started)
    return processes


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.jsonl", mooncake_lines())


def test_every_device_size_is_replayed_with_every_host_size(planned: Plan, trace: Path) -> None:
    sizes = ("--device-tokens", "1280,64k", "--host-tokens", "0,64k")
    result = planned(trace, "--component", "full", *sizes, "--page-size", "16", "--no-growth")
    assert result.keys() == get_type_hints(PlanResult).keys()
    asked = [(size["device_tokens"], size["host_tokens"]) for size in result["sizes"]]
    assert asked == [(1280, 0), (1280, 64_000), (64_000, 0), (64_000, 64_000)]
    assert [size["device"] for size in result["sizes"]] == ["1.28k", "1.28k", "64k", "64k"]
    assert [size["host"] for size in result["sizes"]] == ["none", "64k", "none", "64k"]
    small, _, large, _ = result["sizes"]
    assert small.keys() == get_type_hints(SizeResult).keys()
    assert small["token_hit_rate"] < large["token_hit_rate"]
    assert large["saved_tokens"] == large["hit_tokens"]["device"]
    assert large["prefill_s_saved"] == large["saved_tokens"] / 100_000
    assert large["lru_hit_rate"] == large["token_hit_rate"], "nothing is evicted from either"
    rates = [point["token_hit_rate"] for point in result["curve"]["points"]]
    assert result["curve"]["highest_hit_rate"] == max(rates)
    assert rates == sorted(rates)
    assert rates[-1] == large["lru_hit_rate"]


@pytest.mark.skipif(find_spec("kvgraft_transformers") is None, reason="needs Python 3.11")
def test_bytes_become_tokens_of_the_model_with_keys_and_values_of_a_byte(
    planned: Plan, trace: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    arguments = (
        "--model",
        tmp_path,
        "--quantization",
        "fp8",
        "--device-tokens",
        "4GB",
        "--no-growth",
    )
    result = planned(trace, *arguments)
    (size,) = result["sizes"]
    assert result["model"] == f"{tmp_path.name} (llama)"
    (layers,) = result["reaches"]
    assert layers == {
        "component": "full",
        "n_layers": 80,
        "keeps": "every token",
        "per": "token",
        "nbytes": LLAMA_TOKEN_NBYTES // 2,
    }
    page_nbytes = 64 * LLAMA_TOKEN_NBYTES // 2
    assert size["device_tokens"] == 4 * 10**9 // page_nbytes * 64
    assert size["device_nbytes"] == 4 * 10**9 // page_nbytes * page_nbytes


def test_sizes_are_understood_without_the_word_tokens(planned: Plan, trace: Path) -> None:
    sizes = ("--device", "1280", "--host=64k")
    (size,) = planned(trace, "--component", "full", *sizes, "--no-growth")["sizes"]
    assert (size["device_tokens"], size["host_tokens"]) == (1280, 64_000)


def test_bytes_of_default_shapes_are_noted_with_the_bytes_of_a_token(
    planned: Plan, trace: Path
) -> None:
    bytes_of = (
        "--component",
        "mamba",
        "--component",
        "swa:window=64",
        "--no-growth",
        "--device-tokens",
    )
    shapes = "n_layers=4,n_kv_heads=2,head_dim=16"
    noted = planned(trace, "--component", f"full:{shapes}", *bytes_of, "20k,20MB")["notices"]
    mamba, swa = sorted(each for each in noted if "default shapes" in each)
    assert re.match(r"mamba has its default shapes, [\d.]+ k?B a state, so bytes are not", mamba)
    assert re.match(r"swa has its default shapes, \d+ B a token, so bytes are not those", swa)
    assert planned(trace, *bytes_of, "20k")["notices"] == []


def test_tenants_a_scanner_and_cuts_are_planned_as_they_are_replayed(planned: Plan) -> None:
    result = planned(
        *("--synthetic", "chat", "--requests", 10, "--component", "full", "--device-tokens", "20k"),
        *("--scanner", "2000", "--tenant", "trace:guarantee=0.5", "--cut-tokens", 128),
        *("--no-hints", "--no-growth"),
    )
    assert result["workload"]["name"].endswith("and a scanner")
    assert result["settings"]["cut_tokens"] == 128
    assert result["settings"]["tenants"]["trace"]["guarantee"] == 0.5


def test_each_pool_is_tried_a_tenth_larger_by_itself(planned: Plan) -> None:
    result = planned(
        *("--synthetic", "chat", "--requests", 30, "--component", "full"),
        *("--component", "swa:window=1024", "--device-tokens", "20k", "--host-tokens", "100k"),
    )
    (size,) = result["sizes"]
    pools = {(pool["component"], pool["tier"]): pool for pool in size["pools"]}
    assert len(pools) == 4
    assert [(each["component"], each["tier"]) for each in size["growth"]] == list(pools)
    for each in size["growth"]:
        tenth = pools[each["component"], each["tier"]]["nbytes"] / 10
        assert each["extra_nbytes"] == pytest.approx(tenth, rel=0.02)
        more = (each["token_hit_rate"] - size["token_hit_rate"]) * size["input_tokens"]
        assert each["gained_tokens"] == pytest.approx(more)
    assert result["curve"]["points"] == []
    assert result["curve"]["reason"].startswith("swa: not every page")


def test_the_smallest_sizes_that_reach_a_target_are_searched_between_those_given(
    planned: Plan, trace: Path
) -> None:
    sizes = ("--component", "full", "--device-tokens", "1280,64k", "--host-tokens", "0,64k")
    arguments = (*sizes, "--page-size", "16", "--no-growth", "--target")
    full = planned(trace, *arguments, 1)["sizes"][-1]["token_hit_rate"]
    result = planned(trace, *arguments, 100 * full)
    smallest = []
    for host in (0, 64_000):
        same = [size for size in result["sizes"] if size["host_tokens"] == host]
        missed = [size["device_tokens"] for size in same if size["token_hit_rate"] < full]
        reached = [size for size in same if size["token_hit_rate"] >= full]
        smallest.append(min(reached, key=lambda size: size["device_tokens"]))
        assert len(same) == 2 + 4, "the distance was halved four times"
        assert max(missed) < smallest[-1]["device_tokens"] < 64_000 / 8
    alone, with_host = smallest
    cheapest = [result["sizes"][place] for place in result["target"]["cheapest"]]
    assert with_host["device_tokens"] == alone["device_tokens"]
    assert cheapest == [alone], "the other is as large on DEVICE, and larger on HOST"
    exact = result["target"]["lru_device_tokens"]
    assert 0 < exact <= alone["device_tokens"], "a request that runs takes memory as well"
    assert planned(trace, *arguments, 99)["target"] == {
        "token_hit_rate": 0.99,
        "cheapest": [],
        "lru_device_tokens": None,
    }


def test_the_page_shows_the_tables_and_loads_nothing(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    sizes = (
        "--component",
        "full",
        "--device-tokens",
        "1280,64k",
        "--host-tokens",
        "0,64k",
        "--target",
        "60",
    )
    more = ("--page-size", "16", "--policy", "density,lru", "--processes", "1")
    done = run_forked(KVGRAFT, "plan", str(trace), *sizes, *more, "--html", str(page))
    assert (done.returncode, done.stderr) == (0, "")
    text = page.read_text(encoding="utf-8")
    assert text.lower().startswith("<!doctype html>")
    assert "http" not in re.sub(r'Content-Security-Policy" content="[^"]*"|http-equiv', "", text)
    titles = re.findall(r"^(\w[^(\n]*?)(?: \(.*\))?\n[^\n]+\n─", done.stdout, re.MULTILINE)
    assert {"Policies", "Hit rates", "Limiting pools", "Smallest sizes that reach 60 %"} <= set(
        titles
    )
    for title in titles:
        assert f"<caption>{title}" in text
    assert text.count('class="dots ') == 4, "one for each size of HOST with each policy"
    assert text.count('class="line l-computed"') == 1, "the exact curve"
    assert text.count('class="line l-overall"') == 1, "the target"
    assert "target, 60.0 %" in text
    hits = done.stdout.partition("Hit rates")[2].partition("Savings")[0].splitlines()
    assert hits[1].split()[-2:] == ["60", "%"]
    assert {line.split()[-1] for line in hits[3:] if line} == {"reached", "missed"}


HYBRID = (
    *("--synthetic", "chat", "--page-size", 16),
    *("--component", "full:n_layers=2,n_kv_heads=2,head_dim=16"),
    *("--component", "mamba:states=16,n_layers=2,n_heads=4,head_dim=32,state_dim=64"),
)
"""16 states are the bottleneck."""


def test_pools_of_one_budget_end_with_other_shares_than_fixed_ones(planned: Plan) -> None:
    arguments = (*HYBRID, "--requests", 100, "--device-tokens", "20MB")
    fixed, shared = planned(*arguments, "--no-growth"), planned(*arguments, "--one-budget")
    assert not fixed["settings"]["one_budget"]
    assert shared["settings"]["one_budget"]
    (alone,), (size,) = fixed["sizes"], shared["sizes"]
    slots, of_fixed = (
        {pool["component"]: pool["slots"] for pool in each["pools"]} for each in (size, alone)
    )
    assert of_fixed["mamba"] == 16 < slots["mamba"]
    assert slots["full"] < of_fixed["full"]
    assert sum(pool["nbytes"] for pool in size["pools"]) <= 20e6
    assert size["token_hit_rate"] > alone["token_hit_rate"]
    assert not size["growth"]


@pytest.mark.long
def test_a_budget_that_reaches_a_target_is_searched(planned: Plan) -> None:
    arguments = (*HYBRID, "--requests", 200, "--device-tokens", "40MB,60MB", "--one-budget")
    result = planned(*arguments, "--target", 25)
    assert len(result["sizes"]) == 2 + 4
    assert all(39e6 < size["device_nbytes"] < 60e6 for size in result["sizes"][2:])
    assert result["target"]["cheapest"]


GPT_OSS = (
    *("--component", "full:n_layers=18,n_kv_heads=8,head_dim=64"),
    *("--component", "swa:n_layers=18,n_kv_heads=8,head_dim=64,window=127"),
)
"""The layers of gpt-oss-120b: 36,864 bytes a token of each kind."""


def test_windows_that_get_what_they_need_hit_more_than_with_equal_tokens(planned: Plan) -> None:
    rag = ("--synthetic", "rag", "--requests", 150, *GPT_OSS, "--no-growth")
    (by_need,) = planned(*rag, "--device-tokens", "4GB")["sizes"]
    equal_tokens = by_need["device_nbytes"] // (2 * 36_864)
    (equal,) = planned(*rag, "--device-tokens", equal_tokens)["sizes"]
    assert equal["device_nbytes"] <= by_need["device_nbytes"] <= 4e9
    assert by_need["token_hit_rate"] > equal["token_hit_rate"] + 0.08
    assert by_need["rejections"] == equal["rejections"] == 0
    tokens = {pool["component"]: pool["tokens"] for pool in by_need["pools"]}
    assert tokens["full"] > 1.3 * equal_tokens
    assert by_need["split"] is None, "no other was tried"


def test_other_splits_of_the_bytes_are_tried_and_the_best_one_is_taken(planned: Plan) -> None:
    arguments = ("--synthetic", "chat", "--requests", 60, *GPT_OSS, "--device-tokens", "500MB")
    result = planned(*arguments, "--target", 5)
    size, split = result["sizes"][0], result["sizes"][0]["split"]
    tried = {each["points"]: each for each in split["tried"]}
    assert tried.keys() >= {0.5, 0.9, 1, 1.1, 2}
    assert split["points"] in tried
    fewest = min(each["rejections"] for each in tried.values())
    serving = [each for each in tried.values() if each["rejections"] == fewest]
    assert size["saved_tokens"] == max(each["saved_tokens"] for each in serving)
    assert split["gained_tokens"] == size["saved_tokens"] - tried[1]["saved_tokens"]
    assert tried[0.5]["saved_tokens"] != tried[1]["saved_tokens"]
    assert sum(pool["nbytes"] for pool in size["pools"]) <= 500e6
    assert {(each["component"], each["tier"]) for each in size["growth"]} == {
        ("full", "device"),
        ("swa", "device"),
    }
    states = "mamba:n_layers=8,n_heads=8,head_dim=32,state_dim=64"
    capped = ("--component", "full:n_layers=2,n_kv_heads=8,head_dim=64", "--component", states)
    (size,) = planned("--synthetic", "chat", "--requests", 20, *capped, "--device-tokens", "300MB")[
        "sizes"
    ]
    points = [each["points"] for each in size["split"]["tried"]]
    assert points == sorted(set(points)), "a pool has at most the tokens of the base"
    assert points[-1] == 1
    tokens = ("--device-tokens", "8k", "--component", "full", "--component", "swa")
    (alike,) = planned("--synthetic", "chat", "--requests", 5, *tokens)["sizes"]
    assert alike["split"] is None, "tokens are those of each pool"


def test_rows_are_in_order_of_the_sizes_asked_for_whatever_their_splits() -> None:
    sizes = ("--device-tokens", "500MB", "--host-tokens", "2GB,0", "--processes", "2")
    done = run_forked(
        *(KVGRAFT, "plan", "--synthetic", "rag", "--requests", "60", *GPT_OSS, *sizes)
    )
    hits = done.stdout.partition("Hit rates")[2].partition("Savings")[0].splitlines()
    assert [line.split()[:2] for line in hits[3:] if line] == [["500MB", "none"], ["500MB", "2GB"]]


def test_states_alone_are_planned_in_bytes(planned: Plan) -> None:
    state = "mamba:n_layers=8,n_heads=8,head_dim=32,state_dim=64"
    size = ("--component", state, "--device-tokens", "10MB,60MB", "--no-growth")
    small, large = planned("--synthetic", "chat", "--requests", 60, *size)["sizes"]
    assert 0.9 * 10e6 < small["device_nbytes"] <= 10e6
    assert 0.9 * 60e6 < large["device_nbytes"] <= 60e6
    assert small["token_hit_rate"] < large["token_hit_rate"]


def test_every_policy_is_replayed_at_every_size(planned: Plan) -> None:
    result = planned(
        *("--synthetic", "chat", "--requests", 200, "--component", "full", "--no-growth"),
        *("--device-tokens", "80k,1M", "--policy", "lru,density"),
    )
    small, other, large, same = result["sizes"]
    asked = [(size["device"], size["policy"]) for size in result["sizes"]]
    assert asked == [("80k", "lru"), ("80k", "density"), ("1M", "lru"), ("1M", "density")]
    assert small["token_hit_rate"] != other["token_hit_rate"]
    assert large["token_hit_rate"] == same["token_hit_rate"], "nothing is evicted"
    assert "eviction_policy" not in result["settings"]


def test_processes_side_by_side_find_the_same_as_one(planned: Plan, trace: Path) -> None:
    arguments = (trace, "--component", "full", "--device-tokens", "1280,2560,64k", "--no-growth")
    alone, together = (planned(*arguments, "--processes", n) for n in (1, 2))
    for result in (alone, together):
        del result["cpu_s"], result["wall_s"]
    assert alone == together


def test_a_process_that_dies_is_named_and_the_others_end(
    trace: Path, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen

    def killing(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start(*arguments, **options)
        if len(started) == 2:
            started[0].kill()
        return process

    monkeypatch.setattr(subprocess, "Popen", killing)
    cache = {"components": {"full": {}}, "device_tokens": 6400, "payload": False}
    settings = ReplaySettings(cache={}, verify=Verify.OFF)
    with pytest.raises(KvgraftError, match="a process that replays ended with signal 9"):
        Replays(open_workload(trace), settings, 2).run([cache, cache], lambda task, share: None)
    assert [each.poll() is not None for each in started] == [True, True]


@pytest.mark.long
def test_processes_stay_for_the_sizes_that_are_replayed_later(
    trace: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    cache = {"components": {"full": {}}, "device_tokens": 6400, "payload": False}
    replays = Replays(open_workload(trace), ReplaySettings(cache={}, verify=Verify.OFF), 2)
    rates = [
        one["token_hit_rate"]
        for caches in ([cache, cache], [cache], [cache, cache, cache])
        for one in replays.run(caches, lambda task, share: None)
    ]
    assert len(rates) == 6
    assert len(set(rates)) == 1
    assert [each.poll() for each in started] == [None, None]
    replays.close()
    assert [each.poll() is not None for each in started] == [True, True]


def test_no_size_is_replayed_twice(trace: Path) -> None:
    told: list[float] = []
    settings = ReplaySettings(cache={}, verify=Verify.OFF, checks=1)
    sweep = Sweep(
        open_workload(trace), settings, n_processes=1, progress=lambda done, n: told.append(done)
    )
    small, large = all_sizes(
        {"components": {"full": {}}, "page_size": 64}, [640, 6400], [0], ["lru"]
    )
    found = sweep.replay([small, large, small])
    assert (found[0], told[-1]) == (found[2], 2)
    assert found[0]["settings"]["device_tokens"] == 640
    told.clear()
    assert sweep.replay([large, small]) == [found[1], found[0]]
    assert not told


def test_a_closed_loop_has_no_curve_and_says_why(planned: Plan, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", agentic_lines())
    sizes = ("--component", "full", "--device-tokens", "100k", "--no-growth")
    result = planned(path, "--users", 2, *sizes)
    assert result["sizes"][0]["lru_hit_rate"] is None
    assert "closed loop" in result["curve"]["reason"]


def test_a_model_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent: no such file; give a model's config\.json"):
        components_of(tmp_path / "absent", [])


def test_without_a_package_that_reads_models_one_line_names_the_package_to_install(
    tmp_path: Path,
) -> None:
    def broken() -> object:
        raise ImportError("no module named 'transformers'")

    advice = "pip install -r plugins/transformers/requirements.txt"
    with pytest.raises(ConfigError, match="no installed package reads a model's") as caught:
        components_of(tmp_path, [])
    assert advice in str(caught.value)
    package = Published("transformers", "kvgraft-transformers", "1", ("one",), broken)
    with pytest.raises(ConfigError, match="no module named 'transformers'") as caught:
        components_of(tmp_path, [package])
    assert advice in str(caught.value)


def test_states_are_not_quantized() -> None:
    components = {"full@a": {"dtype": "bfloat16"}, "mamba": {"dtype": "bfloat16"}}
    assert quantized(components, "fp8") == {
        "full@a": {"dtype": "float8_e4m3fn"},
        "mamba": {"dtype": "bfloat16"},
    }


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "no size": (
        ("TRACE", "--component", "full"),
        "missing option '--device-tokens'. give for example --device-tokens 4M, or bytes such as",
    ),
    "sizes apart": (
        ("TRACE", "--component", "full", "--device-tokens", "20k", "--device", "60k"),
        "--device-tokens is given 2 times; give it once, with commas between its values",
    ),
    "no model": (
        ("TRACE", "--device-tokens", "4M"),
        "give --model CONFIG.json or --component NAME",
    ),
    "model and component": (
        ("TRACE", "--device-tokens", "4M", "--component", "full", "--model", "DIR"),
        "give --model CONFIG.json or --component NAME",
    ),
    "size of nothing": (
        ("TRACE", "--component", "full", "--device-tokens", "4M,many"),
        "invalid value for '--device-tokens': 'many' is no size; give tokens, such as 4M, or",
    ),
    "no size between commas": (
        ("TRACE", "--component", "full", "--device-tokens", "4M,"),
        "invalid value for '--device-tokens': '' is no size",
    ),
    "less than a page": (
        ("TRACE", "--component", "full", "--device-tokens", "4M,10"),
        "component 'full': --device-tokens: 10 tokens make no page of 64; give 64 or more",
    ),
    "too few bytes": (
        ("TRACE", "--component", "full", "--device-tokens", "1kB"),
        "kvgraft: --device-tokens: 1.0 kB are less than the smallest pools take, 2.0 kB; give more",
    ),
    "a budget of tokens": (
        ("TRACE", "--component", "full", "--device-tokens", "40GB,4M", "--one-budget"),
        "--one-budget: 4000000 are tokens of each pool; give the bytes of all, as 40GB",
    ),
    "tenants of one budget": (
        (
            "TRACE",
            "--component",
            "full",
            "--device-tokens",
            "40GB",
            "--one-budget",
            "--tenant",
            "a",
        ),
        "--tenant and --one-budget: tenants have shares of pools of a fixed size; leave one",
    ),
    "no such policy": (
        ("TRACE", "--component", "full", "--device-tokens", "4M", "--policy", "lru,mru"),
        "eviction policy 'mru' is not installed; did you mean 'lru'? use one of density, lru",
    ),
    "no such trace": (
        ("DIR/none.jsonl", "--component", "full", "--device-tokens", "4M"),
        "none.jsonl: no such file; check the path",
    ),
    "more requests than numbers": (
        (
            *("--synthetic", "chat", "--requests", "99999999999999"),
            *("--component", "full", "--device", "4M"),
        ),
        "synthetic chat: 99,999,999,999,999 requests have more distinct tokens than int32 has "
        "numbers; ask for at most 2,500,000",
    ),
    "target of nothing": (
        ("TRACE", "--component", "full", "--device-tokens", "4M", "--target", "0"),
        "invalid value for '--target': 0.0 is not in the range 0<x<=100",
    ),
    "the trace itself": (
        ("TRACE", "--component", "full", "--device-tokens", "4M", "--json", "TRACE"),
        "trace.jsonl is the trace that is replayed; choose another path",
    ),
    "closed loop without users": (
        ("AGENTS", "--component", "full", "--device-tokens", "4M"),
        "replay it closed loop, for example --users 8",
    ),
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Refusal]:
    directory = tmp_path_factory.mktemp("refused")
    write_trace(directory / "trace.jsonl", mooncake_lines())
    write_trace(directory / "agents.jsonl", agentic_lines())
    words = {"TRACE": "DIR/trace.jsonl", "AGENTS": "DIR/agents.jsonl"}
    return refused(
        {
            case: [
                "plan",
                *(words.get(part, part).replace("DIR", str(directory)) for part in given),
            ]
            for case, (given, _) in REFUSED.items()
        }
    )


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_and_exit_status_2(refusals: dict[str, Refusal], case: str) -> None:
    refusal = refusals[case]
    assert refusal.status == 2
    assert REFUSED[case][1] in refusal.errors
    assert refusal.errors.startswith("kvgraft: ")
    assert refusal.errors.count("\n") == 1
    assert refusal.output == ""
