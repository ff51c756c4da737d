"""`kvgraft replay --storage`: the next process finds the data that one stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from kvgraft_replay.report.schema import StorageCounts, StoreContents
from tests.commands import KVGRAFT, run_forked

Replay = Callable[..., dict[str, Any]]

CHAT = ("--synthetic", "chat", "--requests", "40", "--page-size", "32")
SMALL = ("--device-tokens", "16000", "--host-tokens", "20000")


@pytest.fixture
def replayed(tmp_path: Path) -> Replay:
    """Replay over a store in a process of its own, and return the JSON result."""
    store = tmp_path / "store"
    store.mkdir()

    def _replayed(*arguments: object) -> dict[str, Any]:
        path = tmp_path / "result.json"
        url = f"file:{store}?capacity=256MiB"
        given = map(str, (*arguments, "--json", path))
        done = run_forked(KVGRAFT, "replay", *CHAT, *SMALL, "--storage", url, *given)
        assert (done.returncode, done.stderr) == (0, "")
        result = json.loads(path.read_text())
        assert str(result["storage"]["prefetches"]["tokens"]) in done.stdout.replace(",", "")
        return result  # type: ignore[no-any-return]

    return _replayed


def test_a_second_process_hits_data_that_the_first_one_stored(
    replayed: Replay, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    first, second = replayed(), replayed("--html", page)
    assert sum(first["evictions"]["full"]["host"].values()) > 0, "nothing left the host"
    assert second["hit_tokens"]["storage"] > first["hit_tokens"]["storage"]
    assert second["token_hit_rate"] > first["token_hit_rate"]
    assert second["payload_mismatches"] == 0
    assert second["payloads_verified"] > 0
    assert "fetched from storage" in page.read_text(encoding="utf-8")


def test_the_storage_part_of_the_result_has_the_fields_its_schema_names(replayed: Replay) -> None:
    storage = replayed()["storage"]
    assert storage.keys() == get_type_hints(StorageCounts).keys()
    assert storage["after"].keys() == get_type_hints(StoreContents).keys()
    assert storage["after"]["capacity_bytes"] == 256 << 20
    assert storage["after"]["details"]["segments"] >= 1


def test_evictions_of_a_small_store_are_in_the_result_and_the_report(tmp_path: Path) -> None:
    store, path, page = tmp_path / "store", tmp_path / "result.json", tmp_path / "report.html"
    store.mkdir()
    url = f"file:{store}?capacity=128KiB"
    reports = ("--json", str(path), "--html", str(page))
    done = run_forked(KVGRAFT, "replay", *CHAT, *SMALL, "--storage", url, *reports)
    assert (done.returncode, done.stderr) == (0, "")
    after = json.loads(path.read_text(encoding="utf-8"))["storage"]["after"]
    assert after["bytes"] <= 128 << 10
    assert after["details"]["evicted"] > 0
    told = f"evicted\u00a0{after['details']['evicted']}"
    assert told in page.read_text(encoding="utf-8").replace(",", "")


def test_options_reach_the_storage_tier(replayed: Replay) -> None:
    settings = replayed(
        *("--store-policy", "write-through", "--store-memory", "1MiB"),
        *("--prefetch-policy", "timeout", "--prefetch-timeout", "0.5"),
        *("--prefetch-threshold", "640", "--prefetch-memory", "2MB"),
    )["settings"]["storage"]
    assert settings["store"] == "write-through"
    assert settings["prefetch"] == "timeout"
    assert settings["store_nbytes"] == 1 << 20
    assert settings["prefetch_nbytes"] == 2_000_000
    assert settings["prefetch_timeout_s"] == 0.5
    assert settings["threshold_tokens"] == 640
