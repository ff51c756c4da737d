"""The suite for tiers finds faults in a copy of vLLM's own `fs` tier, and none in ours."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM's files are not at hand: make test-engine-files")

from plugins.vllm.tests.planted import FAULTS, Edit, plant

from kvgraft_testing.result import Status
from kvgraft_testing.tiers import CheckedTier, check_tier

UNCHECKED = {"O2-flipped", "O2-zeroed", "O2-exchanged"}
"""Clauses that vLLM's `fs` tier fails: its files have no checksums."""


@contextmanager
def copy_of_fs(
    place: Path, monkeypatch: pytest.MonkeyPatch, edits: list[Edit], options: Mapping[str, object]
) -> Iterator[CheckedTier]:
    name = plant(place, edits)
    paths = [str(place), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    tier = CheckedTier(name, {"root_dir": "{directory}", **options}, durable=True)
    try:
        yield tier
    finally:
        tier.close()


@pytest.mark.one_in(29)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edits, clause, options = FAULTS[fault]
    with copy_of_fs(tmp_path, monkeypatch, edits, options) as tier:
        result = tier.decide(clause)
    assert result.status is Status.FAILED, result.evidence


@pytest.mark.long
def test_an_unchanged_copy_fails_nothing_but_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with copy_of_fs(tmp_path, monkeypatch, [], {}) as tier:
        results = [tier.decide(ident) for ident in tier.idents]
    assert {each.clause for each in results if each.bad} == UNCHECKED
    assert {each.clause for each in results} == UNCHECKED | {
        clause for _, clause, _ in FAULTS.values()
    }


@pytest.mark.long
def test_our_tier_raises_no_alarm() -> None:
    options = {"path": "{directory}", "capacity": "{capacity}", "weights": "one"}
    results = check_tier("kvgraft_vllm.tier:KvgraftTier", options, durable=True)
    assert [each for each in results if each.bad] == []
    undecided = {each.clause for each in results if each.status is Status.NOT_APPLICABLE}
    assert undecided == {"O6-hanging-file"}
