"""The tests' own servers end with the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import shared


@pytest.fixture(scope="session", autouse=True)
def servers_end() -> Iterator[None]:
    """Servers started for several tests."""
    yield
    shared.close()
