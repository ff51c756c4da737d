"""Packages are found by entry point and refused one by one (P1 to P8).

Every case is a distribution on a path of its own, looked at by another process.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvgraft.contract import API_VERSION, check_api_version
from kvgraft.errors import ConfigError, PluginError
from kvgraft.packages.registry import expect_installed

from ..commands import KVGRAFT
from .distributions import COMPONENT, Shelf

SOUND = COMPONENT.format(name="thrown")
INSTALLED = {"full", "swa", "mamba", "hisparse"}


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def test_a_distribution_is_found_by_its_entry_point_and_gone_when_removed(shelf: Shelf) -> None:
    shelf.put("kvgraft-thrown", SOUND)
    found = shelf.discovered()
    assert found["thrown"] == ["kvgraft-thrown", "2.1", None]
    assert found.keys() >= INSTALLED
    shutil.rmtree(shelf.directory / "kvgraft_thrown-2.1.dist-info")
    assert "thrown" not in shelf.discovered()


def test_a_leftover_dist_info_without_metadata_hides_nothing(shelf: Shelf, tmp_path: Path) -> None:
    shelf.put("kvgraft-thrown", SOUND)
    (tmp_path / "kvgraft_thrown-1.0.dist-info").mkdir()
    assert shelf.discovered()["thrown"] == ["kvgraft-thrown", "2.1", None]


def test_a_found_component_opens_a_cache(shelf: Shelf) -> None:
    shelf.put("kvgraft-thrown", SOUND)
    code = """
