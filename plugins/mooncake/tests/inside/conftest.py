from __future__ import annotations

from collections.abc import Iterator

import pytest

from .donor import Donor
from .master import Master


@pytest.fixture(scope="session", autouse=True)
def master() -> Iterator[Master]:
    """The master of all checks of a file."""
    running = Master()
    yield running
    running.kill()


@pytest.fixture(scope="module", autouse=True)
def donor(master: Master, request: pytest.FixtureRequest) -> Iterator[Donor]:
    """Where everything is stored: payloads travel to another process."""
    running = Donor(getattr(request.module, "SEGMENT", "128MiB"))
    yield running
    running.kill()
