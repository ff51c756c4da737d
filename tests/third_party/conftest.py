"""The core's wheel, and an environment that holds it and nothing else of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..commands import ROOT, run
from ..packaging.conftest import PIP
from .workshop import Workshop


@pytest.fixture(scope="session")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The core's wheel."""
    place = tmp_path_factory.mktemp("core")
    source = ROOT / "core"
    done = run(*PIP, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", place, source)
    assert done.returncode == 0, done.stderr
    (wheel,) = place.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory, core: Path) -> Workshop:
    """One environment for all tests of this directory; each uninstalls what it installed."""
    return Workshop(tmp_path_factory.mktemp("workshop") / "environment", core)
