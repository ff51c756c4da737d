"""`make dist` gives whole wheels and sdists, which install with the dependencies they name."""

from __future__ import annotations

import configparser
import email
import json
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from email.message import Message
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from ..commands import ROOT, run
from .conftest import PIP, Environment

SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
"""Versions of Python that the core is made for."""

ALONE: dict[str, Any] = {"MAKEFLAGS": "", "MAKELEVEL": "", "MFLAGS": ""}
"""Variables of a make that may run these tests."""

WHOLE: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Of `extractall`: Debian's Python 3.11.2 has no filters."""

BUILD_WHEELS = """
import os, sys
from hatchling.build import build_wheel
for source in sys.argv[2:]:
    os.chdir(source)
    build_wheel(sys.argv[1])
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `make dist-plain` filled and checked."""
    if Version(version("twine")) < Version("7"):  # beside the oldest rich that is allowed
        pytest.skip(f"twine {version('twine')} reads no metadata of version 2.5: twine 7 does")
    directory = tmp_path_factory.mktemp("built")
    target = ("dist-plain", "STAMP=", f"PY={sys.executable}", f"DIST={directory}")
    done = run("make", "--no-print-directory", *target, cwd=ROOT, **ALONE)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def by_distribution(paths: Iterable[Path]) -> dict[str, Path]:
    """Wheels or sdists by the name of their distribution."""
    return {path.name.split("-")[0].replace("_", "-"): path for path in paths}


@pytest.fixture(scope="module")
def wheels(built: Path) -> dict[str, Path]:
    """The wheels that `make dist-plain` made."""
    return by_distribution(built.glob("*.whl"))


@pytest.fixture(scope="module")
def sdists(built: Path) -> dict[str, Path]:
    """The sdists that `make dist-plain` made."""
    return by_distribution(built.glob("*.tar.gz"))


