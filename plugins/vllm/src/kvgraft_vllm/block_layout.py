"""The blocks of vLLM's one pool, shared out to components: a range of block ids each.

vLLM numbers the blocks of all KV cache groups together, because they share memory. Groups of one
reach have their blocks side by side and are one component here: a slot of it is a block of each.

    0 │ full: slot 0, slot 1, ... │ window: slot 0 of groups 1, 2, 3, slot 1 of ... │ unused
    ^ vLLM's null block
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraft import ConfigError

__all__ = ["BlockLayout", "BlockRange", "lay_out"]

NULL_BLOCK = 0
"""The block that stands in a table where a group holds none."""

SLACK_PAGES = 3
"""Pages of a request beside its window and its chunk: the first and last of both, a spare."""


class BlockRange(NamedTuple):
    """The blocks of one component.

    Attributes:
        component: its name in the cache.
        window: tokens that its groups look back, beside the newest; None for all.
        groups: numbers of its KV cache groups.
        first: its first block's id.
        n_slots: slots of its pool; each is a block of every group.
    """

    component: str
    window: int | None
    groups: tuple[int, ...]
    first: int
    n_slots: int

    def block_ids(self, slots: npt.NDArray[np.int32]) -> list[list[int]]:
        """Block ids of each of its groups for a page table; the null block for no slot."""
        n_groups = len(self.groups)
        first = np.where(slots < 0, NULL_BLOCK, self.first + slots * n_groups)
        if n_groups == 1:
            return [first.tolist()]
        return [
            np.where(slots < 0, NULL_BLOCK, first + place).tolist() for place in range(n_groups)
        ]


class BlockLayout(NamedTuple):
    """All components' blocks.

    Attributes:
        block_size: tokens of a block.
        ranges: one per component.
        n_groups: KV cache groups.
    """

    block_size: int
    ranges: tuple[BlockRange, ...]
    n_groups: int

    @property
    def components(self) -> dict[str, dict[str, Any]]:
        """The components of a cache with these pools."""
        options: dict[str, dict[str, Any]] = {}
        for each in self.ranges:
            options[each.component] = {"device_tokens": each.n_slots * self.block_size}
            if each.window is not None:
                options[each.component]["window"] = each.window
        return options


def lay_out(
    windows: Sequence[int | None],
    n_blocks: int,
    block_size: int,
    *,
    window_share: float,
    chunk: int,
) -> BlockLayout:
    """Share out the ids `[1, n_blocks)`.

    Args:
        windows: per KV cache group, the tokens it looks back; None for all.
        n_blocks: blocks of vLLM's pool, the null block included.
        block_size: tokens of a block.
        window_share: slots of a component with a window for each slot of one without; at least
            those that one request needs.
        chunk: most tokens of a request that are computed at a time.

    Raises:
        ConfigError: there are too few blocks.
    """
    kinds = sorted({*windows}, key=lambda window: (window is not None, window or 0))
    groups = {
        kind: tuple(at for at, window in enumerate(windows) if window == kind) for kind in kinds
    }
    shares = {kind: window_share if kind is not None and None in kinds else 1.0 for kind in kinds}
    least = {
        kind: 1 if kind is None else -(-(kind + chunk) // block_size) + SLACK_PAGES
        for kind in kinds
    }
    weight = sum(len(groups[kind]) * shares[kind] for kind in kinds)
    slots = {kind: int((n_blocks - 1) / weight * shares[kind]) for kind in kinds}
    raised = {kind: max(slots[kind], least[kind]) for kind in kinds}
    if raised != slots and None in kinds:
        of_windows = sum(len(groups[kind]) * raised[kind] for kind in kinds if kind is not None)
        raised[None] = (n_blocks - 1 - of_windows) // len(groups[None])
    slots = raised
    n_used = sum(len(groups[kind]) * slots[kind] for kind in kinds)
    if min(slots.values()) < 1 or n_used >= n_blocks:
        said = f"{n_blocks} blocks of {block_size} tokens are too few for windows and a chunk"
        raise ConfigError(f"kvgraft-vllm: {said} of {chunk} tokens; give more, or smaller chunks")
    ranges: list[BlockRange] = []
    first = 1
    for kind in kinds:
        name = "full" if kind is None else f"swa@{kind}"
        ranges.append(BlockRange(name, kind, groups[kind], first, slots[kind]))
        first += slots[kind] * len(groups[kind])
    return BlockLayout(block_size, tuple(ranges), len(windows))
