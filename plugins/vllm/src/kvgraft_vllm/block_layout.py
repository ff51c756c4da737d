"""Divides the blocks of vLLM's pool among components: each gets a range of block ids.

vLLM numbers the blocks of all KV cache groups together, because they share memory. Groups of one
reach are one component here: a slot of it is one block of each group, and these blocks are
adjacent.

    0 │ full: slot 0, slot 1, ... ─►    moves    ◄─ ..., slot 1, slot 0 of window: groups 1, 2, 3 │
    ^ vLLM's null block

Two components share one budget: their ranges begin at the two ends, and the boundary between them
moves. Of more components each has a fixed range, one behind the other.

Beside `T` tokens of full attention a window of `W` tokens gets `2 W + chunk + T W / S` of them, at
most `T`, and states get `T / S`: for running requests, and for one resume point in `S` tokens.
If a point takes more than twice the blocks of `S` tokens, there are fewer points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraft import ConfigError

__all__ = ["STATE", "BlockLayout", "BlockRange", "LooksBack", "lay_out"]

STATE: Final = "state"

LooksBack = int | Literal["state"] | None
"""Tokens before the newest that a group attends to; None for all, `STATE` for a state."""

NULL_BLOCK = 0
"""The block id in a table where a group has no block."""

TOKEN_NBYTES = 16
"""Bytes of a layer in the cache's shapes; a component has one layer per group."""

BOTH_ENDS = 2
"""The number of ranges that can share one budget: one at each end of the pool."""

SLACK_PAGES = 3
"""Pages of a request beside its window and its chunk: partial ones at both ends, and a spare.
"""

CHUNK_SHARE = 8
"""A chunk is at most this fraction (1 / n) of the tokens."""

POINT_COST = 2
"""A resume point takes at most this many times the blocks of its tokens."""

FEWEST_STATES = 4
"""States of one request: the live one, one at its prompt's end, one behind it, and a spare one."""


class BlockRange(NamedTuple):
    """The blocks of one component.

    Attributes:
        component: its name in the cache.
        looks_back: tokens before the newest that its groups attend to.
        groups: numbers of its KV cache groups.
        first: its first block's id.
        n_slots: initial slots of its pool; each is a block of every group.
        step: 1, or -1 if its ids descend.
    """

    component: str
    looks_back: LooksBack
    groups: tuple[int, ...]
    first: int
    n_slots: int
    step: int = 1

    @property
    def is_state(self) -> bool:
        """Whether a slot is a state instead of a page."""
        return self.looks_back == STATE

    def block_ids(self, slots: npt.NDArray[np.int32]) -> list[list[int]]:
        """Block ids of each of its groups for a page table; the null block for no slot."""
        n_groups = len(self.groups)
        first = self.first + self.step * n_groups * slots
        return [
            np.where(slots < 0, NULL_BLOCK, first + self.step * place).tolist()
            for place in range(n_groups)
        ]


class BlockLayout(NamedTuple):
    """All components' blocks.

    Attributes:
        block_size: tokens of a block.
        ranges: one per component.
        n_groups: KV cache groups.
        n_blocks: all blocks, the null block included.
    """

    block_size: int
    ranges: tuple[BlockRange, ...]
    n_groups: int
    n_blocks: int

    @property
    def budget(self) -> int | None:
        """Bytes that the components share, in the cache's shapes; None if no boundary moves."""
        if len(self.ranges) != BOTH_ENDS:
            return None
        return (self.n_blocks - 1) * self.block_size * TOKEN_NBYTES

    @property
    def components(self) -> dict[str, dict[str, Any]]:
        """The components of a cache with these pools; a block of each group has equal bytes."""
        options: dict[str, dict[str, Any]] = {}
        for each in self.ranges:
            own: dict[str, Any] = {"n_layers": len(each.groups)}
            if each.looks_back == STATE:
                own |= {"states": each.n_slots, "conv_dim": 0}
                own |= {"n_heads": self.block_size, "head_dim": 1, "state_dim": 4}
            else:
                own["device_tokens"] = each.n_slots * self.block_size
            if isinstance(each.looks_back, int):
                own["window"] = each.looks_back
            options[each.component] = own
        return options


