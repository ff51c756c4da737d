"""Policies of packages that are not installed."""

from __future__ import annotations

import pytest

from kvgraft.optional import Published, published
from kvgraft.packages import registry

__all__ = ["publish"]


def publish(monkeypatch: pytest.MonkeyPatch, *policies: Published) -> None:
    """Packages publish these policies, and no others; components stay."""
    monkeypatch.setattr(
        registry,
        "published",
        lambda group: [*policies] if group == registry.POLICY_GROUP else published(group),
    )
