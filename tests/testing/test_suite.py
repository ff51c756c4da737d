"""The ways to run the contract say the same, and cannot be silenced."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

import kvgraft_swa.plugin
from kvgraft import API_VERSION, ComponentMatch, ConfigError, Demand, Span, hookimpl
from kvgraft.packages.registry import load_plugin, select
from kvgraft_testing import CLAUSES, ComponentContract, Status, check_component
from kvgraft_testing.checking import Checker
from kvgraft_testing.machine import Drive, machine_for, search, setup_for
from kvgraft_testing.rules import RULES

from ..cli.refusals import refused
from ..commands import KVGRAFT, run, run_forked
from ..mutants.components import MUTANTS
from ..mutants.packages import paged
from ..packages.distributions import COMPONENT, Shelf

(FORGETFUL,) = (m for m in MUTANTS if m.name == "host hits are counted twice")


def test_a_failure_names_its_rule_and_the_others_are_decided() -> None:
    plugin = load_plugin("mutant", FORGETFUL.package.implementation("mutant"))
    checker = Checker(plugin, profile="dev")
    for ident, status in (
        ("A3-host-hits-are-counted-once", Status.FAILED),
        ("P7-unknown-options-are-refused", Status.PASSED),
        ("M5-a-match-is-never-lengthened", Status.NOT_APPLICABLE),
    ):
        assert checker.decide(ident).status is status, ident


@pytest.mark.parametrize(
    "idents",
    [
        ("A3-host-hits-are-counted-once", "P7-unknown-options-are-refused"),
        pytest.param(tuple(CLAUSES), marks=pytest.mark.long),
    ],
    ids=["two clauses", "every clause"],
)
def test_an_expected_failure_is_no_failure_and_an_expectation_that_is_not_met_is_one(
    idents: tuple[str, ...],
) -> None:
    plugin = load_plugin("mutant", FORGETFUL.package.implementation("mutant"))
    expected = {"A3": "known", "P7": "was broken once"}
    clauses = [CLAUSES[each] for each in idents]
    checker = Checker(plugin, None, "dev", expected, clauses=clauses)
    if len(idents) < len(CLAUSES):
        vars(checker.subject)["drive"] = lambda ignored: Drive(Counter(admitted=1))
    found = {result.clause: result.status for result in checker.run()}
    assert found["A3-host-hits-are-counted-once"] is Status.EXPECTED_FAILURE
    assert found["P7-expected"] is Status.UNEXPECTED_PASS
    assert Status.FAILED not in found.values()


def test_an_expectation_of_no_rule_is_refused() -> None:
    plugin = load_plugin("mutant", FORGETFUL.package.implementation("mutant"))
    with pytest.raises(ConfigError, match="'Z9' is no rule"):
        check_component("mutant", plugin=plugin, expected_failures={"Z9": "typo"})


@pytest.mark.parametrize("name", ["test_clause", "__test__", "helper"])
def test_a_contract_class_holds_data_only(name: str) -> None:
    with pytest.raises(TypeError, match=f"defines {name}; a contract class holds data only"):
        type("TestMine", (ComponentContract,), {"component": "mine", name: None})


REFUSED = {
    "window=abc": "'swa': option window='abc' is no number of tokens; write for example 4M",
    "device_tokens=1": "'swa': option device_tokens: 1 tokens make no page of 2; give 2 or more",
    "": "'nothing' is not installed; installed: ",
}
"""Outputs of `kvgraft check`, by option of `swa`, or for a missing component."""


@pytest.mark.parametrize(
    "option",
    [
        pytest.param(each, marks=pytest.mark.long if each == "device_tokens=1" else ())
        for each in REFUSED
    ],
)
def test_a_refusal_is_one_line_and_exits_with_2(option: str) -> None:
    given = ["swa", "--option", option] if option else ["nothing"]
    status, output, errors = refused({option: ["check", *given]})[option]
    assert (status, output) == (2, "")
    assert errors.startswith(f"kvgraft: component {REFUSED[option]}")
    assert errors.count("\n") == 1


GIVEN_WITH_THE_NAME: dict[tuple[str, ...], str] = {
    ("swa:n_layers=1", "--option", "window=0"): "component 'swa': option window='0': give",
    ("swa:window=4", "--option", "window=4"): "option 'window' of component 'swa' is given",
    ("swa:window",): "component 'swa:window': 'window' is not OPTION=VALUE; write for",
    (":window=4",): "component ':window=4' has no name; see `kvgraft components`",
    ("full:n_layers=3,layers=0,2",): "component 'full': option layers=['0', '2']: 2 layers named",
    ("full:layers=[0, 2],n_layers=3",): "component 'full': option layers=['0', '2']: 2 layers n",
    ("full:n_layers=2", "--option", "layers=[1]"): "component 'full': option layers=['1']: 1 lay",
}


REFUSED_ALIKE: dict[tuple[str, ...], str] = {
    ("swa:windw=3",): "component 'swa': no option 'windw'; did you mean 'window'? options: ",
    ("swa:window=0,n_layers=1",): "component 'swa': option window='0': give more than 0",
}


@pytest.mark.parametrize(
    "cases", [GIVEN_WITH_THE_NAME, pytest.param(REFUSED_ALIKE, marks=pytest.mark.long)]
)
def test_options_come_with_the_name_as_for_a_replay(cases: dict[tuple[str, ...], str]) -> None:
    outcomes = refused({" ".join(given): ["check", *given] for given in cases})
    for given, said in cases.items():
        status, output, errors = outcomes[" ".join(given)]
        assert (status, output) == (2, ""), given
        assert errors.startswith(f"kvgraft: {said}")
        assert errors.count("\n") == 1


SOUND = COMPONENT.format(name="thrown")
BROKEN = {
    "syntax error": (SOUND + "\ndef broken(:\n", "", "import failed: SyntaxError: "),
    "a reach of nothing": (
        SOUND.replace("Reach(Everything())", "Reach()"),
        "",
        "reach: no term given; ",
    ),
    "a reach of no term": (
        SOUND.replace("Reach(Everything())", "Reach(512)"),
        "",
        "reach: 512 is no term; ",
    ),
    "no reach": (
        SOUND.replace("Reach(Everything())", "None"),
        "",
        "create_component returned a Component whose reach is None",
    ),
    "building exits": (
        SOUND.replace("    planes =", "    raise SystemExit(3)\n    planes ="),
        "",
        "hook create_component raised SystemExit: 3",
    ),
    "building raises": (
        SOUND.replace("    planes =", "    1 / 0\n    planes ="),
        "",
        "hook create_component raised ZeroDivisionError: ",
    ),
    "declaring raises": (
        SOUND.replace("    return ComponentD", "    1 / 0\n    return ComponentD"),
        "",
        "hook declare_component raised ZeroDivisionError: ",
    ),
    "misspelt hook": (
        SOUND + "\n@hookimpl\ndef budget_contributions(component, query):\n    return None\n",
        "P6",
        "budget_contributions is no hook; did you mean budget_contribution?",
    ),
    "newer version": (SOUND.replace('"1.0"', '"1.9"'), "P3", "written for API 1.9, "),
}


LOAD_EACH = """
import json, sys
from kvgraft.errors import PluginError
from kvgraft.packages.registry import select
from kvgraft_testing import check_component
from kvgraft_testing.checking import unusable

