"""Runs the checks of `inside/` in a network namespace of its own, with a loopback device only.

Dynamo's event plane listens on every interface.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("dynamo.common.backend", reason="Dynamo is not at hand: make test-fleet")

INSIDE = Path(__file__).parent / "inside"
NAMESPACES = (["unshare", "-npf", "--kill-child"], ["unshare", "-rnpf", "--kill-child"])
LIMIT_S = 900.0


def namespace() -> list[str]:
    """The command that gives a command a network of its own."""
    for command in NAMESPACES:
        if (
            shutil.which(command[0])
            and not subprocess.run(
                [*command, "true"], capture_output=True, timeout=60, check=False
            ).returncode
        ):
            return command
    pytest.skip("needs a network namespace: unshare -n as root, or unshare -rn")


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("part", sorted(path.name for path in INSIDE.glob("check_*.py")))
def test_a_fleet_serves_in_a_network_of_its_own(part: str) -> None:
    limits = [f"--timeout={LIMIT_S}", "-o", "faulthandler_timeout=0"]
    done = subprocess.run(
        [*namespace(), sys.executable, str(INSIDE / "run.py"), str(INSIDE / part), *limits],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )
    told = f"{part}: {done.stdout[-12_000:]}\n{done.stderr[-3_000:]}"
    assert done.returncode == 0, told
    assert " passed" in done.stdout, told
