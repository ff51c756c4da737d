"""Chooses the call that copies each piece.

There are three ways; a device has one or more. The driver's *batched* call uses no multiprocessors
of a GPU and is as fast as the bus for large pieces. A *kernel* copies within the device, and many
small pieces over the bus; there it slows down concurrent kernels. *Plain* copies of torch work
everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch

from kvgraft_accelerator.cuda_driver import CudaDriver
from kvgraft_accelerator.fragments import Fragments, Rows
from kvgraft_accelerator.protocol import CopySizes

__all__ = ["BatchedCopies", "RowsWay", "Way", "Ways", "find_ways", "parted"]

FEWEST = 16
"""The fewest small pieces that are worth a kernel's launch."""


class Way(Protocol):
    """A call that takes many copies."""

    def __call__(self, fragments: Fragments, stream: torch.Stream) -> None:
        """Submit copies of pieces, which run in any order; the arrays may change afterwards.

        Args:
            fragments: at least one, none empty.
            stream: torch's current one.
        """


class RowsWay(Way, Protocol):
    """A way that computes the pieces of rows itself."""

    def move_rows(self, rows: Rows, stream: torch.Stream) -> None:
        """Submit copies of rows; see `Stream.move_rows`."""


class Ways(NamedTuple):
    """The ways of a device that take addresses.

    Attributes:
        batched: the way for large pieces; None if the driver has no such call.
        kernel: the way for small pieces; None without Triton.
    """

    batched: Way | None = None
    kernel: RowsWay | None = None

    @property
    def by_address(self) -> bool:
        """Whether it has any."""
        return self.batched is not None or self.kernel is not None


def parted(
    ways: Ways, sizes: CopySizes, fragments: Fragments, *, crosses_bus: bool
) -> Iterator[tuple[Way, Fragments]]:
    """The pieces by way; each piece goes one way, and no group is empty.

    Args:
        ways: of the device, at least one.
        sizes: thresholds between the ways.
        fragments: any number of pieces of any size.
        crosses_bus: whether one side is on the host.
    """
    there = fragments.nbytes > 0
    large = there & (fragments.nbytes >= sizes.batched_nbytes)
    if ways.batched is None or (ways.kernel is not None and not crosses_bus):
        large = there & False
    elif ways.kernel is None or np.count_nonzero(there & ~large) < FEWEST:
        large = there
    for way, which in ((ways.batched, large), (ways.kernel, there & ~large)):
        if way is not None and which.any():
            yield way, fragments if which.all() else Fragments(*(each[which] for each in fragments))


class BatchedCopies:
    """The driver's call for many copies, CUDA 12.8 and later.

    Args:
        driver: the driver that has the call.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._handles: dict[int, int] = {}

    def __call__(self, fragments: Fragments, stream: torch.Stream) -> None:
        """Submit them; see `Way`."""
        handle = self._handles.get(stream.stream_id)
        if handle is None:
            handle = self._handles[stream.stream_id] = self.handle(stream)
        self._driver.copy_batch(fragments, handle)

    def handle(self, stream: torch.Stream) -> int:
        """The driver's name for a stream."""
        same = torch.cuda.Stream(  # type: ignore[no-untyped-call]
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )
        return int(same.cuda_stream)


def find_ways(
    device: torch.device, driver: CudaDriver | None, page_locked: Callable[[int], torch.Tensor]
) -> Ways:
    """The ways that a device has here; `page_locked` allocates memory for their tables."""
    batched = BatchedCopies(driver) if driver is not None and driver.can_batch else None
    try:
        from kvgraft_accelerator.kernels import KernelCopies
    except ImportError:
        return Ways(batched)
    return Ways(batched, KernelCopies(device, page_locked))
