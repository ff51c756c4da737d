"""Runs the checks of `inside/` in network namespaces of their own, with a loopback device only.

Mooncake listens on every interface, and ends the process that misuses it; neither is for the
process that runs all tests. It mostly waits, so parts run at once.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .inside.master import program

INSIDE = Path(__file__).parent / "inside"
CLAUSES = "round-trip or shared or statuses or length"
"""Of the storage contract: each opens stores anew, which takes Mooncake's client seconds."""
QUICK = [["check_contract.py", "-k", CLAUSES], ["check_store.py"]]
WHOLE = [["check_contract.py"], ["check_capacity.py"], ["check_faults.py"]]
NAMESPACES = (["unshare", "-npf", "--kill-child"], ["unshare", "-rnpf", "--kill-child"])


CANNOT_BE_LOADED = 127
"""The dynamic loader's exit status where it does not find all libraries of a program."""


def unloadable(environment: Mapping[str, str]) -> str:
    """Why the loader cannot start Mooncake's master; empty if it can."""
    done = subprocess.run(
        [program(), "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    return done.stderr.strip() if done.returncode == CANNOT_BE_LOADED else ""


def namespace() -> list[str]:
    """The command that gives a command a network of its own; skips where Mooncake cannot run."""
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("needs kvgraft-mooncake[cpu]")
    reason = unloadable(os.environ)
    if reason:
        pytest.skip(f"needs Mooncake's system libraries: {reason.partition(': ')[2]}")
    for command in NAMESPACES:
        if (
            shutil.which(command[0])
            and not subprocess.run(
                [*command, "true"], capture_output=True, timeout=60, check=False
            ).returncode
        ):
            return command
    pytest.skip("needs a network namespace: unshare -n as root, or unshare -rn")


@pytest.mark.parametrize(
    "parts",
    [pytest.param(QUICK, id="quick"), pytest.param(WHOLE, id="whole", marks=pytest.mark.long)],
)
def test_every_part_passes_in_a_network_of_its_own(parts: list[list[str]]) -> None:
    inside = namespace()
    with ThreadPoolExecutor(len(parts)) as pool:
        told = [*pool.map(lambda part: failure(inside, *part), parts)]
    assert not any(told), "\n".join(told)


@pytest.mark.skipif(importlib.util.find_spec("mooncake") is None, reason="needs its client")
def test_the_loader_names_a_library_that_mooncake_lacks(tmp_path: Path) -> None:
    (tmp_path / "libibverbs.so.1").touch()  # found first, and no library
    assert "libibverbs.so.1" in unloadable({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})


def test_no_part_is_left_out() -> None:
    whole = {part for part, *options in (*QUICK, *WHOLE) if not options}
    assert whole == {path.name for path in INSIDE.glob("check_*.py")}


def failure(inside: list[str], part: str, *options: str) -> str:
    """The output of a part that does not pass; empty if it does."""
    done = subprocess.run(
        [*inside, sys.executable, str(INSIDE / "run.py"), str(INSIDE / part), *options],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )
    told = f"{part}: {done.stdout[-12_000:]}\n{done.stderr[-3_000:]}"
    return "" if done.returncode == 0 and " passed" in done.stdout else told
