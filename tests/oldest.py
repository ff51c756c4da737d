"""Constraints that make pip install the oldest allowed version of every dependency.

    python -m tests.oldest plugins/full > constraints.txt

Dependencies of dependencies are left to pip.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from .commands import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["constraints", "requirements"]


def requirements(distributions: Iterable[str]) -> list[Requirement]:
    """The needs of distributions in these folders, with the extras that follow in brackets."""
    found = []
    for distribution in distributions:
        folder, _, extras = distribution.rstrip("]").partition("[")
        text = (ROOT / folder / "pyproject.toml").read_text(encoding="utf-8")
        project = tomllib.loads(text)["project"]
        found += project.get("dependencies", [])
        for extra in filter(None, extras.split(",")):
            found += project["optional-dependencies"][extra]
    return [Requirement(line) for line in found]


def constraints(needed: Iterable[Requirement]) -> dict[str, Version]:
    """The highest of the lower bounds of each dependency; without those of this repository.

    Raises:
        ValueError: a dependency without a lower bound: nobody knows which versions work.
    """
    oldest: dict[str, Version] = {}
    for each in needed:
        name = canonicalize_name(each.name)
        if name.startswith("kvgraft"):
            continue
        bounds = [Version(bound.version) for bound in each.specifier if bound.operator == ">="]
        if not bounds:
            raise ValueError(f"{each}: give the oldest version that works, as >=")
        oldest[name] = max([*bounds, *filter(None, [oldest.get(name)])])
    return oldest


if __name__ == "__main__":
    found = constraints(requirements(sys.argv[1:]))
    sys.stdout.writelines(f"{name}=={version}\n" for name, version in sorted(found.items()))
