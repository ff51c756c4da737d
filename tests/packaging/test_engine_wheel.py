"""The engine's distribution adds a command, and takes it away."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from .conftest import Environment, with_needs

if find_spec("kvgraft_transformers") is None:
    pytest.skip("needs Python 3.11", allow_module_level=True)

COMPONENTS = ("kvgraft-full", "kvgraft-swa", "kvgraft-mamba", "kvgraft-hisparse")
SERVING = with_needs("kvgraft-cli", "kvgraft-transformers")


@pytest.mark.long
def test_serve_comes_and_goes_with_its_distribution(
    environment: Callable[..., Environment],
) -> None:
    made = environment(*SERVING)
    assert "  serve " in made.kvgraft("--help").stdout
    assert made.kvgraft("serve", "--help").returncode == 0
    made.uninstall("kvgraft-transformers")
    assert "  serve " not in made.kvgraft("--help").stdout
    gone = made.kvgraft("serve", "anything")
    assert gone.returncode == 2
    assert gone.stderr == (
        "kvgraft: command 'serve' is not installed; in a clone of kvgraft, "
        "pip install -r plugins/transformers/requirements.txt\n"
    )


def test_the_requirements_of_serve_are_those_that_its_readme_names() -> None:
    lines = Path("plugins/transformers/README.md").read_text().splitlines()
    command = next(line for line in lines if line.startswith("pip install torch"))
    wanted = Path("plugins/transformers/requirements.txt").read_text().splitlines()
    assert wanted[1:] == shlex.split(command)[2:]
    assert all(f"./plugins/{name.removeprefix('kvgraft-')}" in wanted for name in COMPONENTS)


def test_help_of_serve_loads_neither_torch_nor_transformers(
    environment: Callable[..., Environment],
) -> None:
    made = environment(*SERVING)
    code = (
        "import sys; from kvgraft_transformers.serving.command import serve; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert made.run_python(code).returncode == 0
