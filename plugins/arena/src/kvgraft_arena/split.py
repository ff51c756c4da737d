"""Splits bytes among pools by need: one rule for every pool that is sized in bytes.

Tokens of a reach without a bound (full attention) are useful as long as requests come back to them.
A window or a state is useful at a boundary that a request resumes from, and for a running request.
So beside `T` tokens of the base, a component of bounded reach gets

    window    2 W + chunk + T W / S   tokens, at most T
    state     T / S                   states

`W` is its window and two pages, `chunk` the tokens that one prefill computes at a time, and `S` the
tokens of the base for which one resume point is kept: 2,048, about one turn of a conversation, or
more where a point takes more than twice the bytes of these tokens. So points take at most two
thirds of the memory, and running requests find their windows among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvgraft.reach import Reach

__all__ = ["PoolShape", "split_tokens"]

POINT_TOKENS = 2048
"""One resume point is kept for at least this many tokens of the base."""

POINT_COST = 2
"""A resume point takes at most this many times the bytes of its tokens of the base."""

CHUNK_TOKENS = 8192
"""Most tokens that a prefill step computes: an engine's usual limit."""

CHUNK_SHARE = 8
"""A chunk is at most this fraction (1 / n) of the base's tokens."""


class PoolShape(NamedTuple):
    """A pool that is sized with others.

    Attributes:
        reach: its component's.
        token_nbytes: bytes that its slots take for one token; for a state, bytes of one state.
    """

    reach: Reach
    token_nbytes: float

    @property
    def is_bounded(self) -> bool:
        """Whether a request needs a bounded number of its tokens, however long the request is."""
        return self.reach.is_state or math.isfinite(self.reach.width_tokens)


def split_tokens(
    shapes: Sequence[PoolShape], tokens: int, page_size: int, points: float = 1.0
) -> list[int]:
    """The tokens that each pool is sized for, beside a base of `tokens`.

    Args:
        shapes: all pools of a tier that follow its size, in any order.
        tokens: tokens of the base: the pools whose reach has no bound, or else the widest.
        page_size: tokens per page.
        points: keep that many times the resume points of the rule.

    Returns:
        Tokens by pool, in whole pages. A state counts as `POINT_TOKENS` tokens, as a pool of states
        is sized by default.
    """
    bounded = [place for place, shape in enumerate(shapes) if shape.is_bounded]
    if bounded and len(bounded) == len(shapes):
        bounded.remove(max(bounded, key=lambda place: shapes[place].reach.width_tokens))
    base_nbytes, point_nbytes = 0.0, 0.0
    for place, shape in enumerate(shapes):
        if place in bounded:
            point_nbytes += _point_tokens(shape, page_size) * shape.token_nbytes
        else:
            base_nbytes += shape.token_nbytes
    spacing = (
        max(POINT_TOKENS, point_nbytes / base_nbytes / POINT_COST) if bounded else POINT_TOKENS
    )
    kept = points * tokens / spacing
    found = []
    for place, shape in enumerate(shapes):
        needed: float = tokens
        if place in bounded and shape.reach.is_state:
            needed = kept * POINT_TOKENS
        elif place in bounded:
            window = _point_tokens(shape, page_size)
            chunk = max(page_size, min(CHUNK_TOKENS, tokens // CHUNK_SHARE))
            needed = 2 * window + chunk + kept * window
        found.append(max(1, int(min(tokens, needed)) // page_size) * page_size)
    return found


def _point_tokens(shape: PoolShape, page_size: int) -> int:
    """Tokens of one resume point: a window at any boundary, and slack; 1 for a state."""
    if shape.reach.is_state:
        return 1
    return (math.ceil(shape.reach.width_tokens / page_size) + 2) * page_size
