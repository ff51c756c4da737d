"""Fixtures of the storage tier's tests."""

from __future__ import annotations

from collections import Counter

import pytest

from kvgraft_storage import keys
from kvgraft_storage.tier import naming


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[bytes, bytes]]:
    """How often each page was given its hash."""
    made: Counter[tuple[bytes, bytes]] = Counter()
    given = keys.page_hash

    def page_hash(parent: bytes, tokens: bytes) -> bytes:
        made[parent, bytes(tokens)] += 1
        return given(parent, tokens)

    monkeypatch.setattr(naming, "page_hash", page_hash)
    return made
