"""The protocol of a device: memory, streams that run work in order, events that order streams.

    kernels ──► compute ──record──► produced
                                      │ wait
    backup  ────────────────────── move, move ──► events ──► the host asks `done`, or waits
    load    ── move layer 0 ──► event ──► compute.wait(event), then layer 0's kernels
            ── move layer 1 ──► event ──► ...

A call only submits. Work of one stream runs in the order of submission. Work of two streams runs in
any order, unless an event lies between, or the host waited for the first before it submitted the
second. So code that submits two works on the same bytes orders them: by one stream, by an event, or
by a wait of the host.

After a device is lost, every call of it and of its streams and events raises a `TransferError`.
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
    """Gathers rows of many planes on the device; lowest priority."""
    BACKUP = "backup"
    """DEVICE to HOST; lowest priority."""
    LOAD_BACK = "load-back"
    """HOST to DEVICE; high priority, since requests wait for it."""
    SCATTER = "scatter"
    """Scatters gathered rows into their planes; high priority, since requests wait for it."""

    @property
    def crosses_bus(self) -> bool:
        """Whether one side of its copies is on HOST."""
        return self in (Purpose.BACKUP, Purpose.LOAD_BACK)


class CopySizes(NamedTuple):
    """Thresholds that choose a way for copies; a benchmark may try others.

    The defaults are for PCIe 5 at 55 bytes a nanosecond. A batched call takes 0.9 µs of the host
    for each piece, and its copies begin when it returns.

    Attributes:
        ring_nbytes: device memory that small rows pass through, for each direction. A third of it
            takes 0.6 ms on the bus, of which the host works 0.2 ms.
        straight_nbytes: rows of this size and more are copied as they are.
        batched_nbytes: if a device has both ways, pieces of this size and more cross the bus by the
            driver's batched call, smaller ones by the kernel.
        piece_nbytes: a load's slabs are split into groups of layers as long as the pieces are not
            smaller than this.
        group_nbytes: layers of a load that go straight are announced together until they have as
            many bytes.
        few_nbytes: copies with fewer bytes than this, of all planes, go straight: the calls alone
            take as long.
        n_streams: streams that cross the bus in each direction; calls take turns, so that one
            begins while another ends. With more than one, the first layers of a load may arrive
            later.
        first_pieces: pieces of a submission's first call. Each later call takes twice as many:
            copies begin when a call returns, and each takes longer than its share of the call.
        first_nbytes: bytes in the first part of the ring that a submission fills; few, so that the
            bus begins early. Each later part takes twice as many, up to a whole part.
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
    """A point of a stream. It is a fence, so an engine may pass it to the cache."""

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

        Rows are on the device or in page-locked memory. Pageable memory is read at once, and
        written before the call returns.

        Returns:
            An event behind each group.
        """

    def move(self, fragments: Fragments) -> None:
        """Copy pieces over the bus, in any order.

        Args:
            fragments: at least one, none empty; addresses are those of `StreamRuntime.address`.
        """

    def move_rows(self, rows: Rows) -> None:
        """Copy rows within the device, in any order.

        Args:
            rows: at least one row of one plane; addresses as above.
        """

    def record(self) -> Event:
        """An event behind all work submitted so far."""

    def wait(self, event: Event) -> None:
        """Work submitted from now on runs after `event`; the host goes on."""


class StreamRuntime(Protocol):
    """One device: a `kvgraft.devices.DeviceRuntime` with streams.

    Attributes:
        device: the device of its tensors.
        sizes: thresholds between the ways of copies.
        stages: whether small rows are faster by way of a ring on the device.
    """

    device: torch.device
    sizes: CopySizes
    stages: bool

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, label: str) -> torch.Tensor:
        """Zeroed memory of the device; `label` names it in messages."""

    def page_locked(self, nbytes: int, label: str) -> torch.Tensor:
        """Zeroed host memory for asynchronous copies, uint8 `[nbytes]`."""

    def address(self, tensor: torch.Tensor) -> int | None:
        """Address of the first byte, for `Stream.move`; None for memory that it cannot access."""

    def stream(self, purpose: Purpose) -> Stream:
        """A new stream."""

    def compute(self) -> Stream:
        """The calling thread's current stream."""

    def orders(self, fence: object) -> bool:
        """Whether `fence` is an event that this device's streams can wait for."""
