"""The frozen distribution, installed for the length of a test."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from .surface import FROZEN


@pytest.fixture
def frozen_1_0(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The component package written for API 1.0, where an installer would have put it."""
    monkeypatch.syspath_prepend(FROZEN / "1.0")
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "kvgraft_frozen"]:
        del sys.modules[name]