def lay_out(
    groups: Sequence[LooksBack], n_blocks: int, block_size: int, *, chunk: int, point_tokens: int
) -> BlockLayout:
    """Divide the ids `[1, n_blocks)`.

    Args:
        groups: per KV cache group, the tokens before the newest that it attends to.
        n_blocks: blocks of vLLM's pool, the null block included.
        block_size: tokens of a block.
        chunk: most tokens of a request in one step.
        point_tokens: tokens for which one resume point is kept, at least.

    Raises:
        ConfigError: too few blocks for one request.
    """
    members: dict[LooksBack, tuple[int, ...]] = {}
    for at, kind in sorted(enumerate(groups), key=lambda each: _order(each[1])):
        members[kind] = (*members.get(kind, ()), at)
    need = _Need(members, block_size, chunk, point_tokens)
    if need.n_blocks(1) >= n_blocks:
        said = f"{n_blocks} blocks of {block_size} tokens are too few for windows, states and"
        raise ConfigError(
            f"kvgraft-vllm: {said} a chunk of {chunk} tokens; give more, or smaller chunks"
        )
    n_pages, too_many = 1, n_blocks
    while too_many - n_pages > 1:
        middle = (n_pages + too_many) // 2
        if need.n_blocks(middle) < n_blocks:
            n_pages = middle
        else:
            too_many = middle
    ranges: list[BlockRange] = []
    first = 1
    for kind, of_kind in members.items():
        n_slots = need.slots(kind, n_pages)
        if len(members) == BOTH_ENDS and ranges:
            ranges.append(BlockRange(_name(kind), kind, of_kind, n_blocks - 1, n_slots, step=-1))
        else:
            ranges.append(BlockRange(_name(kind), kind, of_kind, first, n_slots))
        first += n_slots * len(of_kind)
    return BlockLayout(block_size, tuple(ranges), len(groups), n_blocks)


def _order(kind: LooksBack) -> tuple[bool, bool, int]:
    """Sort key: full attention first, then windows, the widest first, then states."""
    return kind == STATE, kind is not None, -kind if isinstance(kind, int) else 0


def _name(kind: LooksBack) -> str:
    return "mamba" if kind == STATE else "full" if kind is None else f"swa@{kind}"


class _Need:
    """The slots that each kind of group needs beside so many pages of the widest.

    Args:
        members: the groups of each kind, the widest first.
        block_size: tokens of a block.
        chunk: most tokens of a request in one step.
        point_tokens: tokens for which one resume point is kept, at least.
    """

    def __init__(
        self,
        members: Mapping[LooksBack, Sequence[int]],
        block_size: int,
        chunk: int,
        point_tokens: int,
    ) -> None:
        self._members = members
        self._chunk = math.ceil(chunk / block_size)
        self._base, *bounded = members
        self._point = {
            kind: 1 if kind == STATE else math.ceil(int(kind or 0) / block_size) + SLACK_PAGES
            for kind in bounded
        }
        cost = sum(len(members[kind]) * n_slots for kind, n_slots in self._point.items())
        least = cost / len(members[self._base]) / POINT_COST
        self._spacing = max(point_tokens / block_size, least)

    def slots(self, kind: LooksBack, n_pages: int) -> int:
        """Slots of one kind."""
        if kind == self._base:
            return n_pages
        point = self._point[kind]
        kept = int(n_pages * point / self._spacing)
        if kind == STATE:
            return max(FEWEST_STATES, kept)
        running = 2 * point + min(self._chunk, n_pages // CHUNK_SHARE)
        return max(point + self._chunk, min(n_pages, running + kept))

    def n_blocks(self, n_pages: int) -> int:
        """Blocks of all kinds together."""
        return sum(
            len(of_kind) * self.slots(kind, n_pages) for kind, of_kind in self._members.items()
        )
