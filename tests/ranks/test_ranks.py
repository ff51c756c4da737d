"""Several ranks in processes of their own, with other hash seeds, delays and troubles (D1 - D4)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..commands import KVGRAFT, run
from .processes import Ranks

FULL: dict[str, Any] = {"full": {}}
HYBRID: dict[str, Any] = {"full": {}, "swa": {"window": 16}, "mamba": {}}
OTHERS: list[dict[str, Any]] = [
    {"full": {}, "swa": {"window": 16}},
    {"full": {}, "mamba": {}},
    {"swa": {"window": 16}},
    {"mamba": {}},
]
SETS = [
    FULL,
    HYBRID,
    {"hisparse": {"hot_tokens": 16}},
    *[pytest.param(each, marks=pytest.mark.long) for each in OTHERS],
]

N_CALLS = 250


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """Two ranks that outlive a test."""
    with Ranks(2) as ranks:
        yield ranks


def expect_equal(results: list[dict[str, Any]]) -> None:
    """All ranks decided alike, and no request got bytes of others."""
    first = results[0]
    assert [each["error"] for each in results] == [""] * len(results)
    for each in results:
        assert each["mismatches"] == 0
        assert (each["digest"], each["calls"]) == (first["digest"], first["calls"])


def names(components: dict[str, Any]) -> str:
    return "+".join(components)


@pytest.mark.rule("D1", "D2")
@pytest.mark.parametrize("tier", ["host", "file"])
@pytest.mark.parametrize("components", SETS, ids=names)
def test_random_calls_have_equal_results_on_ranks_with_other_delays_and_hash_seeds(
    pair: Ranks, components: dict[str, Any], tier: str
) -> None:
    hits = 0
    for seed in range(1, 6):
        job: dict[str, Any] = {"components": components, "seed": seed, "n_calls": N_CALLS}
        if tier == "file":
            job["store"] = f"{names(components)} {seed}"
        results = pair.run(job)
        expect_equal(results)
        hits += results[0]["hits"]
        if hits:
            return
    pytest.fail(f"{seed} games without a hit")


@pytest.mark.rule("D1", "D2")
@pytest.mark.parametrize(
    "settings",
    [{"write_policy": "write-back"}, {"policy": "lru"}, {"guard": "on"}],
    ids=["write-back", "lru", "guard"],
)
def test_ranks_decide_alike_with_other_settings(pair: Ranks, settings: dict[str, Any]) -> None:
    job = {"components": HYBRID, "seed": 2, "n_calls": N_CALLS, "settings": settings}
    expect_equal(pair.run({**job, "store": next(iter(settings))}))


@pytest.mark.rule("D3")
@pytest.mark.parametrize("what", ["io", "damage", "full", "slow", "copies"])
def test_a_failure_on_one_rank_degrades_all_alike(pair: Ranks, what: str) -> None:
    storage = {"prefetch": "wait-complete", "deadline_s": 0.1 if what == "slow" else 10.0}
    job = {"components": HYBRID, "seed": 5, "n_calls": N_CALLS, "store": what, "storage": storage}
    expect_equal(pair.run(job))
    results = pair.run({**job, "trouble": {"rank": 1, "what": what}})
    expect_equal(results)
    assert results[0]["troubles"] == 0
    assert results[1]["troubles"] > 0


@pytest.mark.rule("D3")
def test_data_that_ranks_stored_is_found_by_as_many_ranks(pair: Ranks) -> None:
    storage = {"prefetch": "wait-complete", "prefetch_timeout_s": 60.0, "deadline_s": 10.0}
    job = {"components": FULL, "seed": 7, "n_calls": N_CALLS, "store": "again", "storage": storage}
    first = pair.run(job)
    for _ in range(5):  # what a game asks for depends on when its prefetches end
        second = pair.run(job)
        expect_equal(second)
        if second[0]["from_storage"] > first[0]["from_storage"]:
            return
    pytest.fail(f"first and last game: {first[0]['from_storage']}, {second[0]['from_storage']}")


@pytest.mark.rule("D3", "S8")
def test_calls_of_the_storage_tier_go_well_on_all_ranks_or_on_none(pair: Ranks) -> None:
    zero, one = pair.run({"calls": True})
    assert zero.pop("sharding") == "rank 0 of 2"
    assert one.pop("sharding") == "rank 1 of 2"
    assert "rank 1: storage: a store is an open StorageBackend" in zero["attach"]
    assert zero.pop("damaged").startswith("SnapshotError: snapshot ")
    assert ": rank 1: " in one.pop("damaged")
    assert zero == one
    assert not zero["attached"]
    assert zero["drained"]
    assert zero["restored"] > 0
    assert zero["after clear"] == 0
    assert zero["detached"]
    assert zero["versions"] == [True, True]
    assert zero["ready"].startswith("ConfigError: ready: polls at times of its own")


@pytest.mark.rule("D2")
def test_an_idle_poll_sends_one_message(pair: Ranks) -> None:
    results = pair.run({"components": FULL, "seed": 1, "n_calls": 20})
    assert [each["messages_of_10_polls"] for each in results] == [10, 10]


@pytest.mark.rule("D1")
def test_ranks_with_other_pools_are_refused_on_all(pair: Ranks) -> None:
    job = {"components": FULL, "seed": 1, "n_calls": 1}
    for each in pair.run({**job, "settings_of": {"1": {"device_tokens": 400}}}):
        assert "slots of 'full' on device is 100 on rank 1 and 120 on rank 0" in each["error"]


@pytest.mark.rule("D3")
def test_a_cache_that_cannot_be_opened_on_one_rank_is_opened_on_none(pair: Ranks) -> None:
    job = {"components": FULL, "seed": 1, "n_calls": 1}
    for each in pair.run({**job, "settings_of": {"1": {"device": "npu:7"}}}):
        assert each["error"].startswith("ConfigError: rank 1: device 'npu:7'")
    expect_equal(pair.run(job))


@pytest.mark.rule("D3")
def test_a_setting_that_is_wrong_on_one_rank_is_named_on_all(pair: Ranks) -> None:
    job = {"components": FULL, "seed": 1, "n_calls": 1}
    for each in pair.run({**job, "settings_of": {"1": {"page_size": 0}}}):
        assert each["error"] == "ConfigError: rank 1: setting page_size=0: give more than 0"


@pytest.mark.rule("D1")
def test_pools_in_bytes_hold_the_tokens_that_fit_on_every_rank(pair: Ranks) -> None:
    three = {"full": {}, "swa": {"window": 16}, "mamba": {}}
    job = {"components": three, "seed": 1, "n_calls": 60}
    sizes = {"0": "600kB", "1": "500kB"}
    of_rank = {rank: {"device_tokens": size, "host_tokens": "1MB"} for rank, size in sizes.items()}
    expect_equal(pair.run({**job, "settings_of": of_rank}))


@pytest.mark.rule("D4")
@pytest.mark.parametrize(
    ("what", "calls"),
    [
        ("key", ("begin",)),
        ("namespace", ("begin",)),
        ("reserve", ("begin",)),
        ("token", ("checkpoint", "finish")),
    ],
)
def test_another_argument_on_one_rank_is_found_and_its_call_named(
    pair: Ranks, what: str, calls: tuple[str, ...]
) -> None:
    job = {"components": FULL, "seed": 3, "n_calls": 250}
    results = pair.run({**job, "trouble": {"rank": 1, "at": 50, "what": f"other {what}"}})
    for each in results:
        assert each["error"].startswith("RanksDivergedError: D4: ranks differ from call ")
        zero, one = each["results"]["0"], each["results"]["1"]
        assert zero.startswith(calls)
        assert one.startswith(calls)
        assert zero != one


@pytest.mark.rule("D4")
def test_a_call_of_one_rank_alone_is_found_and_named(pair: Ranks) -> None:
    job = {"components": FULL, "seed": 3, "n_calls": N_CALLS}
    results = pair.run({**job, "trouble": {"rank": 1, "at": 150, "what": "call"}})
    for each in results:
        assert each["error"].startswith("RanksDivergedError: D4: ranks differ from call ")
        assert "evict" in each["results"]["1"]
        assert "evict" not in each["results"]["0"]
        assert each["number"] == results[0]["number"]
        assert each["after"] == "RanksDivergedError"


@pytest.mark.rule("D4")
def test_a_decision_of_one_rank_alone_is_found_with_both_sides_numbers(pair: Ranks) -> None:
    job = {"components": FULL, "seed": 3, "n_calls": N_CALLS, "settings": {"host_tokens": 0}}
    results = pair.run({**job, "trouble": {"rank": 1, "at": 150, "what": "evict"}})
    for each in results:
        zero, one = each["results"]["0"], each["results"]["1"]
        assert zero.split("[")[0] == one.split("[")[0]  # the same call
        assert zero != one
        assert each["after"] == "RanksDivergedError"


@pytest.mark.one_in(2)
@pytest.mark.rule("D2")
@pytest.mark.parametrize(
    ("how", "says"), [("SIGKILL", "has ended"), ("SIGSTOP", "does not answer")]
)
def test_a_rank_that_dies_or_hangs_is_an_error_on_the_others_in_time(how: str, says: str) -> None:
    timeout_s = 3.0
    job = {
        "components": HYBRID,
        "seed": 4,
        "n_calls": N_CALLS,
        "settings": {"transfer_timeout_s": timeout_s},
        "trouble": {"rank": 1, "at": 100, "what": how},
    }
    with Ranks(3) as ranks:
        for each in ranks.run(job, of=[0, 2]):
            assert f"one of them {says}" in each["error"]
            assert each["waited_s"] < timeout_s + 1
            assert each["after"] == "RanksError"


@pytest.mark.long
@pytest.mark.rule("D1", "D2")
def test_four_ranks_decide_alike() -> None:
    with Ranks(4) as ranks:
        expect_equal(ranks.run({"components": HYBRID, "seed": 6, "n_calls": N_CALLS, "store": "x"}))


@pytest.mark.long
@pytest.mark.rule("D1")
def test_a_replay_on_two_ranks_hits_the_same_tokens_as_on_one(tmp_path: Path) -> None:
    replay = (
        *("replay", "--synthetic", "agents", "--requests", 12, "--users", 3),
        *("--component", "full", "--component", "swa:window=512", "--component", "mamba"),
        *("--device-tokens", 30_000, "--host-tokens", 60_000),
    )
    found = []
    for n_ranks in (1, 2):
        target = tmp_path / f"{n_ranks}.json"
        done = run(
            KVGRAFT, *map(str, replay), "--ranks", str(n_ranks), "--json", target, timeout_s=280
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(target.read_text(encoding="utf-8")))
    one, two = found
    differs = [name for name in one if one[name] != two[name]]
    assert set(differs) <= {"cpu_us_per_request", "wall_s"}
    assert two["payloads_verified"] > 0
