"""Options of the `swa` component."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from kvgraft import AttentionOptions, Tokens

__all__ = ["SwaOptions"]


class SwaOptions(AttentionOptions):
    """The window, beside the pool sizes and shapes of `kvgraft.AttentionOptions`.

    Attributes:
        window: tokens before a boundary that the next token attends to. It need not be a multiple
            of the page size: kvgraft keeps every page the window touches.
    """

    elsewhere: ClassVar[Mapping[str, str]] = {
        "sliding_window": "window",
        "sliding_window_size": "window",
    }

    window: Tokens = Field(default=4096, gt=0)
