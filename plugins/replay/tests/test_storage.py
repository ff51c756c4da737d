"""Replays over a store: warm restarts, the identity of data, and the effect of damage."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgraft import Cache
from kvgraft.types import Tier
from kvgraft_replay.engine import EngineModel
from kvgraft_replay.fetching import Fetching
from kvgraft_replay.identity import identity
from kvgraft_replay.meter import Meter
from kvgraft_replay.payload import Verify
from kvgraft_replay.replay import ReplaySettings, replay
from kvgraft_replay.report.schema import ReplayResult, StorageCounts
from kvgraft_replay.running import Player
from kvgraft_replay.synthetic import synthetic_workload
from kvgraft_replay.workload import Span, TraceRequest, Workload
from kvgraft_storage.settings import PrefetchPolicy, StorePolicy

PAGE = 32
REQUESTS = 24
FULL: dict[str, dict[str, Any]] = {"full": {}}
HYBRID: dict[str, dict[str, Any]] = {
    "full": {},
    "swa": {"window": 256},
    "mamba": {"states": 24, "host_states": 256},
}
SPARSE: dict[str, dict[str, Any]] = {"hisparse": {}}
"""Keys and values live on HOST; its pool has part of its mirror's planes."""
SMALL = {"device_tokens": 16_000, "host_tokens": 20_000}
LARGE: dict[str, Any] = {"device_tokens": 200_000, "host_tokens": 400_000}

Replay = Callable[..., ReplayResult]


def chats(n_requests: int = REQUESTS, seed: int = 0) -> Workload:
    return synthetic_workload("chat", requests=n_requests, seed=seed)


def asked_twice(n_tokens: int = 640) -> Workload:
    """One prompt at once from two users."""
    requests = [
        TraceRequest(number, number, 0.0, 0.0, n_tokens, 1, (Span(0, n_tokens), Span(5000, 1)))
        for number in range(2)
    ]
    return Workload.of(
        requests, name="twice", format="synthetic", has_absolute_time=True, block_tokens=1
    )


def one_shot(n_requests: int = 12, n_tokens: int = 600) -> Workload:
    """Prompts that share nothing, a second apart."""
    requests = [
        TraceRequest(number, number, number, 0.0, n_tokens, 20, (Span(number * 1000, 620),))
        for number in range(n_requests)
    ]
    return Workload.of(
        requests, name="once", format="synthetic", has_absolute_time=True, block_tokens=1
    )


@pytest.fixture
def stored(tmp_path: Path) -> Replay:
    """Replay over the store in a directory; each call is a process's life."""

    def _stored(
        workload: Workload,
        components: dict[str, dict[str, Any]] | None = None,
        verify: Verify = Verify.FULL,
        limit: int | None = None,
        max_running: int = 256,
        **given: Any,
    ) -> ReplayResult:
        storage = {
            "url": f"file:{tmp_path}?capacity=256MiB",
            "store": StorePolicy.SECOND_TOUCH,
            "prefetch": PrefetchPolicy.WAIT_COMPLETE,
            "threshold_tokens": PAGE,
            **given.pop("storage", {}),
        }
        cache = {
            "components": components or FULL,
            "page_size": PAGE,
            "load": None,
            "storage": storage,
            **SMALL,
            **given,
        }
        model = EngineModel(max_running=max_running)
        settings = ReplaySettings(cache, verify=verify, limit=limit, model=model)
        result = replay(workload, settings)
        assert result["payload_mismatches"] == result["ledger_violations"] == 0
        assert result["out_of_memory"] == 0
        return result

    return _stored


def counts(result: ReplayResult) -> StorageCounts:
    assert result["storage"] is not None
    return result["storage"]


def untimed(result: ReplayResult) -> dict[str, Any]:
    """The result without times, and without calls of which a round is made each second."""
    timings = ("cpu_us_per_request", "wall_s", "settings")
    rest: dict[str, Any] = copy.deepcopy(
        {name: value for name, value in result.items() if name not in timings}
    )
    for verb in ("touch", "exists"):
        rest["storage"]["calls"].pop(verb, None)
    return rest


@pytest.mark.one_in(3)
@pytest.mark.parametrize("components", [FULL, HYBRID, SPARSE], ids=["full", "hybrid", "sparse"])
def test_a_second_replay_hits_data_that_the_first_one_stored(
    stored: Replay, components: dict[str, dict[str, Any]]
) -> None:
    first = stored(chats(), components)
    second = stored(chats(), components)
    assert counts(first)["stores"]["slots"] > 0
    assert second["hit_tokens"]["storage"] > first["hit_tokens"]["storage"]
    assert second["token_hit_rate"] > first["token_hit_rate"]
    before, after = counts(second)["before"], counts(first)["after"]
    assert before is not None
    assert after is not None
    assert before["records"] == after["records"] > 0
    assert max(point["storage_hit_rate"] for point in second["timeline"]) > 0
    for name in components:
        assert second["component_hits"][name]["storage_slots"] > 0
    assert second["payloads_verified"] > 0


