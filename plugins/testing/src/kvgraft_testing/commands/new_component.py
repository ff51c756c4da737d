"""`kvgraft new-component`: a component package to start from, complete and within the contract."""

from __future__ import annotations

from pathlib import Path

import click

from kvgraft.contract import API_VERSION
from kvgraft.packages.registry import discover
from kvgraft.types import Kind
from kvgraft_testing.commands.new_package import expect_name, into_option, render, show, write

__all__ = ["new_component"]


@click.command("new-component")
@click.argument("name")
@click.option(
    "--kind",
    type=click.Choice([kind.value for kind in Kind]),
    default=Kind.PAGED.value,
    show_default=True,
    help="Slots for every page of tokens, or one state at a boundary.",
)
@into_option
def new_component(name: str, kind: str, into: Path) -> None:
    """Write a component package to start from.

    It is called kvgraft-NAME and holds pyproject.toml, a README, options, pools, hooks and a
    contract test that passes; comments mark the places to change. Nothing is overwritten.
    """
    expect_name("component", name, {each.name: each.distribution for each in discover()})
    templates = {
        "pyproject.toml": "pyproject.toml.j2",
        "README.md": "README.md.j2",
        "src/MODULE/__init__.py": "init.py.j2",
        "src/MODULE/options.py": f"{kind}/options.py.j2",
        "src/MODULE/plugin.py": f"{kind}/plugin.py.j2",
        "src/MODULE/pools.py": f"{kind}/pools.py.j2",
        "tests/test_contract.py": "contract.py.j2",
    }
    contents = render(name, templates, kind=kind, api_version=API_VERSION)
    show(
        write(name, contents, into),
        f"component {name!r}, {kind}",
        [
            "kvgraft components",
            "pytest",
            f"kvgraft replay --synthetic chat --requests 100 --component {name}",
        ],
    )
