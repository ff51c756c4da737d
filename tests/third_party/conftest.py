"""The wheels of core, suite and replay, and an environment that holds them alone of ours."""

from __future__ import annotations

import pytest

from ..packaging.conftest import built_wheels, with_needs
from .workshop import Workshop


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """One environment for all tests of this directory; each uninstalls its packages."""
    built = built_wheels(tmp_path_factory)
    wheels = {name: built[name] for name in with_needs("kvgraft-testing", "kvgraft-replay")}
    return Workshop(tmp_path_factory.mktemp("workshop") / "environment", wheels)
