"""Options of the `draft` component."""

from __future__ import annotations

from pydantic import PositiveInt

from kvgraft import AttentionOptions

__all__ = ["DraftOptions"]


class DraftOptions(AttentionOptions):
    """The model's hidden state, beside the pool sizes and shapes of `kvgraft.AttentionOptions`.

    Attributes:
        hidden: elements of the hidden state that the draft layers take beside a token.
    """

    hidden: PositiveInt = 4096
