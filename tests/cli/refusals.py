"""Many refusals in one process."""

from __future__ import annotations

import json
from typing import NamedTuple

from ..commands import run_forked

__all__ = ["Refusal", "refused"]

SCRIPT = """
import contextlib, io, json, sys
from kvgraft_cli import main

outcomes = {}
for case, arguments in json.loads(sys.argv[1]).items():
    sys.argv = ["kvgraft", *arguments]
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            main()
            status = 0
        except SystemExit as stop:
            status = stop.code
    outcomes[case] = (status, output.getvalue(), errors.getvalue())
print(json.dumps(outcomes))
"""


class Refusal(NamedTuple):
    """How a command ended."""

    status: int
    output: str
    errors: str


def refused(commands: dict[str, list[str]]) -> dict[str, Refusal]:
    """Run the `kvgraft` command with several argument lists, one after another."""
    done = run_forked("-c", SCRIPT, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    return {case: Refusal(*outcome) for case, outcome in json.loads(done.stdout).items()}