APART = ("syntax_error", "building_exits")  # those in a process of their own, the others here

def answers(name):
    try:
        plugin = None if name in APART else select([name])[0]
    except PluginError as error:
        return [unusable(name, error)]
    return check_component(name, plugin=plugin, profile="dev")

print(json.dumps({name: [each.as_json() for each in answers(name)] for name in sys.argv[1:]}))
"""


@pytest.fixture(scope="module")
def unloadable(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By case, the results of `check_component` where every broken package is installed."""
    shelf = Shelf(tmp_path_factory.mktemp("unloadable"))
    names = {case: case.replace(" ", "_") for case in BROKEN}
    for case, name in names.items():
        shelf.put(f"kvgraft-{name}", BROKEN[case][0].replace("'thrown'", repr(name)), name=name)
    done = shelf.run("-c", LOAD_EACH, *names.values())
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    return {case: answers[name] for case, name in names.items()}


@pytest.mark.long
@pytest.mark.parametrize("case", BROKEN)
def test_a_component_that_cannot_be_loaded_or_built_is_one_failure_under_its_rule(
    unloadable: dict[str, list[dict[str, Any]]], case: str
) -> None:
    _, rule, said = BROKEN[case]
    (result,) = unloadable[case]
    assert (result["status"], result["rule"]) == ("failed", rule)
    assert said in result["evidence"]
    assert result["clause"] == (f"{rule}-loads" if rule else "loads")
    assert result["sentence"] == (RULES[rule] if rule else "The component can be loaded and built.")


