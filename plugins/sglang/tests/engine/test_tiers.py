"""The suite for tiers on `HiCacheStorage`: SGLang's own file backend, worse ones, and ours."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from kvgraft_testing.result import Result, Status
from kvgraft_testing.tiers import CheckedTier, check_tier

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None,
    reason="SGLang's files are not at hand: make test-engine-files",
)

AT = {"file_storage_path": "{directory}"}
FILE_FAILS = {"O2-flipped", "O2-zeroed", "O2-exchanged", "O8-dtype", "O8-layout"}
"""Clauses that SGLang's file backend fails: it has no checksums, and its names have no layout."""


def clauses(results: list[Result], status: Status) -> set[str]:
    return {each.clause for each in results if each.status is status}


@pytest.mark.long
def test_our_backend_raises_no_alarm() -> None:
    options = {
        "path": "{directory}",
        "capacity": "{capacity}",
        "weights": "one",
        "interface_v1": 1,
    }
    results = check_tier("kvgraft_sglang.backend:KvgraftStorage", options, durable=True)
    assert [each for each in results if each.bad] == []
    assert clauses(results, Status.NOT_APPLICABLE) == {"O6-hanging-file", "O11-drained"}


@pytest.mark.long
def test_sglangs_file_backend_fails_what_it_does_not_check() -> None:
    options = {**AT, "max_size": "{capacity}"}
    target = "sglang.srt.mem_cache.hicache_storage:HiCacheFile"
    results = check_tier(target, options, durable=True)
    assert clauses(results, Status.FAILED) == FILE_FAILS
    assert clauses(results, Status.NOT_APPLICABLE) == {"O11-drained"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("defect", "clause"),
    [
        *(("Nameless", f"O9-{name}") for name in ("model", "rank", "n-ranks", "stage")),
        ("Late", "O1-round-trip"),
    ],
)
def test_a_backend_with_one_more_defect_is_found(defect: str, clause: Any) -> None:
    tier = CheckedTier(f"plugins.sglang.tests.bad_backends:{defect}", AT)
    try:
        assert tier.decide(clause).status is Status.FAILED
    finally:
        tier.close()
