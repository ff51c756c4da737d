"""Commands that other distributions add: found by entry point, broken ones reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from ..commands import KVGRAFT, run_forked

Distribution = Callable[..., str]

GOOD = """
import click
@click.command()
def hello() -> None:
    "Greet."
    click.echo("hello from another distribution")
"""


@pytest.fixture
def distribution(tmp_path: Path) -> Distribution:
    """Put a distribution with commands on a path; returns the path."""

    def install(source: str, **commands: str) -> str:
        (tmp_path / "addon.py").write_text(source)
        info = tmp_path / "addon-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: addon\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in commands.items()]
        (info / "entry_points.txt").write_text("\n".join(["[kvgraft.commands]", *lines, ""]))
        return str(tmp_path)

    return install


def kvgraft(path: str, *arguments: str) -> CompletedProcess[str]:
    return run_forked(KVGRAFT, *arguments, PYTHONPATH=path)


def test_an_added_command_is_listed_and_runs(distribution: Distribution) -> None:
    path = distribution(GOOD, hello="addon:hello")
    assert "hello          Greet." in kvgraft(path, "--help").stdout
    done = kvgraft(path, "hello")
    assert done.stdout == "hello from another distribution\n"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('no such engine')", "ImportError: no such engine"),
        ("hello = 3", "an int is no command"),
        ("import sys; sys.exit(7)", "SystemExit: 7"),
    ],
)
def test_a_broken_one_takes_nothing_down_and_names_its_fault(
    distribution: Distribution, source: str, reason: str
) -> None:
    path = distribution(source, hello="addon:hello")
    listed = kvgraft(path, "--help")
    assert listed.returncode == 0
    assert "hello          (unavailable: see kvgraft hello)" in listed.stdout
    assert kvgraft(path, "components").returncode == 0
    done = kvgraft(path, "hello", "--any", "thing")
    assert done.returncode == 1
    assert done.stderr == f"kvgraft: command 'hello' of addon: {reason}\n"


def test_the_cores_own_command_wins(distribution: Distribution) -> None:
    path = distribution("raise ImportError('never asked')", doctor="addon:doctor")
    assert "Say what is installed here" in kvgraft(path, "--help").stdout


def test_a_command_of_two_distributions_names_both(distribution: Distribution) -> None:
    path = distribution(GOOD, check="addon:hello")
    done = kvgraft(path, "check", "full")
    assert done.returncode == 1
    assert "published by addon and kvgraft-testing; uninstall all but one" in done.stderr
