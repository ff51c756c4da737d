"""The core's wheel, and an environment that holds it and nothing else of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..packaging.conftest import built_wheels
from .workshop import Workshop


@pytest.fixture(scope="session")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The core's wheel."""
    return built_wheels(tmp_path_factory)["kvgraft"]


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory, core: Path) -> Workshop:
    """One environment for all tests of this directory; each uninstalls what it installed."""
    return Workshop(tmp_path_factory.mktemp("workshop") / "environment", core)
