"""Sliding-window attention for kvgraft: the last tokens before a boundary, in pages."""

from __future__ import annotations

from kvgraft_swa import plugin

__all__ = ["plugin"]