def metadata_of_wheel(path: Path) -> Message:
    wheel = zipfile.ZipFile(path)
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def metadata_of_sdist(path: Path) -> Message:
    with tarfile.open(path) as sdist:
        stream = sdist.extractfile(f"{path.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert stream is not None
        return email.message_from_bytes(stream.read())


def contents(path: Path) -> dict[str, bytes]:
    """The files of a wheel, but for the list of them."""
    wheel = zipfile.ZipFile(path)
    return {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/RECORD")}


def published(path: Path) -> list[str]:
    """Names of the components and stores that a wheel publishes."""
    wheel = zipfile.ZipFile(path)
    points = configparser.ConfigParser()
    for name in wheel.namelist():
        if name.endswith(".dist-info/entry_points.txt"):
            points.read_string(wheel.read(name).decode())
    groups = ("kvgraft.components", "kvgraft.storage")
    return [name for group in groups if group in points for name in points[group]]


def fits(metadata: Message) -> bool:
    """Whether this Python is new enough for a distribution."""
    oldest = metadata["Requires-Python"].removeprefix(">=")
    return sys.version_info >= tuple(map(int, oldest.split(".")))


def test_every_distribution_has_a_wheel_and_an_sdist(
    wheels: dict[str, Path], sdists: dict[str, Path]
) -> None:
    n_distributions = 1 + len([*ROOT.glob("plugins/*/pyproject.toml")])
    assert len(wheels) == n_distributions
    assert wheels.keys() == sdists.keys()


def test_metadata_is_whole_and_the_same_in_both(
    wheels: dict[str, Path], sdists: dict[str, Path]
) -> None:
    for name, path in wheels.items():
        metadata = metadata_of_wheel(path)
        assert metadata.items() == metadata_of_sdist(sdists[name]).items()
        assert metadata["Name"] == name
        assert metadata["Summary"]
        assert metadata["Author"] == "The kvgraft authors"
        assert metadata["License-Expression"] == "Apache-2.0"
        assert metadata["License-File"] == "LICENSE"
        assert metadata["Keywords"]
        assert metadata["Description-Content-Type"] == "text/markdown"
        description = metadata.get_payload()
        assert isinstance(description, str)
        assert description.startswith(f"# {name}\n")
        classifiers = metadata.get_all("Classifier")
        assert classifiers is not None
        assert {"Development Status :: 3 - Alpha", "Typing :: Typed"} <= set(classifiers)
        oldest = metadata["Requires-Python"].removeprefix(">=")
        supported = SUPPORTED[SUPPORTED.index(oldest) :]
        of_python = [c.split(" :: ")[2] for c in classifiers if "Python :: 3." in c]
        assert tuple(of_python) == supported


def test_the_extra_all_brings_whatever_needs_nothing_else_installed(
    wheels: dict[str, Path],
) -> None:
    metadata = metadata_of_wheel(wheels["kvgraft"])
    needed = [Requirement(text) for text in metadata.get_all("Requires-Dist") or ()]

    def brought(extra: str) -> set[str]:
        found: set[str] = set()
        for each in needed:
            if each.marker is not None and each.marker.evaluate({"extra": extra}):
                found = (
                    found.union(*map(brought, each.extras)) if each.extras else found | {each.name}
                )
        return found

    of_engines = {"kvgraft-vllm", "kvgraft-sglang", "kvgraft-transformers", "kvgraft-dynamo"}
    of_libraries = {"kvgraft-s3", "kvgraft-valkey", "kvgraft-mooncake", "kvgraft-nixl"}
    assert brought("all") == wheels.keys() - {"kvgraft"} - of_engines - of_libraries


def test_a_wheel_built_from_its_sdist_is_the_one_built_from_the_tree(
    wheels: dict[str, Path], sdists: dict[str, Path], tmp_path: Path
) -> None:
    sources = []
    for path in sdists.values():
        with tarfile.open(path) as sdist:
            sdist.extractall(tmp_path, **WHOLE)
        sources.append(tmp_path / path.name.removesuffix(".tar.gz"))
    done = run(sys.executable, "-c", BUILD_WHEELS, tmp_path / "again", *sources)
    assert done.returncode == 0, done.stderr
    again = by_distribution((tmp_path / "again").glob("*.whl"))
    assert again.keys() == wheels.keys()
    for name, path in wheels.items():
        assert contents(path) == contents(again[name])


@pytest.fixture(scope="module")
def resolved(
    tmp_path_factory: pytest.TempPathFactory, built: Path, wheels: dict[str, Path]
) -> Environment:
    """An environment into which pip brought all distributions that are made for this Python."""
    made = Environment(tmp_path_factory.mktemp("resolved") / "environment", wheels)
    names = [name for name, path in wheels.items() if fits(metadata_of_wheel(path))]
    done = run(
        *(*PIP, "--python", made.python, "install", "-q", "--no-index", "--find-links", built),
        *names,
    )
    assert done.returncode == 0, done.stderr
    return made


def test_all_distributions_install_into_a_fresh_environment(
    resolved: Environment, wheels: dict[str, Path]
) -> None:
    """Their dependencies are resolved, not skipped; third-party packages are there already."""
    code = (
        "import importlib.metadata as m, json; "
        "print(json.dumps([d.name for d in m.distributions() if d.name.startswith('kvgraft')]))"
    )
    installed = set(json.loads(resolved.run_python(code).stdout))
    assert {name for name, path in wheels.items() if fits(metadata_of_wheel(path))} == installed
    done = run(*PIP, "--python", resolved.python, "check")
    assert not [line for line in done.stdout.splitlines() if line.startswith("kvgraft")]


def test_components_and_stores_are_found_in_it(
    resolved: Environment, wheels: dict[str, Path]
) -> None:
    listed = resolved.kvgraft("components", "--json")
    assert listed.returncode == 0, listed.stderr
    rows = json.loads(listed.stdout)
    assert {row["status"] for row in rows} == {"ok"}
    drivers = resolved.kvgraft("storage", "drivers", "--json")
    assert drivers.returncode == 0, drivers.stderr
    found = {row["name"] for row in [*rows, *json.loads(drivers.stdout)]}
    fitting = [path for path in wheels.values() if fits(metadata_of_wheel(path))]
    assert found == {name for path in fitting for name in published(path)}
    assert found >= {"full", "swa", "mamba", "hisparse"}
