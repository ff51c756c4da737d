"""All that a GPU can show: the tests that skip elsewhere, the contract of every installed
component with its pools there, then the bandwidth of copies.

    python -m tests.acceptance [FILE.json]

Exits with 0 if all passed and every target was met, 1 if not, 2 where torch finds no accelerator.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from kvgraft.packages.registry import discover

from ..commands import KVGRAFT, ROOT

__all__ = ["contracts", "main"]


def main(arguments: Sequence[str]) -> int:
    """Run everything; the exit status."""
    if not hasattr(torch, "accelerator") or not torch.accelerator.is_available():
        found = f"torch {torch.__version__} finds no accelerator here"
        print(f"gpu-acceptance: {found}; nothing was run")
        return 2
    device = torch.accelerator.current_accelerator()
    assert device is not None
    report = Path(arguments[0]) if arguments else Path(tempfile.gettempdir(), "kvgraft-copies.json")
    python = sys.executable
    pytest = [python, "-m", "pytest", "-m", "gpu", "-v", "-n", "0", "-p", "no:cacheprovider"]
    copies = [python, "benchmarks/device_copies.py", "--device", device.type, "--json", str(report)]
    results = {"tests that need an accelerator": passes(pytest)}
    for what, command in contracts(device.type).items():
        results[what] = passes(command)
    results["copies, measured"] = passes(copies)
    missed = []
    if results["copies, measured"]:
        rows = json.loads(report.read_text(encoding="utf-8"))
        missed = [row["name"] for row in rows if not row["met"]]
        print(f"written to {report}")
    for name, passed in results.items():
        print(f"{name}: {'passed' if passed else 'FAILED'}")
    print(f"targets missed: {', '.join(missed) or 'none'}")
    return 0 if all(results.values()) and not missed else 1


def contracts(device: str, *options: str) -> dict[str, list[str]]:
    """The command that runs the contract suite on a device, for each installed component."""
    return {
        f"contract of {each.name!r}": [KVGRAFT, "check", each.name, "--device", device, *options]
        for each in discover()
    }


def passes(command: Sequence[str]) -> bool:
    """Run a command of the repository and show what it prints; whether it exits with 0."""
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
