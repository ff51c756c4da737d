"""The example distributions, from their wheels, beside the core and replay alone."""

from __future__ import annotations

import ast
import email
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..architecture.sources import modules
from ..architecture.test_imports import OPEN_TO_PLUGINS
from ..commands import ROOT
from .workshop import Workshop

EXAMPLE = ROOT / "examples" / "third_party"
EXAMPLES = {"sinks": EXAMPLE, "draft": ROOT / "examples" / "draft_layer"}
OPTIONS = {"sinks": "sinks=100,window=700", "draft": "hidden=8"}
REACHES = {"sinks": "[0, 4) + [b-1024, b)", "draft": "[0, b)"}


@pytest.fixture(params=EXAMPLES)
def name(request: pytest.FixtureRequest) -> str:
    """The component's name."""
    return str(request.param)


@pytest.fixture
def project(tmp_path: Path, name: str) -> Path:
    """The example as its author checked it out, away from this repository."""
    place, ignored = tmp_path / f"kvgraft-{name}", shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(EXAMPLES[name], place, ignore=ignored))


@pytest.fixture
def cleared(workshop: Workshop, name: str) -> Iterator[Workshop]:
    """The shared environment, without the example, also after a failure."""
    yield workshop
    workshop.uninstall(f"kvgraft-{name}")


@pytest.mark.long
def test_the_example_is_built_installed_listed_tested_replayed_and_removed(
    cleared: Workshop, project: Path, tmp_path: Path, name: str
) -> None:
    assert cleared.listed() == {}

    wheel = cleared.install_wheel_of(project)
    (metadata,) = (each for each in zipfile.ZipFile(wheel).namelist() if each.endswith("METADATA"))
    fields = email.message_from_bytes(zipfile.ZipFile(wheel).read(metadata))
    assert (fields.get_all("Requires-Dist") or [])[0] == "kvgraft>=0.1"
    shutil.rmtree(project / "src")

    listed = cleared.listed()
    assert list(listed) == [name]
    row = listed[name]
    assert (row["distribution"], row["status"]) == (f"kvgraft-{name}", "ok")
    assert row["reach"] == REACHES[name]

    cleared.succeeds("pytest", project)

    result = cleared.replayed(f"{name}:{OPTIONS[name]}", tmp_path)
    assert result["requests"] == 40
    assert result["payloads_verified"] > 0
    assert result["component_hits"][name]["device_slots"] > 0
    assert result["component_hits"][name]["host_slots"] > 0

    cleared.uninstall(f"kvgraft-{name}")
    assert cleared.listed() == {}
    gone = cleared.shell(f"kvgraft replay --synthetic chat --component {name}", tmp_path)
    assert gone.returncode == 2
    assert f"component '{name}' is not installed; installed: none" in gone.stderr


def test_the_example_uses_only_public_names(name: str) -> None:
    allowed = OPEN_TO_PLUGINS | {"kvgraft_testing"}
    mine = modules(EXAMPLES[name] / "src", EXAMPLES[name] / "tests")
    own = {module.name for module in mine}
    imported = {
        each
        for module in mine
        for node in ast.walk(module.tree)
        for each in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert {each for each in imported if each.startswith("kvgraft")} <= allowed | own


def test_the_example_is_no_part_of_the_workspace() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert not any(str(path.relative_to(ROOT)) in makefile for path in EXAMPLES.values())
