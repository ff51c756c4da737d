"""Settings that vary between examples: page size, policy and pools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvgraft.config import LoadModel, WritePolicy

__all__ = ["STATES", "Options", "Sizes"]


STATES = 7
"""Slots of a companion that keeps states, usually."""


@dataclass(frozen=True)
class Sizes:
    """Settings that vary within a setup.

    Attributes:
        page_size: tokens per page.
        policy: when data goes to HOST.
        load: when a load is skipped; None for never.
        device, host: pools, in pages.
        cut_tokens: how close to one another a prefill may be cut for its states.
        decode_tokens: how far apart states are kept while decoding.
        max_drafts: most drafts of a request that a pass verifies.
        states: slots of a companion that keeps states; with few of them a request does without
            some of its points, with many there is a grid of points.
    """

    page_size: int = 2
    policy: WritePolicy = WritePolicy.WRITE_THROUGH
    load: LoadModel | None = None
    device: int = 14
    host: int = 16
    cut_tokens: int = 0
    decode_tokens: int = 0
    max_drafts: int = 0
    states: int = STATES

    def __str__(self) -> str:
        load = "always loads" if self.load is None else "loads where that is faster"
        states = "" if not self.cut_tokens else f", cut at {self.cut_tokens} tokens or more"
        if self.decode_tokens > self.page_size:
            states += f", kept every {self.decode_tokens} tokens of a decode"
        if self.max_drafts:
            states += f", up to {self.max_drafts} drafts"
        if self.states != STATES:
            states += f", {self.states} states of companions"
        return (
            f"pages of {self.page_size}, {self.device} pages on DEVICE, {self.host} on HOST, "
            f"{self.policy.value}, {load}{states}"
        )


Options = Mapping[str, Any] | Callable[[Sizes], Mapping[str, Any]]
"""A component's options, or a function of the sizes that returns them."""
