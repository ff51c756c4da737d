"""Long sessions in pools of few of them: every request runs, whatever the options (A7, A8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvgraft import WritePolicy
from kvgraft_replay.detect import open_workload
from kvgraft_replay.payload import Verify
from kvgraft_replay.replay import ReplaySettings, replay
from kvgraft_replay.report.schema import ReplayResult
from kvgraft_replay.synthetic import synthetic_workload
from kvgraft_replay.workload import Workload

SETS: dict[str, dict[str, Any]] = {
    "full": {"full": {}},
    "full+swa": {"full": {}, "swa": {"window": 512}},
    "full+swa+mamba": {"full": {}, "swa": {"window": 512}, "mamba": {}},
}

RECORDED = Path(__file__).parents[4] / "shared" / "traces" / "claude_code.jsonl.gz"
"""A recorded trace, where there is one beside the repository."""

every_option = pytest.mark.parametrize(
    ("name", "write_policy", "policy"),
    [
        (name, write_policy, policy)
        for name in SETS
        for write_policy in WritePolicy
        for policy in ("density", "lru")
    ],
)


def replayed(workload: Workload, users: int, limit: int | None, **cache: Any) -> ReplayResult:
    settings = ReplaySettings(cache=cache, users=users, limit=limit, verify=Verify.OFF)
    result = replay(workload, settings)
    assert result["out_of_memory"] == result["ledger_violations"] == 0, result["first_problem"]
    assert result["served"] + result["rejections"] == result["requests"]
    assert result["hit_tokens"]["host"] > 0
    return result


@pytest.mark.one_in(6)
@every_option
def test_long_sessions_never_stall_a_cache_that_holds_few(
    name: str, write_policy: WritePolicy, policy: str
) -> None:
    replayed(
        synthetic_workload("agents", requests=40, seed=0),
        users=4,
        limit=None,
        components=SETS[name],
        device_tokens=40_000,
        host_tokens=120_000,
        write_policy=write_policy,
        policy=policy,
    )


@pytest.mark.long
@pytest.mark.skipif(not RECORDED.exists(), reason=f"needs the recorded trace {RECORDED.name}")
@every_option
def test_recorded_sessions_of_agents_never_stall(
    name: str, write_policy: WritePolicy, policy: str
) -> None:
    replayed(
        open_workload(RECORDED),
        users=8,
        limit=400,
        components=SETS[name],
        device_tokens=250_000,
        host_tokens=2_000_000,
        write_policy=write_policy,
        policy=policy,
    )
