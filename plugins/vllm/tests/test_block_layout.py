"""vLLM's blocks are shared out: each id has one owner, and tables name its own."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft import ConfigError
from kvgraft_vllm.block_layout import STATE, LooksBack, lay_out


@pytest.mark.parametrize(
    "groups",
    [
        (None,),
        (None, None),
        (None, 15, 15, 15),
        (15, None, 30, 15),
        (15, 15),
        (7, 30),
        (None, STATE, STATE, STATE),
        (STATE, 15, None, STATE),
    ],
)
@pytest.mark.parametrize("n_blocks", [97, 160, 1001])
def test_each_id_but_the_null_blocks_has_at_most_one_owner(
    groups: tuple[LooksBack, ...], n_blocks: int
) -> None:
    layout = lay_out(groups, n_blocks, 4, chunk=24, point_tokens=2048)
    owners: list[int] = []
    members: list[int] = []
    for each in layout.ranges:
        members += each.groups
        for ids in each.block_ids(np.arange(each.n_slots, dtype=np.int32)):
            owners += ids
    assert sorted(members) == list(range(len(groups)))
    assert len(owners) == len(set(owners))
    assert min(owners) == 1
    assert max(owners) < n_blocks
    assert len(owners) > 0.9 * n_blocks - 10


def test_pages_without_a_slot_are_the_null_block() -> None:
    full, window = lay_out((None, 15, 15), 100, 4, chunk=8, point_tokens=2048).ranges
    slots = np.array([-1, 0, 2], np.int32)
    assert full.block_ids(slots) == [[0, 1, 3]]
    assert window.block_ids(slots) == [[0, 99, 95], [0, 98, 94]]
    *_, states = lay_out((None, 15, STATE), 100, 4, chunk=8, point_tokens=2048).ranges
    assert states.block_ids(slots) == [[0, states.first, states.first + 2]]


def test_a_window_has_blocks_for_itself_and_a_chunk() -> None:
    full, window = lay_out((None, 400), 1001, 4, chunk=2000, point_tokens=2048).ranges
    assert window.n_slots == 603
    assert full.n_slots == 1000 - 603


def test_windows_and_states_get_what_resume_points_and_running_requests_need() -> None:
    """As in pools that are sized in bytes: Qwen3-Next, and gemma 3."""
    full, states = lay_out(
        (None, STATE, STATE, STATE), 6001, 544, chunk=8192, point_tokens=2048
    ).ranges
    assert 3 * states.n_slots == pytest.approx(full.n_slots * 544 / 2048 * 3, rel=0.01)
    assert full.n_slots + 3 * states.n_slots == pytest.approx(6000, abs=3)
    full, window = lay_out((None, *[1023] * 5), 60_001, 16, chunk=8192, point_tokens=2048).ranges
    assert 0.4 < window.n_slots / full.n_slots < 0.45


def test_two_components_share_one_budget() -> None:
    layout = lay_out((None, 15, 15), 101, 4, chunk=8, point_tokens=2048)
    assert layout.budget == 100 * 4 * 16
    for groups in ((None,), (None, 15, STATE)):
        assert lay_out(groups, 101, 4, chunk=8, point_tokens=2048).budget is None


def test_too_few_blocks_are_refused_in_a_line() -> None:
    with pytest.raises(ConfigError, match="30 blocks of 4 tokens are too few") as refused:
        lay_out((None, 400), 30, 4, chunk=100, point_tokens=2048)
    assert "\n" not in str(refused.value)
