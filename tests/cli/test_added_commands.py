"""Commands that other distributions add: found by entry point, broken ones reported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Distribution = Callable[..., dict[str, str]]

GOOD = """
import click
@click.command()
def hello() -> None:
    "Greet."
    click.echo("hello from another distribution")
"""


@pytest.fixture
def distribution(tmp_path: Path) -> Distribution:
    """Put a distribution with commands on a path; returns the environment that sees it."""

    def install(source: str, **commands: str) -> dict[str, str]:
        (tmp_path / "addon.py").write_text(source)
        info = tmp_path / "addon-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: addon\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in commands.items()]
        (info / "entry_points.txt").write_text("\n".join(["[kvgraft.commands]", *lines, ""]))
        return {**os.environ, "PYTHONPATH": str(tmp_path)}

    return install


def kvgraft(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).with_name("kvgraft")
    return subprocess.run(
        [command, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )


def test_an_added_command_is_listed_and_runs(distribution: Distribution) -> None:
    environment = distribution(GOOD, hello="addon:hello")
    assert "hello          Greet." in kvgraft(environment, "--help").stdout
    done = kvgraft(environment, "hello")
    assert done.stdout == "hello from another distribution\n"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('no such engine')", "ImportError: no such engine"),
        ("hello = 3", "addon:hello is no command"),
        ("import sys; sys.exit(7)", "SystemExit: 7"),
    ],
)
def test_a_broken_one_takes_nothing_down_and_names_its_fault(
    distribution: Distribution, source: str, reason: str
) -> None:
    environment = distribution(source, hello="addon:hello")
    listed = kvgraft(environment, "--help")
    assert listed.returncode == 0
    assert "hello          (unavailable: see kvgraft hello)" in listed.stdout
    assert kvgraft(environment, "components").returncode == 0
    done = kvgraft(environment, "hello", "--any", "thing")
    assert done.returncode == 1
    assert done.stderr == f"kvgraft: command 'hello' of addon: {reason}\n"


def test_the_cores_own_command_wins(distribution: Distribution) -> None:
    environment = distribution("raise ImportError('never asked')", check="addon:check")
    assert "Run the contract suite" in kvgraft(environment, "--help").stdout
