"""vLLM's own `TieringOffloadingManager` over kvgraft stores; needs vLLM's Python files only."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM's files are not at hand: make test-engine-files")

import vllm
from plugins.vllm.tests.engines import CHUNK_NBYTES, chunk_keys, host, offloading_config
from vllm.v1.kv_offload import base as offload
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering import base as tiering
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvgraft import ConfigError
from kvgraft_vllm.interface import INTERFACE
from kvgraft_vllm.tier import KvgraftTier

PAYLOAD = bytes(range(256)) * (CHUNK_NBYTES // 256)
KEYS = chunk_keys(0, 4)
HIT, MISS = LookupResult.HIT, LookupResult.MISS


@pytest.fixture
def tier(tmp_path: Path) -> dict[str, Any]:
    return {"path": str(tmp_path), "capacity": "4MB", "weights": "one", "deadline_s": 0.5}


def fill(tier: dict[str, Any], keys: list[Any] | None = None) -> None:
    with host(tier) as first:
        request = first.begin("a")
        first.save(request, KEYS if keys is None else keys, PAYLOAD)
        first.end(request)


def test_chunks_are_found_and_loaded_after_a_restart(tier: dict[str, Any]) -> None:
    fill(tier)
    with host(tier) as second:
        request = second.begin("b")
        assert [second.find(request, key) for key in KEYS] == [HIT] * 4
        assert [second.read(request, key) for key in KEYS] == [PAYLOAD] * 4
        assert second.find(request, chunk_keys(4, 5)[0]) is MISS
        second.end(request)


def test_a_damaged_chunk_is_a_miss_and_the_others_are_hits(
    tier: dict[str, Any], tmp_path: Path
) -> None:
    fill(tier)
    (segment,) = tmp_path.glob("*.kvseg")
    stored = bytearray(segment.read_bytes())
    place = stored.index(PAYLOAD)
    stored[place + 100] ^= 1
    segment.write_bytes(stored)
    with host(tier) as second:
        request = second.begin("b")
        found = [second.find(request, key) for key in KEYS]
        assert sorted(found, key=str) == sorted([HIT, HIT, HIT, MISS], key=str)
        good = [key for key, each in zip(KEYS, found) if each is HIT]
        assert [second.read(request, key) for key in good] == [PAYLOAD] * 3


def test_a_full_store_keeps_its_size_and_goes_on(tier: dict[str, Any], tmp_path: Path) -> None:
    small = {**tier, "capacity": "256KiB"}
    with host(small, n_chunks=64) as first:
        request = first.begin("a")
        for start in range(0, 60, 4):
            first.save(request, chunk_keys(start, start + 4), PAYLOAD)
        assert sum(each.stat().st_size for each in tmp_path.glob("*.kvseg")) <= 256 << 10
    with host(small, n_chunks=64) as second:
        request = second.begin("b")
        assert HIT in [second.find(request, key) for key in chunk_keys(0, 60)]


def test_a_store_that_is_taken_away_is_misses(tier: dict[str, Any], tmp_path: Path) -> None:
    fill(tier)
    with host(tier) as second:
        shutil.rmtree(tmp_path)
        request = second.begin("b")
        found = [second.find(request, key) for key in KEYS]
        assert all(
            second.read(request, key) == PAYLOAD for key, each in zip(KEYS, found) if each is HIT
        )
        second.save(second.begin("c"), chunk_keys(8, 10), PAYLOAD)
        second.end(request)


def test_two_managers_share_a_store(tier: dict[str, Any]) -> None:
    with host(tier) as first, host({**tier, "refresh_s": 0}) as second:
        first.save(first.begin("a"), KEYS, PAYLOAD)
        request = second.begin("b")
        assert [second.find(request, key) for key in KEYS] == [HIT] * 4
        assert second.read(request, KEYS[3]) == PAYLOAD


def test_other_weights_find_nothing(tier: dict[str, Any]) -> None:
    fill(tier)
    with host({**tier, "weights": "two"}) as second:
        assert second.find(second.begin("b"), KEYS[0]) is MISS


def test_a_reset_ends_transfers_and_the_store_keeps_its_data(
    tier: dict[str, Any],
) -> None:
    with host(tier) as first:
        request = first.begin("a")
        first.save(request, KEYS, PAYLOAD)
        first.manager.reset_cache()
        if hasattr(first.manager, "on_reset_flushed"):
            first.manager.on_reset_flushed()
        assert first.find(request, KEYS[0]) is HIT


def test_metrics_are_those_that_are_defined(tier: dict[str, Any]) -> None:
    with host(tier) as first:
        request = first.begin("a")
        first.save(request, KEYS, PAYLOAD)
        assert first.find(request, chunk_keys(9, 10)[0]) is MISS
        first.end(request)
        stats = first.tier.get_stats()
        defined = KvgraftTier.build_metric_definitions({})
        told = stats.data["data"]
        assert set(told) <= set(defined)
        assert told["kvgraft:hits_ended"] == {("0", "miss"): 1}
        assert told["kvgraft:chunks"]["set", "ok"] == 4
        for name, values in told.items():
            assert {len(labels) for labels in values} == {len(defined[name].labelnames)}
        assert set(defined) <= set(
            TieringOffloadingSpec.build_metric_definitions(
                offloading_config(tier, n_chunks=4).extra_config
            )
        )


def test_events_are_vllms(tier: dict[str, Any]) -> None:
    with host({**tier, "enable_kv_events": True, "locality": "LOCAL"}) as first:
        first.save(first.begin("a"), KEYS, PAYLOAD)
        events = list(first.tier.take_events())
        assert sorted(key for event in events for key in event.keys) == KEYS
        assert {(event.removed, event.medium, event.locality) for event in events} == {
            (False, offload.Medium.STORAGE, offload.Locality.LOCAL)
        }


def test_unknown_weights_are_refused_in_a_line(tier: dict[str, Any]) -> None:
    del tier["weights"]
    with pytest.raises(ConfigError, match='set "weights"') as refused, host(tier):
        pass
    assert "\n" not in str(refused.value)


def test_a_store_that_cannot_take_a_chunk_is_refused_in_a_line(tier: dict[str, Any]) -> None:
    small = {**tier, "capacity": "128KiB"}
    with pytest.raises(ConfigError, match="a chunk has 8192 bytes") as refused, host(small):
        pass
    assert "\n" not in str(refused.value)


def test_an_option_the_backend_does_not_have_is_refused_by_name(tier: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="capacty"), host({**tier, "capacty": "1MB"}):
        pass


def test_this_vllm_is_supported() -> None:
    INTERFACE.require_supported(vllm.__version__)


@pytest.mark.parametrize("name", INTERFACE.signatures)
def test_the_signature_is_the_one_relied_on(name: str) -> None:
    found = INTERFACE.differences({**vars(offload), **vars(tiering)})
    assert [line for line in found if line.startswith((f"{name}(", f"{name} "))] == []


def test_the_configuration_is_one_that_vllm_can_write(tier: dict[str, Any]) -> None:
    config = offloading_config(tier, n_chunks=4)
    again = replace(config, extra_config=json.loads(json.dumps(dict(config.extra_config))))
    assert again == config
