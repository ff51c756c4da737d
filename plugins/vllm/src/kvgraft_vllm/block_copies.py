"""Copies of states and of moved data, as pairs of blocks, for vLLM's workers to make."""

from __future__ import annotations

from itertools import starmap
from typing import Any

from kvgraft_scheduling import SlotCopies
from kvgraft_vllm.block_layout import BlockRange

__all__ = ["BlockCopies"]


class BlockCopies(SlotCopies):
    """Collects the copies of one component's slots until they are taken, as pairs of blocks.

    Args:
        blocks: the component's blocks.
        pool: their pool, which stops copying by itself.
    """

    def __init__(self, blocks: BlockRange, pool: Any) -> None:
        super().__init__(pool)
        self._blocks = blocks

    def pairs(self) -> list[tuple[int, int]]:
        """Pairs of block ids, source and target, of every group; each is returned once."""
        sources, targets = self.take()
        of_groups = zip(self._blocks.block_ids(sources), self._blocks.block_ids(targets))
        return [pair for each in starmap(zip, of_groups) for pair in each]
