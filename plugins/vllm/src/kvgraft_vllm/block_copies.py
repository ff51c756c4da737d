"""Copies of states and of moved data, as pairs of blocks, for vLLM's workers to make."""

from __future__ import annotations

from itertools import starmap
from typing import Any

import numpy as np

from kvgraft_vllm.block_layout import BlockRange

__all__ = ["BlockCopies"]


class BlockCopies:
    """Collects the copies of one component's slots until they are taken.

    A worker reads all sources before it writes any target. So a copy of a copy becomes a copy of
    the first source, and the last of several copies to one target wins.

    Args:
        blocks: the component's blocks.
        pool: their pool, which stops copying by itself.
    """

    def __init__(self, blocks: BlockRange, pool: Any) -> None:
        self._blocks = blocks
        self._sources: dict[int, int] = {}
        """By target."""
        pool.on_copy = self.add

    def add(self, sources: bytes, targets: bytes) -> None:
        """Add copies of slots, both int32 `[n]` as bytes; no slot is both a source and a target."""
        numbers = np.frombuffer(sources, np.int32).tolist()
        first = [self._sources.get(source, source) for source in numbers]
        for source, target in zip(first, np.frombuffer(targets, np.int32).tolist()):
            if source == target:
                self._sources.pop(target, None)
            else:
                self._sources[target] = source

    def take(self) -> list[tuple[int, int]]:
        """Pairs of block ids, source and target, of every group; each is returned once."""
        pairs = np.array([*self._sources.items()], np.int32).reshape(-1, 2)
        self._sources.clear()
        targets, sources = pairs.T
        of_groups = zip(self._blocks.block_ids(sources), self._blocks.block_ids(targets))
        return [pair for each in starmap(zip, of_groups) for pair in each]
