"""Which planes go through a ring on the device, and which straight over the bus.

Planes that are contiguous in rows of host memory cross the bus as one piece, if their rows are
small. Everything that does not depend on the rows of a transfer is computed once for each set of
planes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from kvgraft.devices import PlaneCopy
from kvgraft_accelerator.fragments import Numbers, ids, planes_of

__all__ = ["Route", "Routes", "Slab", "Straight"]

T = TypeVar("T")

MOST_KNOWN = 64
"""Sets of planes whose routes are kept."""


class Sides(Protocol):
    """Says which side of a direction is which."""

    def __call__(self, source: T, target: T) -> tuple[T, T]:
        """The device's side first; between two of the device, the source first."""


class Slab(NamedTuple):
    """Planes that are contiguous in rows of host memory, as addresses.

    Attributes:
        layers: the layers of its planes, ascending.
        planes: `Rows.planes` between the device and slabs anywhere on it: a slab's row is the
            address where it begins.
        host: address of slab 0.
        host_step: bytes from slab to slab.
        nbytes: bytes of a slab.
    """

    layers: Sequence[int]
    planes: Numbers
    host: int
    host_step: int
    nbytes: int


class Straight(NamedTuple):
    """Planes that cross the bus as they are.

    Attributes:
        planes: `Rows.planes`, first layers first.
        layers: per layer its number, where its planes begin and end in `planes`, and the bytes of
            their rows together.
    """

    planes: Numbers
    layers: list[tuple[int, int, int, int]]


class Route(NamedTuple):
    """How a set of planes is copied; kept, since the same planes are copied again and again.

    Attributes:
        copies: references that keep the tensors, and so their `id`s and addresses.
        slabs: planes that go through the ring.
        straight: the other planes.
        every: all of them, as if they went straight.
        row_nbytes: bytes of one row of all planes together. n_source_rows, n_target_rows: rows that
        every plane has.
    """

    copies: Sequence[PlaneCopy]
    slabs: list[Slab]
    straight: Straight
    every: Straight
    row_nbytes: int
    n_source_rows: int
    n_target_rows: int


class Routes:
    """Finds the route of planes, and remembers it.

    Args:
        address: gives the address of a tensor's first byte; None for memory that copies cannot
            address.
        sides: which side is which.
        straight_nbytes: rows of this size and more go straight.
        piece_nbytes: pieces of a slab are not smaller than this, if the slab is not.
        most_nbytes: pieces of a slab are not larger than this; 0 if all rows go straight.
    """

    def __init__(
        self,
        address: Callable[[torch.Tensor], int | None],
        sides: Sides,
        straight_nbytes: int,
        piece_nbytes: int,
        most_nbytes: int,
    ) -> None:
        self._address, self._sides = address, sides
        self._most_row_nbytes = min(most_nbytes, straight_nbytes - 1)
        self._piece_nbytes, self._most_nbytes = max(1, piece_nbytes), most_nbytes
        self._known: dict[tuple[int, ...], Route | None] = {}

    def of(self, copies: Sequence[PlaneCopy]) -> Route | None:
        """The route of planes that are copied together; None if some have no address."""
        key = tuple(ids(copies, "source") + ids(copies, "target"))
        if key not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._find(copies)
        return self._known[key]

    def _find(self, copies: Sequence[PlaneCopy]) -> Route | None:
        if any(self._address(tensor) is None for copy in copies for tensor in copy[1:3]):
            return None
        by_memory: dict[tuple[int, int], list[_Plane]] = {}
        for number, copy in enumerate(copies):
            on_device, on_host = self._sides(copy.source, copy.target)
            crosses = _is_on_host(on_host) and not _is_on_host(on_device)
            if crosses and row_nbytes(on_host) <= self._most_row_nbytes:
                key = on_host.untyped_storage().data_ptr(), _stride(on_host)
                plane = _Plane(_start(on_host), row_nbytes(on_host), number)
                by_memory.setdefault(key, []).append(plane)
        runs = [run for planes in by_memory.values() for run in _runs(planes)]
        found = [some for run in runs for some in self._pieces(run) if len(some) > 1]
        staged = {plane.number for some in found for plane in some}
        return Route(
            copies,
            [self._slab(some, copies) for some in found],
            self._straight([each for at, each in enumerate(copies) if at not in staged]),
            self._straight(copies),
            sum(row_nbytes(copy.source) for copy in copies),
            min(len(copy.source) for copy in copies),
            min(len(copy.target) for copy in copies),
        )

    def _pieces(self, run: Sequence[_Plane]) -> Iterator[list[_Plane]]:
        """Split into as many equal pieces as are not too small."""
        nbytes = _nbytes(run)
        n_pieces = max(1, nbytes // self._piece_nbytes)
        return _cut(run, min(self._most_nbytes, -(-nbytes // n_pieces)))

    def _straight(self, copies: Sequence[PlaneCopy]) -> Straight:
        copies = sorted(copies, key=lambda copy: copy.layer)
        layers = []
        end = 0
        for layer, group in groupby(copies, key=lambda copy: copy.layer):
            widths = [row_nbytes(copy.source) for copy in group]
            first, end = end, end + len(widths)
            layers.append((layer, first, end, sum(widths)))
        return Straight(planes_of(copies, lambda tensor: self._address(tensor) or 0), layers)

    def _slab(self, planes: Sequence[_Plane], copies: Sequence[PlaneCopy]) -> Slab:
        some = [copies[plane.number] for plane in planes]
        on_device, on_host = zip(*(self._sides(copy.source, copy.target) for copy in some))
        starts = self._sides(
            [self._address(tensor) for tensor in on_device],
            [plane.start - planes[0].start for plane in planes],
        )
        steps = self._sides([_stride(tensor) for tensor in on_device], [1] * len(planes))
        table = [*starts, *steps, [plane.nbytes for plane in planes]]
        return Slab(
            tuple(sorted({copy.layer for copy in some})),
            np.array(table, np.int64),
            self._address(on_host[0]) or 0,
            _stride(on_host[0]),
            _nbytes(planes),
        )


class _Plane(NamedTuple):
    """A plane of host memory: its first byte, bytes of a row, index of its copy."""

    start: int
    nbytes: int
    number: int


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def row_nbytes(plane: torch.Tensor) -> int:
    """Bytes of a row."""
    return plane.shape[1] * plane.element_size()


def _stride(plane: torch.Tensor) -> int:
    """Bytes from row to row."""
    return plane.stride(0) * plane.element_size()


def _start(plane: torch.Tensor) -> int:
    """The first byte of row 0 in its memory."""
    return int(plane.storage_offset()) * plane.element_size()


def _nbytes(planes: Sequence[_Plane]) -> int:
    """Bytes of contiguous planes."""
    return planes[-1].start + planes[-1].nbytes - planes[0].start


def _runs(planes: Iterable[_Plane]) -> Iterator[list[_Plane]]:
    """Group planes that are contiguous, in the order of their bytes."""
    run: list[_Plane] = []
    for plane in sorted(planes):
        if run and plane.start != run[-1].start + run[-1].nbytes:
            yield run
            run = []
        run.append(plane)
    yield run


def _cut(run: Sequence[_Plane], most_nbytes: int) -> Iterator[list[_Plane]]:
    """Split a run into groups of at most so many bytes, with at least one plane."""
    some: list[_Plane] = []
    for plane in run:
        if some and _nbytes([*some[:1], plane]) > most_nbytes:
            yield some
            some = []
        some.append(plane)
    yield some
