"""How many functions of the core have many branches."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from .sources import CORE, modules

MOST_BRANCHES = 10
MOST_SHARE = 0.02
"""Of the core's functions may have more branches than that. The number may only fall."""


HARDEST = 20
"""Functions with the most branches draw what stays true, in a comment before their first line."""


def test_few_functions_have_many_branches() -> None:
    """A table or two functions are read more easily; a walk that decides per node may stay one."""
    named = [name for n_branches, name, _, _ in by_branches() if n_branches > MOST_BRANCHES]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    n_functions = sum(
        isinstance(node, kinds) for module in modules(CORE) for node in ast.walk(module.tree)
    )
    assert 0 < len(named) <= MOST_SHARE * n_functions, named


def test_the_hardest_functions_draw_what_they_keep_true() -> None:
    assert [name for _, name, path, line in by_branches()[:HARDEST] if not draws(path, line)] == []


def draws(path: Path, line: int) -> bool:
    """Whether the function that is named on a line begins with a drawing, behind its docstring."""
    (module,) = (each for each in modules(CORE) if each.path == path)
    (function,) = (
        node
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef) and node.lineno == line
    )
    first = function.body[ast.get_docstring(function) is not None]
    above = path.read_text(encoding="utf-8").splitlines()[: first.lineno - 1]
    comments = []
    while above[-1].strip().startswith("#"):
        comments.append(above.pop().strip())
    return bool(comments) and comments[-1].startswith("#   ")


@cache
def by_branches() -> list[tuple[int, str, Path, int]]:
    """Functions of the core with more than a few branches, most first, and where they are."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ruff", "check", str(CORE), "--isolated"),
            *("--select", "C901", "--output-format", "json", "--config"),
            f"lint.mccabe.max-complexity={MOST_BRANCHES // 2}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    found = []
    for each in json.loads(done.stdout):
        match = re.match(r"`(.*)` is too complex \((\d+) >", each["message"])
        assert match is not None
        place = (Path(each["filename"]), each["location"]["row"])
        found.append((int(match[2]), match[1], *place))
    return sorted(found, reverse=True)
