"""The wheels of core, suite and replay, and an environment that holds them alone of ours."""

from __future__ import annotations

import pytest

from ..packaging.conftest import built_wheels
from .workshop import Workshop

PARTS = ("cli", "storage", "observe", "guard", "accelerator", "arena", "testing")
SUITE = tuple(f"kvgraft-{name}" for name in PARTS)
"""The contract suite, and the parts that it asks about."""


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """One environment for all tests of this directory; each uninstalls its packages."""
    built = built_wheels(tmp_path_factory)
    wheels = {name: built[name] for name in ("kvgraft", *SUITE, "kvgraft-replay")}
    return Workshop(tmp_path_factory.mktemp("workshop") / "environment", wheels)
