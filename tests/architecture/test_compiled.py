"""Modules that are compiled together, and a compiled module that crashes."""

from __future__ import annotations

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvgraft.compiled import is_compiled

from ..commands import ROOT
from ..compiled import modules_in, why_not_imported

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGES = (ROOT / "core", ROOT / "plugins" / "scheduling")
"""Those with a compiled build."""


def to_compile() -> list[str]:
    """Names of the modules that the packages' metadata says are compiled."""
    found: set[Path] = set()
    for package in PACKAGES:
        metadata = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))
        wheel = metadata["tool"]["hatch"]["build"]["targets"]["wheel"]
        settings, sources = wheel["hooks"]["custom"], package / "src"
        assert (package / settings["path"]).samefile(ROOT / "core" / "compiled_build.py")
        for pattern in settings["modules"]:
            files = {each.relative_to(sources) for each in sources.glob(pattern)}
            assert files, f"{package.name}: {pattern} names no file"
            found |= files
        found -= {Path(each) for each in settings.get("except", [])}
    return sorted(".".join(each.with_suffix("").parts) for each in found)


def test_the_modules_that_the_metadata_names_are_those_compiled() -> None:
    """All of it in the compiled build, none of it in the plain one."""
    origins = {name: find_spec(name) for name in to_compile()}
    compiled = {
        name
        for name, spec in origins.items()
        if spec is not None and str(spec.origin).endswith(tuple(EXTENSION_SUFFIXES))
    }
    assert compiled == (set(origins) if is_compiled() else set())


def test_a_module_that_crashes_is_named(tmp_path: Path) -> None:
    """Not those that import it, nor those that were imported before."""
    (tmp_path / "fine.py").write_text("")
    (tmp_path / "outer.py").write_text("import fine\nimport inner\n")
    (tmp_path / "inner.py").write_text("import fine, os, signal\nos.kill(os.getpid(), 11)\n")
    assert why_not_imported(tmp_path, ["fine"]) is None
    said = why_not_imported(tmp_path, ["fine", "outer"])
    assert said == "import of inner ended with exit status -11: the process said nothing"


def test_a_module_that_raises_is_named_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "outer.py").write_text("import inner\n")
    (tmp_path / "inner.py").write_text("1 / 0\n")
    said = why_not_imported(tmp_path, ["outer"])
    assert said == ("import of inner ended with exit status 1: ZeroDivisionError: division by zero")


@pytest.mark.parametrize("name", ["a/b", "c"])
def test_extension_modules_of_a_folder_are_found(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}{EXTENSION_SUFFIXES[0]}"
    path.parent.mkdir(exist_ok=True)
    path.touch()
    (tmp_path / "plain.py").touch()
    assert modules_in(tmp_path) == [name.replace("/", ".")]
