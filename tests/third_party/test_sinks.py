"""The example distribution, from its wheel, in an environment with the core and replay alone."""

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
UNION = "[0, 4) + [b-1024, b)"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The example as its author checked it out, away from this repository."""
    return Path(
        shutil.copytree(
            EXAMPLE, tmp_path / "kvgraft-sinks", ignore=shutil.ignore_patterns("__pycache__")
        )
    )


@pytest.fixture
def cleared(workshop: Workshop) -> Iterator[Workshop]:
    """The shared environment, without the example, also after a failure."""
    yield workshop
    workshop.uninstall("kvgraft-sinks")


@pytest.mark.long
def test_the_example_is_built_installed_listed_tested_replayed_and_removed(
    cleared: Workshop, project: Path, tmp_path: Path
) -> None:
    assert cleared.listed() == {}

    wheel = cleared.install_wheel_of(project)
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("METADATA"))
    fields = email.message_from_bytes(zipfile.ZipFile(wheel).read(metadata))
    assert (fields.get_all("Requires-Dist") or [])[0] == "kvgraft>=0.1"
    shutil.rmtree(project / "src")

    listed = cleared.listed()
    assert list(listed) == ["sinks"]
    row = listed["sinks"]
    assert (row["distribution"], row["status"], row["reach"]) == ("kvgraft-sinks", "ok", UNION)

    cleared.succeeds("pytest", project)

    result = cleared.replayed("sinks:sinks=100,window=700", tmp_path)
    assert result["requests"] == 40
    assert result["payloads_verified"] > 0
    assert result["component_hits"]["sinks"]["device_slots"] > 0
    assert result["component_hits"]["sinks"]["host_slots"] > 0

    cleared.uninstall("kvgraft-sinks")
    assert cleared.listed() == {}
    gone = cleared.shell("kvgraft replay --synthetic chat --component sinks", tmp_path)
    assert gone.returncode == 2
    assert "component 'sinks' is not installed; installed: none" in gone.stderr


def test_the_example_uses_only_public_names() -> None:
    allowed = OPEN_TO_PLUGINS | {"kvgraft_testing"}
    mine = modules(EXAMPLE / "src", EXAMPLE / "tests")
    own = {module.name for module in mine}
    imported = {
        name
        for module in mine
        for node in ast.walk(module.tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert {name for name in imported if name.startswith("kvgraft")} <= allowed | own


def test_the_example_is_no_part_of_the_workspace() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "examples/third_party" not in makefile
