"""Full attention for kvgraft: every token before a boundary, in pages."""

from __future__ import annotations

from kvgraft_full import plugin

__all__ = ["plugin"]
