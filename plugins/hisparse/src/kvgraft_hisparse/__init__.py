"""Host-resident sparse attention for kvgraft: keys and values on HOST, hot rows on DEVICE."""

from __future__ import annotations

from kvgraft_hisparse import plugin

__all__ = ["plugin"]
