"""vLLM's blocks are shared out: each id has one owner, and tables name its own."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft import ConfigError
from kvgraft_vllm.block_layout import lay_out


@pytest.mark.parametrize(
    "windows", [(None,), (None, None), (None, 15, 15, 15), (15, None, 30, 15), (15, 15), (7, 30)]
)
@pytest.mark.parametrize("n_blocks", [97, 160, 1001])
def test_each_id_but_the_null_blocks_has_at_most_one_owner(
    windows: tuple[int | None, ...], n_blocks: int
) -> None:
    layout = lay_out(windows, n_blocks, 4, window_share=0.3, chunk=24)
    owners: list[int] = []
    groups: list[int] = []
    for each in layout.ranges:
        groups += each.groups
        for ids in each.block_ids(np.arange(each.n_slots, dtype=np.int32)):
            owners += ids
    assert sorted(groups) == list(range(len(windows)))
    assert len(owners) == len(set(owners))
    assert min(owners) == 1
    assert max(owners) < n_blocks
    assert len(owners) > 0.9 * n_blocks - 10


def test_pages_without_a_slot_are_the_null_block() -> None:
    full, window = lay_out((None, 15, 15), 100, 4, window_share=0.5, chunk=8).ranges
    slots = np.array([-1, 0, 2], np.int32)
    assert full.block_ids(slots) == [[0, 1, 3]]
    first = 1 + full.n_slots
    assert window.block_ids(slots) == [[0, first, first + 4], [0, first + 1, first + 5]]


def test_a_window_has_blocks_for_itself_and_a_chunk() -> None:
    full, window = lay_out((None, 400), 400, 4, window_share=0.1, chunk=100).ranges
    assert window.n_slots == 128
    assert full.n_slots == 399 - 128


def test_too_few_blocks_are_refused_in_a_line() -> None:
    with pytest.raises(ConfigError, match="30 blocks of 4 tokens are too few") as refused:
        lay_out((None, 400), 30, 4, window_share=0.1, chunk=100)
    assert "\n" not in str(refused.value)
