"""Copies of slots as pairs of vLLM's blocks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from kvgraft_vllm.block_copies import BlockCopies
from kvgraft_vllm.block_layout import STATE, BlockRange

BLOCKS = BlockRange("mamba", STATE, (1, 3), first=5, n_slots=8)


def slots(*numbers: int) -> bytes:
    return np.array(numbers, np.int32).tobytes()


def test_pairs_name_the_blocks_of_every_group_once() -> None:
    pool = SimpleNamespace()
    copies = BlockCopies(BLOCKS, pool)
    pool.on_copy(slots(0, 2), slots(1, 3))
    assert sorted(copies.pairs()) == [(5, 7), (6, 8), (9, 11), (10, 12)]
    assert copies.pairs() == []
