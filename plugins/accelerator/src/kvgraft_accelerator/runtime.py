"""The device: torch's memory, and torch's streams and events that CUDA, ROCm and XPU share.

copies ──► ways: by addresses or row by row ──► a torch.Stream ──► a torch.Event
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from kvgraft.devices import PlaneCopy
from kvgraft.errors import ConfigError, TransferError
from kvgraft_accelerator import plain
from kvgraft_accelerator.cuda_driver import CudaDriver
from kvgraft_accelerator.fragments import Fragmenter, Fragments, Rows
from kvgraft_accelerator.page_locked import page_locked
from kvgraft_accelerator.protocol import CopySizes, Event, Purpose
from kvgraft_accelerator.ways import Ways, find_ways, parted

__all__ = ["Accelerator", "AcceleratorEvent", "AcceleratorStream"]

FIRST_LOOK_S, LAST_LOOK_S = 20e-6, 1e-3
"""Seconds between two checks of an event that the host waits for: the first, and the longest."""

PRIORITIES = {Purpose.LOAD_BACK: -1, Purpose.SCATTER: -1}
"""Lower numbers run first. The others have 0, torch's lowest priority, which a model's stream has
too, unless the engine chose another.
"""


class Accelerator:
    """A device that torch supports; see `StreamRuntime`. The scheduler's thread uses it.

    Args:
        name: as torch names it, such as `cuda` or `cuda:1`.
        sizes: thresholds between the ways of copies; by default those of `CopySizes`.
        ways: the ways of this device; found by default.

    Attributes:
        sizes: see above.
        ways: see above.
        stages: whether it has both ways that take addresses.

    Raises:
        ConfigError: torch does not have this device here, or no streams for it.
    """

    def __init__(self, name: str, sizes: CopySizes | None = None, ways: Ways | None = None) -> None:
        try:
            self.device = torch.empty(0, device=name).device  # with its index
            with torch.Stream(self.device):
                pass
        except (RuntimeError, AssertionError, AttributeError, TypeError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ConfigError(
                f"device {name!r}: torch {torch.__version__} has no streams for it, {reason}; "
                "use cpu, or torch 2.7 and later"
            ) from error
        self._driver = CudaDriver.find() if self.device.type == "cuda" else None
        if ways is None:
            ways = find_ways(self.device, self._driver, self.page_locked_for_now)
        self.ways = ways
        self._fragmenter = Fragmenter()
        self._locked: dict[int, torch.Tensor] = {}
        self.sizes = sizes or CopySizes()
        self.stages = self.ways.batched is not None and self.ways.kernel is not None

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, label: str) -> torch.Tensor:
        """Zeroed memory of the device, from torch's allocator."""
        del label
        return torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def page_locked(self, nbytes: int, label: str) -> torch.Tensor:
        """Zeroed host memory, page-locked as one block; it is kept as long as the device.

        Raises:
            MemoryError: CUDA locks no more of it.
            RuntimeError: torch cannot allocate it.
        """
        del label
        memory = self.page_locked_for_now(nbytes)
        self._locked[memory.untyped_storage().data_ptr()] = memory
        return memory

    def page_locked_for_now(self, nbytes: int) -> torch.Tensor:
        """The same, but unlocked with its last tensor."""
        if self._driver is None:
            return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
        torch.zeros(1, device=self.device)  # makes the device's context this thread's
        return page_locked(self._driver, nbytes)

    def is_page_locked(self, tensor: torch.Tensor) -> bool:
        """Whether copies to and from a host tensor are asynchronous."""
        return tensor.untyped_storage().data_ptr() in self._locked or tensor.is_pinned()

    def address(self, tensor: torch.Tensor) -> int | None:
        """Address of the first byte; None for pageable memory, or if no way takes addresses."""
        if not self.ways.by_address:
            return None
        if tensor.device.type == "cpu" and not self.is_page_locked(tensor):
            return None
        return tensor.data_ptr()

    def stream(self, purpose: Purpose) -> AcceleratorStream:
        """A new stream."""
        raw = torch.Stream(self.device, priority=PRIORITIES.get(purpose, 0))
        return AcceleratorStream(self, raw, purpose)

    def compute(self) -> AcceleratorStream:
        """Torch's current stream of the calling thread."""
        with _Told(f"{self.device}"):
            raw = torch.accelerator.current_stream(self.device)
        return AcceleratorStream(self, raw, Purpose.COMPUTE)

    def orders(self, fence: object) -> bool:
        """Whether it is an event of this device: of kvgraft or of torch."""
        if isinstance(fence, AcceleratorEvent):
            return fence.event.device.type == self.device.type
        module = torch.get_device_module(self.device)
        return isinstance(fence, (torch.Event, getattr(module, "Event", torch.Event)))

    def copy(
        self, groups: Sequence[Sequence[PlaneCopy]], stream: AcceleratorStream
    ) -> Iterator[None]:
        """Submit copies to torch's current stream; a generator, with a step for each group."""
        ways = self.ways
        if stream.purpose is Purpose.COMPUTE:  # CUDA's default stream takes no batched copies
            ways = ways._replace(batched=None)
        on_host = {
            id(each): each
            for group in groups
            for copy in group
            for each in copy[1:3]
            if each.device.type == "cpu"
        }
        if ways.by_address and all(map(self.is_page_locked, on_host.values())):
            for group in groups:
                fragments = self._fragmenter.fragments(group)
                for way, some in parted(ways, self.sizes, fragments, crosses_bus=bool(on_host)):
                    way(some, stream.raw)
                yield
        else:
            for group in groups:
                plain.copy_rows(group, stream, self.is_page_locked)
                yield