@pytest.mark.parametrize("components", [FULL, HYBRID], ids=["full", "hybrid"])
def test_hits_of_all_tiers_and_computed_tokens_add_up(
    stored: Replay, components: dict[str, dict[str, Any]]
) -> None:
    stored(chats(), components)
    result = stored(chats(), components)
    hits = result["hit_tokens"]
    assert sum(hits.values()) == result["saved_tokens"]  # type: ignore[arg-type]
    assert min(hits.values()) >= 0  # type: ignore[type-var, operator]
    for source in result["sources"]:
        tiers = (source["device"], source["host"], source["storage"], source["computed"])
        assert min(tiers) >= 0
    for tier in ("device", "host", "storage"):
        assert hits[tier] == sum(source[tier] for source in result["sources"])
    full = result["component_hits"]["full"]
    assert full["storage_slots"] >= hits["storage"] // PAGE
    loaded = {
        name: of["host_slots"] + of["storage_slots"]
        for name, of in result["component_hits"].items()
    }
    if not result["retractions"] and not result["load_backs"]["shared"]:
        assert loaded["full"] == result["load_backs"]["slots"]["full"]
    assert counts(result)["prefetches"]["tokens"] >= hits["storage"]


def test_two_requests_that_share_a_prefetch_share_its_hits(stored: Replay) -> None:
    """The second one finds the first one's loaded data on DEVICE, and counts it there."""
    stored(asked_twice(), storage={"store": StorePolicy.WRITE_THROUGH})
    result = stored(asked_twice(), max_running=1)
    assert counts(result)["prefetches"]["shared"] == 1
    first, second = result["sources"]
    found = 640 - PAGE
    assert (first["device"], first["host"], first["storage"]) == (0, 0, found)
    assert (second["device"], second["host"], second["storage"]) == (found, 0, 0)
    assert result["component_hits"]["full"]["storage_slots"] == found // PAGE


