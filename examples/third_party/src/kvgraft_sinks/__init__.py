"""Attention sinks with a sliding window for kvgraft."""

from __future__ import annotations

from kvgraft_sinks import plugin

__all__ = ["plugin"]
