"""Options of the `sinks` component."""

from __future__ import annotations

from pydantic import PositiveInt

from kvgraft import AttentionOptions

__all__ = ["SinksOptions"]


class SinksOptions(AttentionOptions):
    """Sinks and window, beside the pool sizes and shapes of `kvgraft.AttentionOptions`.

    Neither need be whole pages: kvgraft keeps every page they touch.

    Attributes:
        sinks: first tokens of the sequence, which every token attends to.
        window: tokens before a boundary that the next token attends to besides.
    """

    sinks: PositiveInt = 4
    window: PositiveInt = 1024
