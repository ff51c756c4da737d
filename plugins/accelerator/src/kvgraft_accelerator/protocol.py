"""The protocol of a device: memory, streams that run work in order, events that order streams.

    kernels ──► compute ──record──► produced
                                      │ wait
    backup  ────────────────────── move, move ──► events ──► the host asks `done`, or waits
    load    ── move layer 0 ──► event ──► compute.wait(event), then layer 0's kernels
            ── move layer 1 ──► event ──► ...

A call only submits. Work of one stream runs in the order of submission; works of two streams run
in any order, unless an event lies between them, or the host waited for the first before it
submitted the second. So whoever submits work that touches bytes which other work touches says why
that cannot happen at once: the same stream, an event, or a wait of the host.

Where a device is lost, every call of it and of its streams and events raises a `TransferError`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from kvgraft.devices import PlaneCopy
from kvgraft_accelerator.fragments import Fragments, Rows

__all__ = ["CopySizes", "Event", "Purpose", "Stream", "StreamRuntime"]


class Purpose(enum.Enum):
    """The use of a stream: the runtime gives it a priority, and messages name it."""

    COMPUTE = "compute"
    """The model's kernels, and copies within a pool."""
    GATHER = "gather"
    """Rows of many planes, put side by side on the device; behind everything else."""
    BACKUP = "backup"
    """DEVICE to HOST; behind everything else."""
    LOAD_BACK = "load-back"
    """HOST to DEVICE; requests wait for it."""
    SCATTER = "scatter"
    """Rows that lie side by side on the device, put into their planes; requests wait for it."""

    @property
    def crosses_bus(self) -> bool:
        """Whether its pieces are on HOST on one side."""
        return self in (Purpose.BACKUP, Purpose.LOAD_BACK)


class CopySizes(NamedTuple):
    """When copies take which way; a benchmark may try others.

    The defaults are for PCIe 5 at 55 bytes a nanosecond. A batched call takes 0.9 µs of the host
    for each piece, and its copies begin when it returns.

    Attributes:
        ring_nbytes: memory of the device that small rows pass through, for each direction. A third
            of it takes 0.6 ms on the bus, the host's share in that is 0.2 ms.
        straight_nbytes: rows of this size and more are copied as they are.
        batched_nbytes: where a device has both ways, pieces that cross the bus as they are go by
            the driver's call from this size on, and by the kernel below it.
        piece_nbytes: a load's slabs are split into groups of layers as long as the pieces are not
            smaller than this.
        group_nbytes: layers of a load that go straight are announced together until they have as
            many bytes.
        few_nbytes: less than this, of all planes, is copied as it is; calls take as much at least.
        n_streams: that cross the bus in each direction; calls take turns, so that one begins while
            another ends. Layers of a load may come later then.
        first_pieces: of a submission's first call. Each later one takes twice as many: copies begin
            when a call returns, and take longer than that for each piece.
        first_nbytes: to fill the first part of the ring with that a submission takes, so that the
            bus begins early. Each later one takes twice as many, a whole part at most.
    """

    ring_nbytes: int = 96 << 20
    straight_nbytes: int = 256 << 10
    batched_nbytes: int = 32 << 10
    piece_nbytes: int = 1 << 20
    group_nbytes: int = 128 << 20
    few_nbytes: int = 1 << 20
    n_streams: int = 1
    first_pieces: int = 32
    first_nbytes: int = 16 << 20


class Event(Protocol):
    """A point of a stream. It is a fence: whoever has one may hand it to the cache."""

    def done(self) -> bool:
        """Whether all work before it has ended; never blocks.

        Raises:
            TransferError: it failed.
        """

    def wait(self, timeout: float | None = None) -> bool:
        """Block the host until the point is reached, at most `timeout` seconds; whether it was.

        Raises:
            TransferError: work before it failed.
        """


class Stream(Protocol):
    """Work of a device that runs in the order of submission."""

    def copy(self, groups: Sequence[Sequence[PlaneCopy]]) -> list[Event]:
        """Copy rows, group after group; the copies of one group run in any order.

        Rows are on the device or in page-locked memory. Other memory of the host is read at once,
        and written before the call returns.

        Returns:
            An event for each group, behind it.
        """

    def move(self, fragments: Fragments) -> None:
        """Copy pieces over the bus, in any order.

        Args:
            fragments: at least one, none empty; addresses are those of `StreamRuntime.address`.
        """

    def move_rows(self, rows: Rows) -> None:
        """Copy rows within the device, in any order.

        Args:
            rows: at least one, of one plane at least; addresses as above.
        """

    def record(self) -> Event:
        """An event behind all that was submitted so far."""

    def wait(self, event: Event) -> None:
        """Work submitted from now on runs after `event`; the host goes on."""


class StreamRuntime(Protocol):
    """One device: all of a `kvgraft.devices.DeviceRuntime`, and its streams.

    Attributes:
        device: what its tensors say they are on.
        sizes: when to copy how.
        stages: whether small rows are faster through memory of the device where they lie side by
            side.
    """

    device: torch.device
    sizes: CopySizes
    stages: bool

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, label: str) -> torch.Tensor:
        """Zeroed memory of the device; `label` names it in messages."""

    def page_locked(self, nbytes: int, label: str) -> torch.Tensor:
        """Zeroed memory of the host that copies reach in the background, uint8 `[nbytes]`."""

    def address(self, tensor: torch.Tensor) -> int | None:
        """The first byte, for `Stream.move`; None where that does not reach it."""

    def stream(self, purpose: Purpose) -> Stream:
        """A new stream."""

    def compute(self) -> Stream:
        """The stream that the calling thread's kernels go to now."""

    def orders(self, fence: object) -> bool:
        """Whether `fence` is an event that this device's streams can wait for."""
