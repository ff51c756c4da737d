"""Copies of slots, composed: all sources are read before any target is written."""

from __future__ import annotations

import random
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
    assert sorted(copies.take()) == [(5, 7), (6, 8), (9, 11), (10, 12)]
    assert copies.take() == []


def test_gathered_before_they_are_scattered_they_give_the_bytes_of_one_after_the_other() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        copies = BlockCopies(BLOCKS, SimpleNamespace())
        before = [*range(BLOCKS.n_slots)]
        wanted = [*before]
        for _ in range(rng.randrange(1, 9)):
            source, target = rng.sample(before, 2)
            copies.add(slots(source), slots(target))
            wanted[target] = wanted[source]
        found = [*before]
        for source, target in [((s - 5) // 2, (t - 5) // 2) for s, t in copies.take()]:
            found[target] = before[source]
        assert found == wanted