def test_pages_that_host_lost_of_a_deferred_request_are_fetched_again(
    stored: Replay, tmp_path: Path
) -> None:
    workload = asked_twice()
    stored(workload, storage={"store": StorePolicy.WRITE_THROUGH})
    cache = Cache.open(
        FULL,
        page_size=PAGE,
        load=None,
        storage={
            "url": f"file:{tmp_path}?capacity=256MiB",
            "prefetch": PrefetchPolicy.WAIT_COMPLETE,
            **identity(workload, FULL, Verify.FULL),
        },
        **LARGE,
    )
    fetching = Fetching(cache, Meter())
    job = Player(cache, Meter(), Verify.FULL, 0).job(workload.requests[0])
    fetching.enter(job)
    assert fetching.leave() == []
    fetching.settle()
    assert fetching.leave() == [job]
    request = fetching.begin(job, reserve=0, chunk=640)
    assert request.anchor_tokens == 640 - PAGE
    fetching.deferred(job, request)
    assert job.prefetch is None, "nothing was lost"
    cache.abort(request)
    cache.evict("full", 640 // PAGE, Tier.HOST)
    request = fetching.begin(job, reserve=0, chunk=640)
    assert request.anchor_tokens == 0
    fetching.deferred(job, request)
    cache.abort(request)
    fetching.settle()
    request = fetching.begin(job, reserve=0, chunk=640)
    assert request.anchor_tokens == 640 - PAGE
    cache.abort(request)
    cache.close()


def test_nothing_is_hit_from_a_cold_store_and_the_reasons_add_up(stored: Replay) -> None:
    result = stored(chats(), **LARGE)
    assert result["hit_tokens"]["storage"] == 0
    assert sum(counts(result)["in_vain"].values()) == counts(result)["prefetches"]["in vain"] > 0


@pytest.mark.long
def test_equal_stores_give_equal_results_but_for_the_timings(tmp_path: Path) -> None:
    def twice(directory: str) -> list[dict[str, Any]]:
        (tmp_path / directory).mkdir()
        cache = {
            "components": HYBRID,
            "page_size": PAGE,
            "storage": {
                "url": f"file:{tmp_path / directory}?capacity=256MiB",
                "store": StorePolicy.WRITE_THROUGH,
                "prefetch": PrefetchPolicy.WAIT_COMPLETE,
            },
            **SMALL,
        }
        return [untimed(replay(chats(), ReplaySettings(cache))) for _ in range(2)]

    cold, warm = twice("a")
    assert warm["hit_tokens"]["storage"] > 0
    assert twice("b") == [cold, warm]


OTHERS: dict[str, dict[str, Any]] = {
    "seed": {"workload": chats(seed=1)},
    "requests": {"workload": chats(REQUESTS - 1)},
    "option": {"components": {"full": {}, "swa": {"window": 512}}},
    "component": {"components": {"full": {}}},
    "page size": {"page_size": 2 * PAGE},
    "no stamps": {"verify": Verify.OFF},
}


def test_a_replay_of_something_else_never_reads_it(stored: Replay) -> None:
    components = {"full": {}, "swa": {"window": 256}}
    given: dict[str, Any] = {"components": components, "limit": 12}
    write_through = {"storage": {"store": StorePolicy.WRITE_THROUGH}}
    stored(chats(), **given, **write_through)
    assert stored(chats(), **given)["hit_tokens"]["storage"] > 0
    for name, other in OTHERS.items():
        result = stored(**{"workload": chats(), **given, **other}, **LARGE)
        assert result["hit_tokens"]["storage"] == 0, name
        assert "ok" not in counts(result)["calls"].get("get", {}), name


def test_payloads_nobody_stamped_are_not_read_by_a_replay_that_verifies(stored: Replay) -> None:
    stored(chats(), verify=Verify.OFF)
    assert stored(chats(), **LARGE)["hit_tokens"]["storage"] == 0
    assert stored(chats(), verify=Verify.SAMPLED, **LARGE)["hit_tokens"]["storage"] > 0


def test_other_pool_sizes_and_rates_share_a_store(stored: Replay) -> None:
    stored(chats(), {"full": {"host_tokens": 20_000}})
    assert stored(chats(), FULL, **LARGE)["hit_tokens"]["storage"] > 0


def test_data_used_once_is_not_stored_on_second_touch(stored: Replay) -> None:
    result = stored(one_shot())
    assert result["computed_tokens"] == result["input_tokens"]
    assert counts(result)["stores"]["nodes"] == 0
    assert counts(result)["after"] == counts(result)["before"]
    after = counts(stored(one_shot(), storage={"store": StorePolicy.WRITE_THROUGH}))["after"]
    assert after is not None
    assert after["records"] == 12 * (620 // PAGE)


def test_data_that_leaves_the_host_comes_back_within_one_replay(stored: Replay) -> None:
    result = stored(chats(40), storage={"store": StorePolicy.HOST_EVICTION})
    assert result["hit_tokens"]["storage"] > 0


def test_damaged_segments_are_misses_and_never_wrong_payloads(
    stored: Replay, tmp_path: Path
) -> None:
    stored(chats())
    warm = stored(chats())
    assert damage(tmp_path) > 0
    result = stored(chats())
    assert counts(result)["calls"]["get"]["corrupt"] > 0
    assert result["hit_tokens"]["storage"] < warm["hit_tokens"]["storage"]
    assert result["payloads_verified"] > 0


def damage(directory: Path) -> int:
    """Flip a bit in every third block, so that records' headers and payloads are hit; how many."""
    flipped = 0
    for segment in filter(Path.is_file, directory.rglob("*")):
        data = bytearray(segment.read_bytes())
        for offset in range(2 * 4096, len(data), 3 * 4096):
            data[offset + 5] ^= 1
            flipped += 1
        segment.write_bytes(data)
    return flipped


@pytest.mark.one_in(3)
@pytest.mark.parametrize("policy", PrefetchPolicy)
def test_every_prefetch_policy_serves_all_requests(stored: Replay, policy: PrefetchPolicy) -> None:
    stored(chats())
    result = stored(chats(), storage={"prefetch": policy, "prefetch_timeout_s": 0.05})
    assert result["requests"] == REQUESTS
    assert counts(result)["prefetches"]["started"] >= REQUESTS


def test_a_replay_without_a_store_says_so(stored: Replay) -> None:
    alone = stored(chats(), storage={"url": None})
    assert counts(alone)["breaker"] == "no store"
    assert counts(alone)["before"] is counts(alone)["after"] is None
    assert alone["hit_tokens"]["storage"] == 0
    assert set(counts(alone)["in_vain"]) >= {"no store is attached"}


def test_prefetches_shrink_to_the_memory_they_may_hold(stored: Replay) -> None:
    stored(chats())
    whole = stored(chats())
    less = stored(chats(), storage={"prefetch_nbytes": 1 << 13})
    assert 0 < less["hit_tokens"]["storage"] < whole["hit_tokens"]["storage"]


def test_a_workloads_arrival_times_are_not_in_the_fingerprint(stored: Replay) -> None:
    workload = chats()
    later = [dataclasses.replace(each, arrival_s=each.arrival_s * 2) for each in workload.requests]
    stored(workload)
    slower = dataclasses.replace(workload, requests=tuple(later))
    assert stored(slower)["hit_tokens"]["storage"] > 0
