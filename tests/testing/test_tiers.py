"""The suite for tiers, on stores; plugins/vllm and plugins/sglang run it on engines' tiers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvgraft import ConfigError
from kvgraft_testing.result import Status
from kvgraft_testing.tiers import TIER_RULES, CheckedTier, check_tier

from ..commands import KVGRAFT, ROOT, run

STORE = "file:{directory}?capacity={capacity}"
AT = {"path": "{directory}"}

DEFECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Forgetful": ("O1-round-trip", AT),
    "Unbounded": ("O5-capacity", {**AT, "capacity": "{capacity}"}),
    "Scratch": ("O7-restart", AT),
    "LeavesALock": ("O11-opened-again", AT),
}


@pytest.mark.long
def test_our_store_raises_no_alarm() -> None:
    results = check_tier(STORE, durable=True)
    assert [each for each in results if each.bad] == []
    undecided = {each.clause for each in results if each.status is Status.NOT_APPLICABLE}
    assert undecided == {"O6-hanging-file", "O11-drained"}
    assert {each.rule for each in results} == set(TIER_RULES)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_store_with_a_defect_is_found(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    clause, options = DEFECTS[defect]
    tier = CheckedTier(f"tests.testing.bad_stores:{defect}", options, durable=True)
    try:
        assert tier.decide(clause).status is Status.FAILED
        assert tier.decide("O10-jobs-end-once").status is Status.PASSED
    finally:
        tier.close()


REFUSED = {
    "nothing": "neither PACKAGE.MODULE:CLASS nor a store's URL",
    "no.such:Tier": "module no.such cannot be imported: No module named 'no'",
    "kvgraft_file:Missing": "module kvgraft_file has no class Missing",
    "kvgraft_file:FileOptions": "it extends none of vllm.v1.kv_offload.tiering.base.",
    "file:{directory}?capacty=1": "no option 'capacty'; did you mean 'capacity'?",
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("target", REFUSED)
def test_a_name_that_is_no_tier_is_refused_in_a_line(target: str) -> None:
    with pytest.raises(ConfigError, match="tier ") as refused:
        CheckedTier(target)
    assert REFUSED[target] in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_command_prints_a_line_per_clause_and_fails_with_one_that_fails() -> None:
    asked = ("--clause", "O1-round-trip", "--clause", "O1-absent")
    done = run(KVGRAFT, "check-tier", STORE, *asked)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        *("kvgraft's", "StorageBackend,", "kvgraft", "0.1.0", "passed", "O1-round-trip"),
        *("passed", "O1-absent", "tier", f"'{STORE}':", "2", "passed"),
    ]
    bad = ("tests.testing.bad_stores:Forgetful", "--option", "path={directory}")
    done = run(KVGRAFT, "check-tier", *bad, *asked, "--json", cwd=ROOT, PYTHONPATH=str(ROOT))
    assert done.returncode == 1
    told = {each["clause"]: each for each in json.loads(done.stdout)}
    assert told["O1-absent"]["status"] == "passed"
    assert told["O1-round-trip"]["evidence"] == (
        "8 pages were stored and looked up: 0 of 8 pages are found"
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--clause", "O99"), "--clause 'O99' is none of O1-round-trip"),
        (("--option", "root_dir"), "--option 'root_dir' is not NAME=VALUE"),
        (("--option", "a=1", "--option", "a=2"), "--option 'a' is given twice; keep one"),
    ],
)
def test_arguments_are_refused_in_a_line(arguments: tuple[str, ...], said: str) -> None:
    done = run(KVGRAFT, "check-tier", STORE, *arguments)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr
