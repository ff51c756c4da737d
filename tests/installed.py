"""A component's package as installed, for the tests of each."""

from __future__ import annotations

import subprocess
import sys

from kvgraft.packages.registry import Plugin, discover

__all__ = ["expect_no_torch", "installed"]


def installed(name: str) -> Plugin:
    """The package that brings a component, found by its entry point."""
    (found,) = (entry for entry in discover() if entry.name == name)
    assert found.status == "ok"
    assert found.plugin is not None
    return found.plugin


def expect_no_torch(name: str) -> None:
    """Find a component in a fresh process and see that torch was not imported (P2)."""
    code = (
        f"import sys; from kvgraft.packages.registry import select; select(['{name}']); "
        f"assert 'kvgraft_{name}.plugin' in sys.modules; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
