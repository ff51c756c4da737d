"""Copies as arrays of addresses, for calls that take many at once.

A call such as `cuMemcpyBatchAsync`, or a kernel, moves thousands of pieces. They are made by numpy:
per plane a little, and per piece nothing in Python. A kernel makes the pieces of rows itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvgraft.devices import PlaneCopy

__all__ = ["Fragmenter", "Fragments", "Numbers", "Rows", "by_rows", "expect_within", "joined"]

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


NONE = Fragments(*np.empty((3, 0), np.int64))


class Rows(NamedTuple):
    """The same rows of several planes, to be copied: a piece for each row and plane.

    Attributes:
        planes: of each plane the source's and the target's row 0, bytes from row to row of both,
            bytes of a row; int64 `[5, n_planes]`. It does not change.
        sources: rows, int64 `[n]`.
        targets: likewise.
        lengths: rows that follow one another from there, likewise; more than one only where the
            rows of all planes touch on both sides.
    """

    planes: Numbers
    sources: Numbers
    targets: Numbers
    lengths: Numbers

    def fragments(self) -> Fragments:
        """The pieces, plane by plane."""
        source, target, source_step, target_step, width = self.planes[:, :, None]
        return Fragments(
            (source + self.sources * source_step).ravel(),
            (target + self.targets * target_step).ravel(),
            (self.lengths * width).ravel(),
        )


class _Planes(NamedTuple):
    """Planes that are copied together.

    Attributes:
        copies: keep the tensors, and so their addresses and `id`s.
        dense: `Rows.planes` of those whose rows touch on both sides.
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
        """The pieces of some copies; rows that are neighbours on both sides are one piece.

        Raises:
            IndexError: a row that a plane does not have.
        """
        parts = []
        for group in by_rows(copies):
            planes = self._planes(group)
            source_rows, target_rows = group[0].source_rows.numpy(), group[0].target_rows.numpy()
            expect_within(source_rows, planes.n_source_rows)
            expect_within(target_rows, planes.n_target_rows)
            if not len(source_rows):
                continue
            if planes.dense.size:
                order = np.argsort(source_rows)
                runs = joined(source_rows[order], target_rows[order], 1)
                parts.append(Rows(planes.dense, *runs).fragments())
            if planes.strided.size:
                ones = np.ones(len(source_rows), np.int64)
                parts.append(Rows(planes.strided, source_rows, target_rows, ones).fragments())
        if len(parts) == 1:
            return parts[0]
        return Fragments(*(np.concatenate(each) for each in zip(NONE, *parts)))

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
                found[is_dense].T,
                found[~is_dense].T,
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
    """Pieces of one size, at least one; those that follow one another on both sides are one."""
    jumps = np.diff(sources) != nbytes
    jumps |= np.diff(targets) != nbytes
    bounds = np.concatenate(([0], jumps.nonzero()[0] + 1, [len(sources)]))
    first = bounds[:-1]
    return Fragments(sources[first], targets[first], np.diff(bounds) * nbytes)
