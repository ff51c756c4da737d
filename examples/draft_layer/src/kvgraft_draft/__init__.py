"""Layers of a draft model whose entries take the token that follows (EAGLE, MTP)."""

from __future__ import annotations

from kvgraft_draft import plugin

__all__ = ["plugin"]