class AcceleratorEvent:
    """A point of a stream; see `Event`.

    Attributes:
        event: torch's, for an engine's own streams: `torch.cuda.current_stream().wait_event(it)`.
    """

    def __init__(self, event: torch.Event, told: _Told) -> None:
        self.event = event
        self._told = told

    def done(self) -> bool:
        """Whether the device reached it."""
        with self._told:
            return self.event.query()

    def wait(self, timeout: float | None = None) -> bool:
        """Poll until the device reached it, or `timeout` seconds are over.

        A lost device raises at the next check; torch's own wait has no time limit.
        """
        end = None if timeout is None else time.monotonic() + timeout
        pause = FIRST_LOOK_S
        while not self.done():
            left = pause if end is None else end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, LAST_LOOK_S)
        return True


class AcceleratorStream:
    """A stream; see `Stream`.

    Attributes:
        raw: torch's stream.
        purpose: its use.
    """

    def __init__(self, device: Accelerator, raw: torch.Stream, purpose: Purpose) -> None:
        self.raw, self.purpose = raw, purpose
        self._device = device
        self._told = _Told(f"{device.device}, stream {purpose.value}")

    def copy(self, groups: Sequence[Sequence[PlaneCopy]]) -> list[Event]:
        """Submit copies, group after group; see `Stream.copy`."""
        events: list[Event] = []
        with self._told, self.raw:
            for _ in self._device.copy(groups, self):
                events.append(self.record())
        return events

    def move(self, fragments: Fragments) -> None:
        """Submit pieces; see `Stream.move`."""
        device = self._device
        with self._told, self.raw:
            for way, some in parted(device.ways, device.sizes, fragments, crosses_bus=True):
                way(some, self.raw)

    def move_rows(self, rows: Rows) -> None:
        """Submit rows of a device that has the kernel; see `Stream.move_rows`."""
        assert self._device.ways.kernel is not None, "it stages nothing"
        with self._told, self.raw:
            self._device.ways.kernel.move_rows(rows, self.raw)

    def record(self) -> AcceleratorEvent:
        """An event behind all that was submitted so far."""
        with self._told:
            return AcceleratorEvent(self.raw.record_event(), self._told)

    def wait(self, event: Event) -> None:
        """Work submitted from now on runs after `event`, of kvgraft or of torch."""
        with self._told:
            self.raw.wait_event(_raw(event))


def _raw(event: Event) -> torch.Event:
    return event.event if isinstance(event, AcceleratorEvent) else cast(torch.Event, event)


class _Told:
    """Turns errors of torch and of the driver into transfer errors that say where.

    After a failure every call of the device raises.
    """

    __slots__ = ("_where",)

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (RuntimeError, OSError)):
            lines = str(error).splitlines() or [type(error).__name__]
            raise TransferError(f"{self._where}: {lines[0]}") from error