from kvgraft import Cache, TokenKey
cache = Cache.open(["thrown", "full"], page_size=4, device_tokens=64)
request = cache.begin(TokenKey(range(8)))
assert cache.admit(request).admitted
assert cache.allocate(request, 8)
cache.computed(request, 8)
print(cache.finish(request), cache.begin(TokenKey(range(9))).anchor_tokens)
"""
    done = shelf.run("-c", code)
    assert (done.stdout, done.stderr) == ("8 8\n", "")


@pytest.mark.rule("P4")
def test_two_distributions_of_one_name_are_refused_and_both_named(shelf: Shelf) -> None:
    shelf.put("kvgraft-thrown", SOUND)
    shelf.put("thrown-fork", SOUND)
    assert shelf.problem() == "published by kvgraft-thrown and thrown-fork; uninstall all but one"
    assert all(shelf.discovered()[name][2] is None for name in INSTALLED)


BROKEN = {
    "import fails": ("raise RuntimeError('no luck')", "import failed: RuntimeError: no luck"),
    "import exits": ("raise SystemExit(3)", "import failed: SystemExit: 3"),
    "module missing": (None, "import failed: ModuleNotFoundError"),
    "not a component": ("x = 1", "declare_component is missing; every component implements it"),
    "no create_component": (
        SOUND.replace("@hookimpl\ndef create_component", "def build"),
        "create_component is missing; every component implements it",
    ),
    "unmarked override": (
        SOUND + "\ndef budget_contribution(component, query):\n    return None\n",
        "budget_contribution is not marked with @hookimpl, so it would never run",
    ),
    "misspelt hook": (
        SOUND + "\n@hookimpl\ndef budget_contributions(component, query):\n    return None\n",
        "budget_contributions is no hook; did you mean budget_contribution?",
    ),
    "hook of another kind": (
        SOUND + "\n@hookimpl\ndef paint(component, query):\n    return None\n",
        "paint is no hook; hooks are declare_component, create_component, ",
    ),
    "syntax error": (SOUND + "\ndef broken(:\n", "import failed: SyntaxError: "),
    "argument missing": (
        SOUND + "\n@hookimpl\ndef budget_contribution(query):\n    return None\n",
        "budget_contribution takes (query); it must take (component, query)",
    ),
    "argument misspelt": (
        SOUND + "\n@hookimpl\ndef finalize_match_result(component, match):\n    return None\n",
        "finalize_match_result takes (component, match); it must take (component, view)",
    ),
    "arguments swapped": (
        SOUND + "\n@hookimpl\ndef budget_contribution(query, component):\n    return None\n",
        "budget_contribution takes (query, component); it must take (component, query)",
    ),
    "lock without release": (
        SOUND + "\n@hookimpl\ndef acquire_component_lock(component, query):\n    return None\n",
        "acquire_component_lock is implemented without its inverse release_component_lock",
    ),
    "transfers without abort": (
        SOUND
        + "\n@hookimpl\ndef build_hicache_transfers(component, query):\n    return None\n"
        + "\n@hookimpl\ndef commit_hicache_transfers(component, query):\n    return None\n",
        "build_hicache_transfers is implemented without its inverse abort_hicache_transfers",
    ),
    "release without lock": (
        SOUND + "\n@hookimpl\ndef release_component_lock(component, segment):\n    return None\n",
        "release_component_lock is implemented without acquire_component_lock, which it undoes",
    ),
    "argument by keyword": (
        SOUND + "\n@hookimpl\ndef budget_contribution(component, *, query):\n    return None\n",
        "budget_contribution takes (component, *, query); it must take (component, query)",
    ),
    "argument by position": (
        SOUND + "\n@hookimpl\ndef budget_contribution(component, query, /):\n    return None\n",
        "budget_contribution takes (component, query, /); it must take (component, query)",
    ),
    "arguments of any number": (
        SOUND + "\n@hookimpl\ndef budget_contribution(*component, **query):\n    return None\n",
        "budget_contribution takes (*component, **query); it must take (component, query)",
    ),
    "coroutine": (
        SOUND + "\n@hookimpl\nasync def budget_contribution(component, query):\n    return None\n",
        "budget_contribution is a coroutine or a generator; a hook is called and answers at once",
    ),
    "generator": (
        SOUND + "\n@hookimpl\ndef budget_contribution(component, query):\n    yield\n",
        "budget_contribution is a coroutine or a generator; a hook is called and answers at once",
    ),
    "wrapper": (
        SOUND
        + "\n@hookimpl(wrapper=True)\ndef budget_contribution(component, query):\n    yield\n",
        "budget_contribution is marked @hookimpl(wrapper=...); only observers wrap hooks",
    ),
    "old wrapper": (
        SOUND
        + "\n@hookimpl(hookwrapper=True)\ndef budget_contribution(component, query):\n    yield\n",
        "budget_contribution is marked @hookimpl(hookwrapper=...); only observers wrap",
    ),
    "optional hook": (
        SOUND
        + "\n@hookimpl(optionalhook=True)\ndef budget_contributions(component, query):\n    pass\n",
        "budget_contributions is marked @hookimpl(optionalhook=...); a hook that the core does not",
    ),
    "two functions for one hook": (
        SOUND
        + "\n@hookimpl\ndef budget_contribution(component, query):\n    return None\n"
        + "\n@hookimpl(specname='budget_contribution')\ndef weigh(component, query):\n    pass\n",
        "weigh is marked @hookimpl(specname=...); give the function the hook's name",
    ),
    "declaration exits": (
        SOUND.replace("    return ComponentD", "    raise SystemExit(3)\n    return ComponentD"),
        "hook declare_component raised SystemExit: 3",
    ),
    "declaration raises": (
        SOUND.replace("    return ComponentDeclaration(", "    1 / 0\n    ComponentDeclaration("),
        "hook declare_component raised ZeroDivisionError: division by zero",
    ),
    "declaration of another type": (
        SOUND.replace("    return ComponentDeclaration(", "    return dict("),
        "declare_component returned dict, not a ComponentDeclaration",
    ),
    "another name": (
        COMPONENT.format(name="other"),
        "declares the name 'other'; entry point and name must agree",
    ),
    "newer minor version": (
        SOUND.replace('"1.0"', '"1.9"'),
        f"written for API 1.9, this core has API {API_VERSION}",
    ),
    "newer major version": (
        SOUND.replace('"1.0"', '"2.0"'),
        f"written for API 2.0, this core has API {API_VERSION}",
    ),
    "older major version": (
        SOUND.replace('"1.0"', '"0.9"'),
        f"written for API 0.9, this core has API {API_VERSION}",
    ),
    "garbage version": (
        SOUND.replace('"1.0"', '"latest"'),
        "API version 'latest' is not MAJOR.MINOR; write a literal such as '1.1'",
    ),
    "version that is a number": (
        SOUND.replace('"1.0"', "1.0"),
        "API version 1.0 is not MAJOR.MINOR",
    ),
    "unknown capability": (
        SOUND.replace(
            "options=ComponentOptions,",
            "options=ComponentOptions, capabilities=frozenset({'time_travel'}),",
        ),
        "unknown capabilities ['time_travel']; known are ['copy_on_write', 'host_mirror']",
    ),
    "options of no model": (
        SOUND.replace("options=ComponentOptions,", "options=dict,"),
        "options must be a pydantic model, not <class 'dict'>",
    ),
    "options that are no type": (
        SOUND.replace("options=ComponentOptions,", "options={},"),
        "options must be a pydantic model, not {}",
    ),
    "options that ignore unknown fields": (
        SOUND.replace("options=ComponentOptions,", "options=Loose,")
        + "\nfrom pydantic import BaseModel\nclass Loose(BaseModel):\n    x: int = 1\n",
        "Loose must forbid unknown fields: extra='forbid'",
    ),
}


@pytest.fixture(scope="module")
def full_of_broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str | None]]:
    """The packages found where every broken package is installed at once."""
    shelf = Shelf(tmp_path_factory.mktemp("broken"))
    for case, (source, _) in BROKEN.items():
        name = case.replace(" ", "_")
        shelf.put(f"kvgraft-{name}", (source or "").replace("'thrown'", repr(name)), name=name)
        if source is None:
            (shelf.directory / f"kvgraft_{name}.py").unlink()
    return shelf.discovered()


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_package_is_reported_with_its_reason_in_one_line(
    full_of_broken: dict[str, list[str | None]], case: str
) -> None:
    problem = full_of_broken[case.replace(" ", "_")][2]
    assert problem is not None
    assert BROKEN[case][1] in problem
    assert "\n" not in problem


def test_all_broken_packages_together_leave_the_sound_ones_alone(
    full_of_broken: dict[str, list[str | None]],
) -> None:
    assert {name for name, found in full_of_broken.items() if found[2] is None} == INSTALLED


def test_asked_for_a_broken_package_is_an_error_and_others_still_work(shelf: Shelf) -> None:
    shelf.put("kvgraft-thrown", "raise RuntimeError('no luck')")
    code = (
        "from kvgraft.packages.registry import select; select(['full', 'swa']); select(['thrown'])"
    )
    done = shelf.run("-c", code)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "kvgraft.errors.PluginError: component 'thrown': import failed: RuntimeError: no luck"
    )


def test_the_command_lists_a_broken_package_as_broken_with_its_reason(shelf: Shelf) -> None:
    shelf.put("kvgraft-thrown", "raise RuntimeError('no luck')")
    listed = shelf.run(KVGRAFT, "components", "--json")
    rows = {row["name"]: row for row in json.loads(listed.stdout)}
    assert rows["thrown"]["status"] == "import failed: RuntimeError: no luck"
    assert {name for name, row in rows.items() if row["status"] == "ok"} == INSTALLED
    table = shelf.run(KVGRAFT, "components")
    assert table.returncode == 0
    assert "thrown: import failed: RuntimeError: no luck" in table.stdout


def test_a_missing_component_is_an_error_that_lists_installed_ones(shelf: Shelf) -> None:
    done = shelf.run("-c", "from kvgraft.packages.registry import select; select(['sinks'])")
    assert (
        "component 'sinks' is not installed; installed: full, hisparse, mamba, swa; "
        in (done.stderr.splitlines()[-1])
    )


def test_a_component_that_is_nearly_named_is_meant() -> None:
    with pytest.raises(ConfigError, match="'ful' is not installed; did you mean 'full'"):
        expect_installed("ful")


@pytest.mark.parametrize("version", ["", "1", "1.0.0", "1.x", None, 1.0])
def test_only_major_dot_minor_is_a_version(version: object) -> None:
    with pytest.raises(PluginError, match=r"is not MAJOR\.MINOR"):
        check_api_version("thrown", version)  # type: ignore[arg-type]


def test_the_cores_own_version_is_accepted() -> None:
    check_api_version("thrown", API_VERSION)
