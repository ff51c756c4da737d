"""Runs what is in `inside/` in a network namespace of its own, which only has a loopback device.

Mooncake listens on every interface, and ends the process that misuses it; neither is for the
process that runs all tests.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

INSIDE = Path(__file__).parent / "inside"
NAMESPACES = (["unshare", "-npf", "--kill-child"], ["unshare", "-rnpf", "--kill-child"])


def namespace() -> list[str]:
    """The command that gives a command a network of its own; skips where there is none."""
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("needs kvgraft-mooncake[cpu]")
    for command in NAMESPACES:
        if (
            shutil.which(command[0])
            and not subprocess.run(
                [*command, "true"], capture_output=True, timeout=60, check=False
            ).returncode
        ):
            return command
    pytest.skip("needs a network namespace: unshare -n as root, or unshare -rn")


@pytest.mark.parametrize("part", sorted(path.stem for path in INSIDE.glob("check_*.py")))
def test_in_a_network_of_its_own(part: str) -> None:
    done = subprocess.run(
        [*namespace(), sys.executable, str(INSIDE / "run.py"), str(INSIDE / f"{part}.py")],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )
    told = f"{done.stdout[-12_000:]}\n{done.stderr[-3_000:]}"
    if "libibverbs.so.1: cannot open" in told or "librdmacm.so.1: cannot open" in told:
        pytest.skip("needs libibverbs1 and librdmacm1")
    assert done.returncode == 0, told
    assert " passed" in done.stdout, "no test ran"