def test_a_component_that_returns_nothing_fails_and_refuses_no_options() -> None:
    def create_component(options: Any, context: Any) -> None:
        return None

    package = SimpleNamespace(
        declare_component=kvgraft_swa.plugin.declare_component,
        create_component=hookimpl(create_component),
    )
    plugin = load_plugin("swa", package)
    (result,) = check_component("swa", plugin=plugin, options={"window": 8}, profile="dev")
    assert (result.clause, result.status) == ("loads", Status.FAILED)
    assert "create_component returned NoneType, not a Component" in result.evidence


@pytest.mark.parametrize(
    "given",
    [
        {"name": "nope"},
        {"profile": "slow"},
        {"options": ["window"]},
        {"expected_failures": {"Z9": "typo"}},
    ],
)
def test_bad_arguments_are_refused_before_a_process_is_started(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    def start(*command: object, **options: object) -> None:
        raise AssertionError(f"{command} was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(ConfigError):
        check_component(**{"name": "swa", **given})


MISTAKES = {
    "'nope'": "component 'nope' is not installed; installed: ",
    "'swa'; options = {'windw': 3}": "component 'swa': no option 'windw'; ",
    "'swa'; expected_failures = {'Z1': ''}": "expected failure 'Z1' is no rule ",
    "'swa'; expected_failures = {'M4'}": "expected_failures is {'M4'}; give rules with reasons",
    "'swa'; expected_failures = {'M4': ' '}": "expected failure 'M4': ' ' is no reason; say why",
    "'swa'; expected_failures = {'M4': None}": "expected failure 'M4': None is no reason; say why",
    "'swa'; expected_failures = 'M4'": "expected_failures is 'M4'; give rules with reasons",
    "'swa'; options = ['window']": "options are ['window']; give names with values",
    "'swa'; profile = 'slow'": "profile 'slow' is not one of dev, ci, nightly",
    "'swa'; profile = ['dev']": "profile ['dev'] is not one of dev, ci, nightly",
    "['swa']": "TestMine: component is ['swa']; name an installed one",
    "None": "TestMine: component is None; name an installed one",
    "'swa'; plugin = 'swa'": "TestMine: plugin is 'swa'; see kvgraft.load_plugin",
    "'thrown'": "component 'thrown': budget_contributions is no hook; did you mean ",
}


@pytest.mark.parametrize(
    ("processes", "mistakes"),
    [
        pytest.param([], ["'nope'", "None", "'swa'; options = ['window']"], id="some"),
        pytest.param([], list(MISTAKES), id="all", marks=pytest.mark.long),
        pytest.param(["-n", "2"], ["'nope'", "None"], id="xdist", marks=pytest.mark.long),
    ],
)
def test_a_mistake_in_a_contract_class_is_one_error_of_one_line(
    tmp_path: Path, processes: list[str], mistakes: list[str]
) -> None:
    shelf = Shelf(tmp_path)
    shelf.put("kvgraft-thrown", BROKEN["misspelt hook"][0])
    path = tmp_path / "test_contract.py"
    classes = "".join(
        f"class TestMine(ComponentContract):\n    component = {mistake}\nTest{number} = TestMine\n"
        for number, mistake in enumerate(mistakes)
    )
    text = f"from kvgraft_testing import ComponentContract\n{classes}del TestMine\n"
    path.write_text(text)
    run_pytest = shelf.start if processes else shelf.run
    done = run_pytest("-m", "pytest", "-q", "-p", "no:cacheprovider", *processes, str(path))
    assert f"{len(mistakes)} errors in " in done.stdout, done.stdout
    assert not re.search("passed|failed|skipped|Traceback", done.stdout)
    for mistake in mistakes:
        said = MISTAKES[mistake]
        assert sum(line.startswith(said) for line in done.stdout.splitlines()) == 1


@pytest.mark.long
def test_a_worker_loads_a_component_with_its_first_test_and_tells_once_that_it_cannot(
    tmp_path: Path,
) -> None:
    shelf = Shelf(tmp_path)
    shelf.put("kvgraft-thrown", BROKEN["misspelt hook"][0])
    (tmp_path / "test_contract.py").write_text(
        "from kvgraft_testing import ComponentContract\n"
        "class TestThrown(ComponentContract):\n    component = 'thrown'\n"
        "class TestFull(ComponentContract):\n    component = 'full'\n"
    )
    one = ("-n", "1", "-k", "TestThrown or P7-unknown", "-p", "no:cacheprovider")
    done = shelf.start("-m", "pytest", *one, str(tmp_path))
    counts = f"1 failed, {n_passed(done.stdout)} passed, {len(CLAUSES)} skipped"
    assert counts in done.stdout
    assert n_passed(done.stdout) > 0
    assert MISTAKES["'thrown'"] in done.stdout


def n_passed(output: str) -> int:
    return int(re.findall(r"(\d+) passed", output)[-1])


BORROWED = SOUND.replace("from kvgraft import ", "from kvgraft import API_VERSION, ").replace(
    'api_version="1.0"', "api_version=API_VERSION"
)


@pytest.mark.parametrize(
    ("source", "status"),
    [pytest.param(SOUND, "passed", marks=pytest.mark.long), (BORROWED, "failed")],
)
def test_a_version_taken_from_the_core_at_import_is_no_literal(
    tmp_path: Path, source: str, status: str
) -> None:
    shelf = Shelf(tmp_path)
    shelf.put("kvgraft-thrown", source)
    code = (
        "from kvgraft.packages.registry import select; from kvgraft_testing import CLAUSES\n"
        "from kvgraft_testing.checking import Checker\n"
        "found = Checker(select(['thrown'])[0]).check(CLAUSES['P3-the-api-version-is-a-literal'])\n"
        "print(found.status.value, found.evidence)"
    )
    done = shelf.run("-c", code)
    assert done.stdout.startswith(status), done
    if status == "failed":
        assert f"declares '{API_VERSION}', and '0.0' beside another core" in done.stdout


@pytest.mark.long  # the components' own contract classes ask it in every run
@pytest.mark.parametrize("name", ["swa", "mamba", "hisparse"])
def test_components_whose_hooks_are_asked_are_asked_longer_queries(name: str) -> None:
    checker = Checker(select([name])[0], profile="dev")
    found = checker.check(CLAUSES["P3-queries-may-grow"])
    hooks = {"mamba": Status.PASSED, "hisparse": Status.PASSED}
    assert found.status is hooks.get(name, Status.NOT_APPLICABLE)


READS_BY_PLACE: dict[str, dict[str, Callable[..., Any]]] = {
    "unpacks": {"budget_contribution": lambda component, query: _unpacked(*query)},
    "counts": {
        "finalize_match_result": lambda component, view: ComponentMatch(min(view[0], len(view) - 5))
    },
    "reads from the end": {
        "acquire_component_lock": lambda component, query: [Span(0, query[-2])],
        "release_component_lock": lambda component, segment: None,
    },
    "unpacks at the end of a transfer": {
        "build_hicache_transfers": lambda component, query: None,
        "commit_hicache_transfers": lambda component, query: _unpacked(*(*query[1:], *[0] * 5)),
        "abort_hicache_transfers": lambda component, query: None,
    },
}


def _unpacked(one: int, two: int, three: int, four: int, five: int, six: int, seven: int) -> None:
    """Takes seven values."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", READS_BY_PLACE)
def test_a_hook_that_reads_its_query_by_place_breaks_p3(how: str) -> None:
    plugin = load_plugin("mutant", paged(hooks=READS_BY_PLACE[how]).implementation("mutant"))
    found = Checker(plugin, profile="dev").check(CLAUSES["P3-queries-may-grow"])
    assert found.status is Status.FAILED
    assert re.search("one field more", found.evidence)


def test_an_error_about_missing_slots_names_the_admitted_demand() -> None:
    def keeps_nothing_for_later(component: Any, query: Any) -> Demand:
        held = -(-query.computed // query.page_size)
        pages = -(-(query.computed + query.chunk) // query.page_size) - held
        return Demand(pages + query.host_slots, 0)

    package = paged(hooks={"budget_contribution": keeps_nothing_for_later})
    plugin = load_plugin("mutant", package.implementation("mutant"))
    found = search(machine_for(setup_for([plugin])), settings(derandomize=True, max_examples=50))
    assert found is not None
    assert found.violation.rule == "A7"
    assert re.search(r"admitted with \d+ now \+ 0 later of mutant", found.violation.evidence)


def test_an_extra_that_is_missing_is_named_with_the_way_to_get_it() -> None:
    for missing in ("hypothesis", "pytest"):
        code = f"import sys; sys.modules[{missing!r}] = None; import kvgraft_testing"
        done = run(sys.executable, "-c", code)
        assert done.stderr.splitlines()[-1] == (
            f"ModuleNotFoundError: kvgraft_testing needs {missing}; in a clone of kvgraft, "
            "pip install -r plugins/testing/requirements.txt"
        )
        assert "During handling" not in done.stderr


@pytest.mark.long
def test_a_terminal_shows_progress_and_a_pipe_does_not() -> None:
    command = [KVGRAFT, "check", "swa", "--option", "windw=3"]
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        subprocess.run(command, stderr=theirs, stdout=subprocess.DEVNULL, timeout=60, check=False)
        os.close(theirs)
        shown = terminal.read(1000)
    assert b"driving 'swa' through the core" in shown
    assert b"driving" not in subprocess.run(command, capture_output=True, check=False).stderr


@pytest.mark.long
def test_the_command_lists_a_line_per_clause_and_json_has_them_all() -> None:
    done = run(KVGRAFT, "check", "full", "--profile", "dev", "--json")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert {result["clause"] for result in found} == set(CLAUSES)
    assert {result["status"] for result in found} == {"passed", "not applicable"}


REPORTED = {
    "here": """
from collections import Counter
from kvgraft.packages.registry import select
from kvgraft_testing import ComponentContract
from kvgraft_testing.machine import Drive, machine_for, search, setup_for
from kvgraft_testing.subject import Subject

Subject.drive = lambda self, ignored: Drive(Counter(admitted=1))

class TestFull(ComponentContract):
    plugin = select(["full"])[0]
    expected_failures = {"P7": "it is not"}
""",
    "in a process": """
from kvgraft_testing import ComponentContract

class TestFull(ComponentContract):
    component = "full"
    expected_failures = {"P7": "it is not"}
""",
}
"""Contract classes with an expectation that is not met; the first drives nothing."""


SLOW = {
    "conftest.py": """
import os
from kvgraft_testing import working

working.LINE_EVERY_S = 0.01

def pytest_configure(config):
    os.dup2(os.open("errors", os.O_CREAT | os.O_RDWR), 2)
""",
    "test_contract.py": REPORTED["here"]
    .replace(
        "Subject.drive = lambda self, ignored: ",
        """
import os
import time

def drive(self, ignored):
    while not os.path.getsize("errors"):
        time.sleep(0.01)
    return """,
    )
    .replace("\nclass TestFull", "\nSubject.drive = drive\n\nclass TestFull"),
}
"""A contract class whose state machine goes on until a line is written."""


def test_pytest_says_which_clause_takes_long(tmp_path: Path) -> None:
    for name, text in SLOW.items():
        (tmp_path / name).write_text(text)
    options = ["-q", "-p", "no:cacheprovider", "--contract-profile=dev", "-k", "driven"]
    done = run_forked("-m", "pytest", *options, "-o", "timeout=60", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    said = (tmp_path / "errors").read_text().splitlines()
    line = r"kvgraft: running test_contract\.py::TestFull::test_clause\[\w+-driven\], \d+ s so far"
    assert re.fullmatch(line, said[1])


@pytest.mark.parametrize("where", ["here", pytest.param("in a process", marks=pytest.mark.long)])
def test_pytest_writes_every_result_to_the_report(tmp_path: Path, where: str) -> None:
    (tmp_path / "test_contract.py").write_text(REPORTED[where])
    report = tmp_path / "report.json"
    options = ["-q", "-p", "no:cacheprovider", "--contract-profile=dev", "-k", "P7 or expected"]
    done = run_forked("-m", "pytest", *options, f"--contract-report={report}", cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    assert "expected to fail (it is not), and kept; drop the expectation" in done.stdout
    found = json.loads(report.read_text())
    bad = [result["clause"] for result in found if result["status"] == "unexpected pass"]
    assert bad == ["P7-expected"]
    assert len(found) > 1
