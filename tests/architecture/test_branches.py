"""How many functions of the core have many branches."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

from .sources import CORE, modules

MOST_BRANCHES = 10
MOST_SHARE = 0.02
"""Of the core's functions may have more branches than that. The number may only fall."""


def test_few_functions_have_many_branches() -> None:
    """A table or two functions are read more easily; a walk that decides per node may stay one."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ruff", "check", str(CORE), "--isolated"),
            *("--select", "C901", "--output-format", "json", "--config"),
            f"lint.mccabe.max-complexity={MOST_BRANCHES}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    named = [each["message"] for each in json.loads(done.stdout)]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    n_functions = sum(
        isinstance(node, kinds) for module in modules(CORE) for node in ast.walk(module.tree)
    )
    assert 0 < len(named) <= MOST_SHARE * n_functions, named
