"""The frozen distribution, installed for the length of a test."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from .surface import FROZEN


def _installed(monkeypatch: pytest.MonkeyPatch, version: str, package: str) -> Iterator[None]:
    """A version's component package, where an installer would have put it."""
    monkeypatch.syspath_prepend(FROZEN / version)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]


@pytest.fixture
def frozen_1_0(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The component package written for API 1.0."""
    yield from _installed(monkeypatch, "1.0", "kvgraft_frozen")


@pytest.fixture
def frozen_1_1(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The component package written for API 1.1."""
    yield from _installed(monkeypatch, "1.1", "kvgraft_terms")
