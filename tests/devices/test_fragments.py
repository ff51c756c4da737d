"""Copies as arrays of addresses: the same bytes as row by row."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvgraft.devices import PlaneCopy
from kvgraft.pools.component import run_copy
from kvgraft_accelerator.fragments import Fragmenter, joined

N_ROWS = 12


def planes(n_planes: int, *, dense: bool) -> list[torch.Tensor]:
    """Planes of their own, or side by side in slabs."""
    width = 3 * n_planes
    if dense:
        return list(torch.arange(N_ROWS * width).view(n_planes, N_ROWS, 3))
    slabs = torch.arange(N_ROWS * width).view(N_ROWS, width)
    return [slabs[:, 3 * at : 3 * at + 3] for at in range(n_planes)]


def moved(fragmenter: Fragmenter, copies: list[PlaneCopy]) -> int:
    """Move the fragments; how many there are."""
    found = fragmenter.fragments(copies)
    for source, target, nbytes in zip(*(each.tolist() for each in found)):
        ctypes.memmove(target, source, nbytes)
    return len(found.nbytes)


@given(
    rows=st.lists(st.integers(0, N_ROWS - 1), unique=True, max_size=N_ROWS),
    into=st.permutations(range(N_ROWS)),
    n_planes=st.integers(0, 3),
    dense=st.tuples(st.booleans(), st.booleans()),
    one_index=st.booleans(),
)
def test_fragments_move_the_same_bytes_as_rows(
    rows: list[int],
    into: list[int],
    n_planes: int,
    dense: tuple[bool, bool],
    *,
    one_index: bool,
) -> None:
    sources = planes(n_planes, dense=dense[0]) if n_planes else []
    found, wanted = (
        [each.neg() if dense[1] else each for each in planes(n_planes, dense=dense[1])]
        for _ in range(2)
    )
    read, write = torch.tensor(rows, dtype=torch.int64), torch.tensor(into[: len(rows)])
    write = write.to(torch.int64)
    fragmenter = Fragmenter()
    for targets in (found, wanted):
        copies = [
            PlaneCopy(0, *pair, read if one_index else read.clone(), write)
            for pair in zip(sources, targets)
        ]
        if targets is found:
            moved(fragmenter, copies)
            assert moved(fragmenter, copies) <= n_planes * len(rows)
        else:
            for copy in copies:
                run_copy(copy)
    assert all(map(torch.equal, found, wanted))


def test_rows_that_are_neighbours_on_both_sides_are_one_fragment_in_any_order() -> None:
    source, target = (planes(1, dense=True)[0] for _ in range(2))
    rows, into = torch.tensor([3, 7, 1, 8, 2, 0]), torch.tensor([6, 9, 4, 8, 5, 0])
    found = Fragmenter().fragments([PlaneCopy(0, source, target, rows, into)])
    assert sorted(found.nbytes.tolist()) == [24, 24, 24, 3 * 24]


@pytest.mark.parametrize("row", [-1, N_ROWS])
def test_a_row_that_a_plane_does_not_have_is_refused(row: int) -> None:
    (plane,) = planes(1, dense=True)
    good, bad = torch.tensor([0]), torch.tensor([row])
    for rows in ((good, bad), (bad, good)):
        with pytest.raises(IndexError, match=f"rows {row} to {row} of a plane of {N_ROWS}"):
            Fragmenter().fragments([PlaneCopy(0, plane, plane, *rows)])


@given(
    steps=st.lists(st.sampled_from([1, 2, -3]), max_size=20),
    into=st.lists(st.sampled_from([1, 1, 5]), max_size=20),
)
def test_pieces_that_follow_one_another_on_both_sides_are_one(
    steps: list[int], into: list[int]
) -> None:
    n = min(len(steps), len(into))
    sources, targets = (8 * np.cumsum([9, *each[:n]]) for each in (steps, into))
    found = joined(sources, targets, 8)
    assert len(found.nbytes) == 1 + sum(pair != (1, 1) for pair in zip(steps[:n], into))
    covered = [
        (source + at, target + at)
        for source, target, nbytes in zip(*(each.tolist() for each in found))
        for at in range(0, nbytes, 8)
    ]
    assert covered == list(zip(sources.tolist(), targets.tolist()))
