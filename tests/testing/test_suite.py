"""The ways to run the contract say the same, and cannot be silenced."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvgraft import ConfigError
from kvgraft.registry import load_plugin
from kvgraft.testing import CLAUSES, ComponentContract, Status, check_component

from ..commands import KVGRAFT, run
from ..mutants.components import MUTANTS

(FORGETFUL,) = (m for m in MUTANTS if m.name == "host hits are counted twice")


def results_of(**expected: str) -> dict[str, Status]:
    plugin = load_plugin("mutant", FORGETFUL.package.implementation("mutant"))
    found = check_component("mutant", plugin=plugin, profile="dev", expected_failures=expected)
    return {result.clause: result.status for result in found}


def test_a_failure_names_its_rule_and_the_others_are_decided() -> None:
    found = results_of()
    assert found["A3-host-hits-are-counted-once"] is Status.FAILED
    assert found["P7-unknown-options-are-refused"] is Status.PASSED
    assert found["M5-a-match-is-never-lengthened"] is Status.NOT_APPLICABLE


def test_an_expected_failure_is_no_failure() -> None:
    found = results_of(A3="known")
    assert found["A3-host-hits-are-counted-once"] is Status.EXPECTED_FAILURE
    assert Status.FAILED not in found.values()


def test_an_expectation_that_is_not_met_fails() -> None:
    assert results_of(A3="known", P7="was broken once")["P7-expected"] is Status.UNEXPECTED_PASS


def test_an_expectation_of_no_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="'Z9' is no rule"):
        results_of(Z9="typo")


@pytest.mark.parametrize("name", ["test_clause", "__test__", "helper"])
def test_a_contract_class_holds_data_only(name: str) -> None:
    with pytest.raises(TypeError, match=f"defines {name}; a contract class holds data only"):
        type("TestMine", (ComponentContract,), {"component": "mine", name: None})


def test_an_unknown_component_is_one_line_and_exit_status_2() -> None:
    done = run(KVGRAFT, "check", "nothing")
    assert done.returncode == 2
    assert done.stderr.startswith("kvgraft: component 'nothing' is not installed; installed: ")


def test_the_command_lists_a_line_per_clause_and_json_has_them_all() -> None:
    done = run(KVGRAFT, "check", "full", "--profile", "dev", "--json")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert {result["clause"] for result in found} == set(CLAUSES)
    assert {result["status"] for result in found} == {"passed", "not applicable"}


def test_pytest_writes_every_result_to_the_report(tmp_path: Path) -> None:
    path = tmp_path / "test_contract.py"
    path.write_text(
        "from kvgraft.testing import ComponentContract\n\n"
        "class TestFull(ComponentContract):\n"
        "    component = 'full'\n"
        "    expected_failures = {'P7': 'it is not'}\n"
    )
    report = tmp_path / "report.json"
    options = ["-q", "-p", "no:cacheprovider", "--contract-profile=dev"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--contract-report={report}", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "expected to fail (it is not), and kept; drop the expectation" in done.stdout
    found = json.loads(report.read_text())
    bad = [result["clause"] for result in found if result["status"] == "unexpected pass"]
    assert bad == ["P7-expected"]
