"""Copies as arrays of addresses, for calls that take many copies at once.

A call such as `cuMemcpyBatchAsync`, or a kernel, moves thousands of pieces. numpy computes their
addresses, so Python runs per plane and not per piece. A kernel computes the addresses of rows
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvgraft.devices import PlaneCopy

__all__ = [
    "Fragmenter",
    "Fragments",
    "Numbers",
    "Rows",
    "by_rows",
    "expect_within",
    "ids",
    "joined",
    "pieces",
    "planes_of",
    "together",
]

Numbers = npt.NDArray[np.int64]

Address = Callable[[torch.Tensor], int]

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
        planes: per plane the addresses of row 0 of source and target, the strides of both, and the
            bytes of a row; int64 `[5, n_planes]`. It does not change.
        sources: rows, int64 `[n]`.
        targets: likewise.
        lengths: consecutive rows from there, likewise; more than one only if rows of all planes are
            contiguous on both sides.
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
        copies: references that keep the tensors, and so their addresses and `id`s.
        numbers: `Rows.planes`.
        n_source_rows, n_target_rows: rows that every plane has.
    """

    copies: Sequence[PlaneCopy]
    numbers: Numbers
    n_source_rows: int
    n_target_rows: int


class Fragmenter:
    """Makes fragments of copies; remembers the addresses of planes.

    Args:
        address: the first byte of a tensor.
    """

    def __init__(self, address: Address = torch.Tensor.data_ptr) -> None:
        self._address = address
        self._known: dict[tuple[int, ...], _Planes] = {}

    def fragments(self, copies: Sequence[PlaneCopy]) -> Fragments:
        """The pieces of some copies; rows that are contiguous on both sides are one piece.

        Raises:
            IndexError: a row that a plane does not have.
        """
        parts = []
        for group in by_rows(copies):
            planes = self._planes(group)
            source_rows, target_rows = group[0].source_rows.numpy(), group[0].target_rows.numpy()
            expect_within(source_rows, planes.n_source_rows)
            expect_within(target_rows, planes.n_target_rows)
            parts.append(pieces(planes.numbers, source_rows, target_rows))
        return together(parts)

    def _planes(self, copies: Sequence[PlaneCopy]) -> _Planes:
        key = tuple(ids(copies, "source") + ids(copies, "target"))
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            known = self._known[key] = _Planes(
                copies,
                planes_of(copies, self._address),
                min(len(copy.source) for copy in copies),
                min(len(copy.target) for copy in copies),
            )
        return known


def planes_of(copies: Sequence[PlaneCopy], address: Address) -> Numbers:
    """`Rows.planes` of some copies."""
    found = np.empty((5, len(copies)), np.int64)
    for at, copy in enumerate(copies):
        source, target, size = copy.source, copy.target, copy.source.element_size()
        steps = source.stride(0) * size, target.stride(0) * size
        found[:, at] = address(source), address(target), *steps, source.shape[1] * size
    return found


def pieces(planes: Numbers, sources: Numbers, targets: Numbers) -> Fragments:
    """Rows of planes; those that are contiguous on both sides are one piece."""
    ones = np.ones(len(sources), np.int64)
    is_dense = (planes[2:4] == planes[4]).all(axis=0)
    if not is_dense.any() or not len(sources):
        return Rows(planes, sources, targets, ones).fragments()
    order = np.argsort(sources)
    runs = joined(sources[order], targets[order], 1)
    dense = Rows(planes[:, is_dense], *runs).fragments()
    if is_dense.all():
        return dense
    return together([dense, Rows(planes[:, ~is_dense], sources, targets, ones).fragments()])


def together(parts: Sequence[Fragments]) -> Fragments:
    """All pieces of these."""
    if len(parts) == 1:
        return parts[0]
    return Fragments(*(np.concatenate(each) for each in zip(NONE, *parts)))


def by_rows(copies: Sequence[PlaneCopy]) -> Collection[Sequence[PlaneCopy]]:
    """Group copies of the same rows."""
    of_rows = ids(copies, "source_rows"), ids(copies, "target_rows")
    if len(set(of_rows[0])) == 1 == len(set(of_rows[1])):
        return [copies]
    alike: dict[tuple[int, int], list[PlaneCopy]] = {}
    for copy, pair in zip(copies, zip(*of_rows)):
        alike.setdefault(pair, []).append(copy)
    return alike.values()


def ids(copies: Sequence[PlaneCopy], name: str) -> list[int]:
    """The `id` of one tensor of each copy."""
    return list(map(id, map(attrgetter(name), copies)))


def expect_within(rows: Numbers, n_rows: int) -> None:
    """Refuse rows that a plane does not have.

    Raises:
        IndexError: it names them.
    """
    if len(rows) and (rows.min() < 0 or rows.max() >= n_rows):
        raise IndexError(f"rows {rows.min()} to {rows.max()} of a plane of {n_rows}")


def joined(sources: Numbers, targets: Numbers, nbytes: int) -> Fragments:
    """Join pieces of one size, at least one, that are contiguous on both sides."""
    jumps = np.diff(sources) != nbytes
    jumps |= np.diff(targets) != nbytes
    bounds = np.concatenate(([0], jumps.nonzero()[0] + 1, [len(sources)]))
    first = bounds[:-1]
    return Fragments(sources[first], targets[first], np.diff(bounds) * nbytes)
