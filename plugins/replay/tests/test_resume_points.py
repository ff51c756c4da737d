"""A replay's counts of resume points agree with the cache's."""

from __future__ import annotations

from typing import Any

import pytest

from kvgraft_replay.engine import EngineModel
from kvgraft_replay.payload import Verify
from kvgraft_replay.replay import ReplaySettings, replay
from kvgraft_replay.report import ReplayResult
from kvgraft_replay.synthetic import synthetic_workload

ALL = {"full": {}, "swa": {"window": 512}, "mamba": {"states": 48}}
KINDS = {"repeat", "prompt end", "branch", "end", "asked", "grid"}


def replayed(components: dict[str, Any], **settings: Any) -> ReplayResult:
    load = synthetic_workload("rag", requests=60, seed=3)
    cache = {"components": components, "device_tokens": 60_000, **settings}
    model = EngineModel(chunk_tokens=2048)
    return replay(load, ReplaySettings(cache, users=4, model=model, verify=Verify.OFF))


@pytest.mark.parametrize("names", [("full", "swa"), ("full", "mamba"), ("full", "swa", "mamba")])
def test_points_are_made_used_and_lost(names: tuple[str, ...]) -> None:
    result = replayed({name: ALL[name] for name in names})
    points = result["resume_points"]
    assert points is not None
    for counts in (points["made"], points["skipped"], points["used"], points["lost"]):
        assert set(counts) == KINDS
    assert points["made"]["repeat"] > 0
    assert sum(points["made"].values()) > sum(points["lost"].values()) > 0
    assert 0 < sum(points["used"].values()) <= result["admissions"]
    assert result["evictions"][names[-1]]["device"]


@pytest.mark.parametrize("names", [("full", "swa"), ("full", "swa", "mamba")])
def test_slots_in_the_tree_are_kept_or_left_behind(names: tuple[str, ...]) -> None:
    result = replayed({name: ALL[name] for name in names})
    points = result["resume_points"]
    assert points is not None
    assert set(points["slots"]) == set(names) - {"full"}
    at_the_end = result["timeline"][-1]["occupancy"]
    for name, slots in points["slots"].items():
        pool = at_the_end[name]["device"]
        assert slots["kept"] + slots["left_behind"] == pool["evictable"] + pool["pinned"]
    if "mamba" not in names:
        assert points["slots"]["swa"]["left_behind"] > 0


def test_a_state_without_a_slot_is_skipped_and_counted() -> None:
    result = replayed({"full": {}, "mamba": {"states": 3}})
    points = result["resume_points"]
    assert points is not None
    assert sum(points["skipped"].values()) > 0


def test_full_attention_alone_has_no_resume_points() -> None:
    assert replayed({"full": {}})["resume_points"] is None
