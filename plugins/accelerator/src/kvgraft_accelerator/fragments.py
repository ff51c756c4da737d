"""Copies as arrays of addresses, for calls that take many at once.

A call such as `cuMemcpyBatchAsync`, or a kernel with a table of addresses, moves thousands of
pieces. They are made by numpy: per plane a little, and per piece nothing in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvgraft.devices import PlaneCopy

__all__ = ["Fragmenter", "Fragments", "Numbers", "by_rows", "expect_within", "joined"]

Numbers = npt.NDArray[np.int64]

MOST_KNOWN = 64
"""Sets of planes whose addresses are kept."""


class Fragments(NamedTuple):
    """Pieces of memory to copy, each of one run of bytes.

    Attributes:
        sources: addresses, int64 `[n]`.
        targets: addresses, int64 `[n]`.
        nbytes: their sizes, int64 `[n]`.
    """

    sources: Numbers
    targets: Numbers
    nbytes: Numbers


class _Planes(NamedTuple):
    """Planes that are copied together.

    Attributes:
        copies: keep the tensors, and so their addresses and `id`s.
        dense: of planes whose rows touch on both sides: source, target, bytes from row to row of
            each, bytes of a row; int64 `[n_planes, 5]`.
        strided: of the others.
        n_source_rows, n_target_rows: rows that every plane has.
    """

    copies: Sequence[PlaneCopy]
    dense: Numbers
    strided: Numbers
    n_source_rows: int
    n_target_rows: int


class Fragmenter:
    """Makes fragments of copies; remembers the addresses of planes.

    Args:
        address: the first byte of a tensor.
    """

    def __init__(self, address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr) -> None:
        self._address = address
        self._known: dict[tuple[int, ...], _Planes] = {}

    def fragments(self, copies: Sequence[PlaneCopy]) -> Fragments:
        """The pieces of some copies; rows that follow one another on both sides are one piece.

        Raises:
            IndexError: a row that a plane does not have.
        """
        parts = []
        for group in by_rows(copies):
            planes = self._planes(group)
            source_rows, target_rows = group[0].source_rows.numpy(), group[0].target_rows.numpy()
            expect_within(source_rows, planes.n_source_rows)
            expect_within(target_rows, planes.n_target_rows)
            if len(planes.dense):
                parts.append(_pieces(planes.dense, *_runs(source_rows, target_rows)))
            if len(planes.strided):
                ones = np.ones(len(source_rows), np.int64)
                parts.append(_pieces(planes.strided, source_rows, target_rows, ones))
        if len(parts) == 1:
            return Fragments(*parts[0])
        return Fragments(*np.concatenate(parts or [np.empty((3, 0), np.int64)], axis=1))

    def _planes(self, copies: Sequence[PlaneCopy]) -> _Planes:
        key = tuple([id(tensor) for copy in copies for tensor in copy[1:3]])
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            found = np.array([self._plane(copy) for copy in copies], np.int64)
            is_dense = (found[:, 2] == found[:, 4]) & (found[:, 3] == found[:, 4])
            known = self._known[key] = _Planes(
                copies,
                found[is_dense],
                found[~is_dense],
                min(len(copy.source) for copy in copies),
                min(len(copy.target) for copy in copies),
            )
        return known

    def _plane(self, copy: PlaneCopy) -> tuple[int, ...]:
        source, target, size = copy.source, copy.target, copy.source.element_size()
        steps = source.stride(0) * size, target.stride(0) * size
        return (self._address(source), self._address(target), *steps, source.shape[1] * size)


def by_rows(copies: Sequence[PlaneCopy]) -> Collection[Sequence[PlaneCopy]]:
    """Copies of the same rows together."""
    if len({id(each[3]) for each in copies}) == 1 == len({id(each[4]) for each in copies}):
        return [copies]
    alike: dict[tuple[int, int], list[PlaneCopy]] = {}
    for copy in copies:
        alike.setdefault((id(copy[3]), id(copy[4])), []).append(copy)
    return alike.values()


def expect_within(rows: Numbers, n_rows: int) -> None:
    """Refuse rows that a plane does not have.

    Raises:
        IndexError: naming them.
    """
    if len(rows) and (rows.min() < 0 or rows.max() >= n_rows):
        raise IndexError(f"rows {rows.min()} to {rows.max()} of a plane of {n_rows}")


def joined(sources: Numbers, targets: Numbers, nbytes: int) -> Fragments:
    """Pieces of one size; those that follow one another on both sides are one."""
    goes_on = (np.diff(sources) == nbytes) & (np.diff(targets) == nbytes)
    first = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    lengths = np.diff(np.append(first, len(sources)))
    return Fragments(sources[first], targets[first], lengths * nbytes)


def _runs(source_rows: Numbers, target_rows: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """First rows of runs that go on on both sides, and their lengths."""
    goes_on = (np.diff(source_rows) == 1) & (np.diff(target_rows) == 1)
    first = np.flatnonzero(np.concatenate(([True], ~goes_on))) if len(source_rows) else source_rows
    lengths = np.diff(np.append(first, len(source_rows)))
    return source_rows[first], target_rows[first], lengths


def _pieces(
    planes: Numbers, source_rows: Numbers, target_rows: Numbers, lengths: Numbers
) -> Numbers:
    """Every plane's pieces, int64 `[3, n]`."""
    source, target, source_step, target_step, width = planes.T[:, :, None]
    found = np.empty((3, len(planes), len(source_rows)), np.int64)
    found[0] = source + source_rows * source_step
    found[1] = target + target_rows * target_step
    found[2] = lengths * width
    return found.reshape(3, -1)
