"""The protocol of a device: memory, streams that run work in order, events that order streams.

    kernels ──► compute ──record──► produced
                                      │ wait
    backup  ────────────────────── copy, copy ──► events ──► the host asks `done`, or waits
    load    ── copy layer 0 ──► event ──► compute.wait(event), then layer 0's kernels
            ── copy layer 1 ──► event ──► ...

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


class CopySizes(NamedTuple):
    """Sizes from which one way to copy is faster than another, measured once per device and link.

    Attributes:
        ring_nbytes: memory of the device that backups gather small rows into.
        straight_nbytes: rows of this size and more are copied as they are.
        batched_nbytes: pieces of this size and more are copied by the driver's call for many
            copies, smaller ones by a kernel, where a device has both.
    """

    ring_nbytes: int = 96 << 20
    straight_nbytes: int = 32 << 10
    batched_nbytes: int = 28 << 10


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

    def record(self) -> Event:
        """An event behind all that was submitted so far."""

    def wait(self, event: Event) -> None:
        """Work submitted from now on runs after `event`; the host goes on."""


class StreamRuntime(Protocol):
    """One device: all of a `kvgraft.devices.DeviceRuntime`, and its streams.

    Attributes:
        device: what its tensors say they are on.
        sizes: when to copy how.
    """

    device: torch.device
    sizes: CopySizes

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, label: str) -> torch.Tensor:
        """Zeroed memory of the device; `label` names it in messages."""

    def page_locked(self, nbytes: int, label: str) -> torch.Tensor:
        """Zeroed memory of the host that copies reach in the background, uint8 `[nbytes]`."""

    def stream(self, purpose: Purpose) -> Stream:
        """A new stream."""

    def compute(self) -> Stream:
        """The stream that the calling thread's kernels go to now."""

    def orders(self, fence: object) -> bool:
        """Whether `fence` is an event that this device's streams can wait for."""
