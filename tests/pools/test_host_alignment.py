"""Host memory is where disks can read into it."""

from __future__ import annotations

import pytest
import torch

from kvgraft.pools import HostMirror, PlaneSpec
from kvgraft_storage.memory import is_aligned


@pytest.mark.parametrize("n_values", [1, 100, 32_767, 32_768, 40_000, 1 << 20])
@pytest.mark.parametrize("n_slots", [0, 1, 7])
def test_large_slabs_are_whole_blocks(n_values: int, n_slots: int) -> None:
    mirror = HostMirror([PlaneSpec(0, "k", (n_values,), torch.float16)], n_slots)
    natural = -(-n_values * 2 // 64) * 64
    assert natural <= mirror.slab_nbytes <= natural * 1.0625
    assert tuple(mirror.slab.shape) == (n_slots, mirror.slab_nbytes)
    rows = mirror.slab.numpy()
    for slot in range(n_slots):
        assert is_aligned(rows[slot].data) == (natural >= 65_536 or natural % 4096 == 0)
    assert mirror.plane(0, "k").shape == (n_slots, n_values)
