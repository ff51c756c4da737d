"""Lower bounds of dependencies: each is given, and the highest of several counts."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from ..commands import ROOT
from ..oldest import constraints, requirements

FOLDERS = [
    "core",
    *(f"plugins/{path.parent.name}" for path in ROOT.glob("plugins/*/pyproject.toml")),
]


def test_every_dependency_of_every_distribution_has_a_lower_bound() -> None:
    assert {"torch", "numpy", "pydantic", "xxhash"} <= set(constraints(requirements(FOLDERS)))


def test_a_dependency_without_a_lower_bound_is_named() -> None:
    with pytest.raises(ValueError, match="numpy<3: give the oldest version that works"):
        constraints([Requirement("numpy<3")])


def test_the_highest_lower_bound_counts_and_extras_are_those_that_are_given() -> None:
    needed = [Requirement(line) for line in ("torch>=2.6", "torch>=2.10,<3", "kvgraft-full>=0.1")]
    assert constraints(needed) == {"torch": Version("2.10")}
    assert {each.name for each in requirements(["plugins/accelerator[triton]"])} >= {"triton"}
    assert "triton" not in {each.name for each in requirements(["plugins/accelerator"])}
