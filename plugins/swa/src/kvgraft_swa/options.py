"""Options of the `swa` component."""

from __future__ import annotations

from pydantic import PositiveInt

from kvgraft import AttentionOptions

__all__ = ["SwaOptions"]


class SwaOptions(AttentionOptions):
    """The window, beside the pool sizes and shapes of `kvgraft.AttentionOptions`.

    Attributes:
        window: tokens before a boundary that the next token attends to. It need not be a multiple
            of the page size: kvgraft keeps every page the window touches.
    """

    window: PositiveInt = 4096
