"""`kvgraft new-policy`: a package with an eviction policy to start from, within the contract."""

from __future__ import annotations

from pathlib import Path

import click

from kvgraft.config import DENSITY, LRU
from kvgraft.optional import published
from kvgraft.packages.registry import POLICY_GROUP
from kvgraft_testing.commands.new_package import expect_name, into_option, render, show, write

__all__ = ["new_policy"]

TEMPLATES = {
    "pyproject.toml": "policy/pyproject.toml.j2",
    "README.md": "policy/README.md.j2",
    "src/MODULE/__init__.py": "policy/init.py.j2",
    "src/MODULE/policy.py": "policy/policy.py.j2",
    "tests/test_policy.py": "policy/test_policy.py.j2",
}


@click.command("new-policy")
@click.argument("name")
@into_option
def new_policy(name: str, into: Path) -> None:
    """Write a package with an eviction policy to start from.

    It is called kvgraft-NAME and holds pyproject.toml, a README, the policy and a test of the rules
    that passes; comments mark the places to change. Nothing is overwritten.
    """
    owners = {each.name: each.distribution for each in published(POLICY_GROUP)}
    expect_name("policy", name, {**owners, LRU: "kvgraft", DENSITY: "kvgraft-density"})
    show(
        write(name, render(name, TEMPLATES), into),
        f"eviction policy {name!r}",
        [
            "pytest",
            "kvgraft replay --synthetic chat --requests 200 --component full --device-tokens 60k "
            f"--policy lru,{name}",
        ],
        needs="plugins/full plugins/replay",
    )
