"""Options of the `full` component."""

from __future__ import annotations

from kvgraft import AttentionOptions

__all__ = ["FullOptions"]


class FullOptions(AttentionOptions):
    """Pool sizes and the shape of keys and values; nothing of its own.

    Attributes are those of `kvgraft.AttentionOptions`.
    """
