"""The simulated device: memory, streams and a schedule that can be chosen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvgraft.devices import SIMULATED, PlaneCopy, torch_device
from kvgraft.errors import ContractViolation, TransferError
from kvgraft_accelerator.fragments import Fragmenter, Fragments, Rows
from kvgraft_accelerator.protocol import CopySizes, Event, Purpose
from kvgraft_testing.simulated.ordering import Access, Clock, Memory, Ordering, Unordered
from kvgraft_testing.simulated.streams import Point, SimulatedEvent, SimulatedStream, Work
from kvgraft_testing.simulated.tensor import DeviceTensor

__all__ = ["Choose", "SimulatedDevice"]

SomeRows = tuple[torch.Tensor, "torch.Tensor | None"]
"""A tensor and some of its rows; None for all."""

Choose = Callable[[int], int]
"""Chooses one of `n` ways to go on; 0 is always the latest."""

SMALL = CopySizes(
    ring_nbytes=3072,
    straight_nbytes=512,
    piece_nbytes=128,
    group_nbytes=256,
    few_nbytes=100,
    n_streams=2,
    first_nbytes=256,
)
"""For pools of some kilobytes: copies take every way, and rings wrap around."""

PAGE_NBYTES = 4096
"""Alignment of memories, which do not adjoin."""

Bytes = npt.NDArray[np.int64]
"""Numbers of bytes of a memory."""

MOST_SHOWN = 40
"""Steps of the schedule that a message shows."""


def latest(n: int) -> int:
    """Everything runs as late as allowed."""
    del n
    return 0


class SimulatedDevice:
    """A device that runs work as late as allowed; see `StreamRuntime`.

    It queues all submitted work. Work runs when the host waits for something that needs it, or when
    the schedule chooses so, in an order that streams and events allow. Every access to its memory,
    and to page-locked memory, is checked against all accesses that are not ordered with it.

    One thread uses it.

    Args:
        choose: the schedule; by default everything runs as late as allowed.
        sizes: thresholds between the ways of copies.

    Attributes:
        stages: true: small rows go through a ring.
        schedule: the steps that ran, in order, in words.
        host_clock: the work that the host knows to have run.
    """

    def __init__(self, choose: Choose = latest, sizes: CopySizes = SMALL) -> None:
        self.sizes = sizes
        self.stages = True
        self.device = torch_device(SIMULATED)
        self.choose = choose
        self.streams: list[SimulatedStream] = []
        self.schedule: list[str] = []
        self.host_clock: Clock = {}
        self._ordering = Ordering()
        self._memories: dict[int, Memory] = {}
        self._by_address: list[Memory] = []
        self._fragmenter = Fragmenter(self._address)
        self._numbers = torch.arange(1 << 16)
        self._submitted = 0
        self._label: str | None = None
        self._is_lost = False
        self._current = self.stream(Purpose.COMPUTE)

    # -- memory

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, label: str) -> DeviceTensor:
        """Zeroed memory that only kernels and copies reach."""
        n_items = int(np.prod(shape, dtype=np.int64))
        data = self._memory(n_items * dtype.itemsize, label)
        return DeviceTensor(data.view(dtype).view(tuple(shape)), self)

    def page_locked(self, nbytes: int, label: str) -> torch.Tensor:
        """Memory of the host; say with `host` when the host touches it."""
        return self._memory(nbytes, label)

    def _memory(self, nbytes: int, label: str) -> torch.Tensor:
        end = self._by_address[-1].address + len(self._by_address[-1].data) if self._memories else 0
        memory = Memory(label, max(1, nbytes), -(-end // PAGE_NBYTES) * PAGE_NBYTES + PAGE_NBYTES)
        self._memories[memory.data.untyped_storage().data_ptr()] = memory
        self._by_address.append(memory)
        return memory.data[:nbytes]

    def _memory_of(self, tensor: torch.Tensor) -> Memory | None:
        return self._memories.get(tensor.untyped_storage().data_ptr())

    # -- streams

    def stream(self, purpose: Purpose) -> SimulatedStream:
        """A new stream."""
        same = sum(each.purpose is purpose for each in self.streams)
        name = f"stream {purpose.value}" + (f" {same + 1}" if same else "")
        stream = SimulatedStream(self, name, purpose)
        self.streams.append(stream)
        return stream

    def compute(self) -> SimulatedStream:
        """The stream that kernels go to now."""
        return self._current

    @contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        """Kernels go to another stream inside."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    @contextmanager
    def named(self, label: str) -> Iterator[None]:
        """Work submitted inside has this name in messages."""
        before, self._label = self._label, label
        try:
            yield
        finally:
            self._label = before

    def orders(self, fence: object) -> bool:
        """Whether it is an event of this device."""
        return isinstance(fence, SimulatedEvent) and fence.point.stream.device is self

    # -- work

    def kernel(self, label: str, run: Callable[[Work], None]) -> None:
        """Queue work on the current stream; it notes its accesses as it runs."""
        self._submit(self._current, label, run)

    def launch(
        self,
        label: str,
        run: Callable[..., None],
        *,
        reads: Sequence[SomeRows] = (),
        writes: Sequence[SomeRows] = (),
    ) -> None:
        """Queue a custom kernel on the current stream.

        Args:
            label: its name in messages.
            run: called with the bytes of the tensors that it reads and writes, in that order.
            reads: tensors, each with the rows that it reads; None for all of them.
            writes: those that it writes, likewise.
        """

        def kernel(work: Work) -> None:
            for accesses, is_write in ((reads, False), (writes, True)):
                for tensor, rows in accesses:
                    part = None if rows is None else lambda at, rows=rows: at[rows]
                    self.note(work, _plain(tensor), writes=is_write, part=part)
            run(*(_plain(tensor) for tensor, _ in (*reads, *writes)))

        self.kernel(label, kernel)

    def submit_copies(
        self, stream: SimulatedStream, groups: Sequence[Sequence[PlaneCopy]]
    ) -> Iterator[None]:
        """Queue copies; a step for each group."""
        if any(self._is_pageable(each) for group in groups for copy in group for each in copy[1:3]):
            for group in groups:
                self._submit_group(stream, group, [self._move(copy) for copy in group])
                yield
        else:
            for group in groups:
                fragments = self._fragmenter.fragments(group)
                self._submit_group(stream, group, self._moves(fragments))
                yield

    def submit_wait(self, stream: SimulatedStream) -> None:
        """Queue work that does nothing, behind the events that the stream waits for."""
        self._submit(stream, "wait", lambda _: None)

    def submit_moves(self, stream: SimulatedStream, fragments: Fragments) -> None:
        """Queue copies of pieces."""
        self._submit_moves(stream, stream.purpose.value, self._moves(fragments))

    def submit_rows(self, stream: SimulatedStream, rows: Rows) -> None:
        """Queue copies of rows within the device."""
        self.submit_moves(stream, rows.fragments())

    def _submit_group(
        self,
        stream: SimulatedStream,
        copies: Sequence[PlaneCopy],
        moves: Sequence[Callable[[Work], None]],
    ) -> None:
        layers = ", ".join(str(layer) for layer in sorted({copy.layer for copy in copies}))
        label = (
            f"{'copy' if stream.purpose is Purpose.COMPUTE else stream.purpose.value} of {layers}"
        )

        self._submit_moves(stream, label, moves)
        if any(self._is_pageable(copy.target) for copy in copies):
            stream.record().wait()

    def _submit_moves(
        self, stream: SimulatedStream, label: str, moves: Sequence[Callable[[Work], None]]
    ) -> None:
        """Queue them as one work, in either order."""

        def run(work: Work) -> None:
            for move in moves if self.choose(2) == 0 else reversed(moves):
                move(work)

        self._submit(stream, label, run)

    def address(self, tensor: torch.Tensor) -> int | None:
        """An address that only this device knows; None of pageable memory."""
        memory = self._memory_of(_plain(tensor))
        if memory is None:
            return None
        return memory.address + int(tensor.storage_offset()) * tensor.element_size()

    def _address(self, tensor: torch.Tensor) -> int:
        address = self.address(tensor)
        assert address is not None, "pageable"
        return address

    def _moves(self, fragments: Fragments) -> list[Callable[[Work], None]]:
        """The fragments, those between the same two memories and of one size together."""
        bases = np.array([memory.address for memory in self._by_address])
        source, target = (np.searchsorted(bases, each, "right") - 1 for each in fragments[:2])
        kinds = np.stack([source, target, fragments.nbytes])
        moves: list[Callable[[Work], None]] = []
        for kind in np.unique(kinds, axis=1).T:
            some = (kinds == kind[:, None]).all(axis=0)
            memories = [self._by_address[number] for number in kind[:2]]
            bytes_ = np.arange(kind[2])
            read, write = (
                (addresses[some, None] - memory.address + bytes_).ravel()
                for addresses, memory in zip(fragments[:2], memories)
            )
            moves.append(partial(self._move_bytes, memories[0], memories[1], read, write))
        return moves

    def _move_bytes(
        self, source: Memory, target: Memory, read: Bytes, write: Bytes, work: Work
    ) -> None:
        self._ordering.check(_access(work, writes=False), source, read)
        self._ordering.check(_access(work, writes=True), target, write)
        target.data[torch.from_numpy(write)] = source.data[torch.from_numpy(read)]

    def _move(self, copy: PlaneCopy) -> Callable[[Work], None]:
        source, target = _plain(copy.source), _plain(copy.target)
        read, write = copy.source_rows.clone(), copy.target_rows.clone()
        if self._is_pageable(copy.source):
            source, read = source[read], torch.arange(len(read))

        def move(work: Work) -> None:
            self.note(work, source, writes=False, part=lambda at: at[read])
            self.note(work, target, writes=True, part=lambda at: at[write])
            target[write] = source[read]

        return move

    def copy_tensor(self, into: torch.Tensor, source: torch.Tensor, *, blocks: bool) -> Any:
        """`into.copy_(source)`; at least one of them is on the device."""
        to_host = not isinstance(into, DeviceTensor)
        from_host = not isinstance(source, DeviceTensor)
        value = _plain(source)
        if from_host and (blocks or self._is_pageable(source)):
            value = value.clone()

        def run(work: Work) -> None:
            self.note(work, value, writes=False)
            self.note(work, _plain(into), writes=True)
            _plain(into).copy_(value)

        self.kernel("copy_", run)
        if to_host and (blocks or self._is_pageable(into)):
            self._current.record().wait()
        return into

    def fetch(self, tensor: DeviceTensor) -> torch.Tensor:
        """A copy of a tensor's values, once all that was submitted before has written them."""
        found = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.copy_tensor(found, tensor, blocks=True)
        return found

    def _is_pageable(self, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, DeviceTensor) and self._memory_of(tensor) is None

    def host(self, tensor: torch.Tensor, label: str, *, writes: bool) -> None:
        """The host touches page-locked memory now."""
        name = f"host thread {threading.get_ident()}"
        step = self.host_clock[name] = self.host_clock.get(name, 0) + 1
        self._submitted += 1
        clock = dict(self.host_clock)
        access = Access(self._submitted, label, "the host", step, None, writes, clock)
        self._check(access._replace(where=name), tensor, None)

    def note(self, work: Work, tensor: torch.Tensor, *, writes: bool, part: Any = None) -> None:
        """Some work touches a tensor, or a part of it, now."""
        self._check(_access(work, writes=writes), tensor, part)

    def _check(self, access: Access, tensor: torch.Tensor, part: Any) -> None:
        memory = self._memory_of(tensor)
        if memory is not None:
            self._ordering.check(access, memory, self._touched(memory, tensor, part))

    def _touched(self, memory: Memory, view: torch.Tensor, part: Any) -> npt.NDArray[np.int64]:
        """Numbers of the bytes of some memory that a view, or a part of the view, covers."""
        if len(memory.data) > len(self._numbers):
            self._numbers = torch.arange(2 * len(memory.data))
        size = view.element_size()
        starts = self._numbers.as_strided(view.shape, view.stride(), view.storage_offset())
        if part is not None:
            starts = part(starts)
        starts = starts.reshape(-1, 1) * size
        found: npt.NDArray[np.int64] = (starts + self._numbers[:size]).reshape(-1).numpy()
        return found

    def lose(self) -> None:
        """From now on the device does nothing, and says so at every call."""
        self._is_lost = True

    def expect_alive(self) -> None:
        """Refuse a call of a device that is lost.

        Raises:
            TransferError: it is.
        """
        if self._is_lost:
            raise TransferError("the simulated device is lost")

    def _submit(self, stream: SimulatedStream, label: str, run: Callable[[Work], None]) -> None:
        self.expect_alive()
        self._submitted += 1
        stream.submit(self._submitted, self._label or label, run)

    def fail(self, events: Sequence[Event]) -> None:
        """Work before some events that has not run fails when it runs, and moves nothing."""

        def lost(work: Work) -> None:
            raise TransferError(f"{work.label} failed on request")

        for event in events:
            assert isinstance(event, SimulatedEvent)
            event.replace(lost)

    # -- the schedule

    def run_until(self, points: Sequence[Point]) -> None:
        """Run all that some points need, and what the schedule chooses to run before them."""
        needed: dict[SimulatedStream, int] = {}
        found = list(points)
        while found:
            stream, step = found.pop()
            if needed.get(stream, stream.ran) >= step:
                continue
            since, needed[stream] = needed.get(stream, stream.ran), step
            for work in stream.queue:
                if since < work.point.step <= step:
                    found += work.after
        while any(stream.ran < step for stream, step in needed.items()):
            ready = [
                stream for stream in self.streams if stream.queue and _may_run(stream.queue[0])
            ]
            ready.sort(key=lambda stream: stream.ran >= needed.get(stream, 0))
            stream = ready[self.choose(len(ready)) if len(ready) > 1 else 0]
            work = stream.queue[0]
            self.schedule.append(f"{work.number} {work.label} on {stream.name}")
            stream.run_next()

    @property
    def unordered(self) -> list[Unordered]:
        """Pairs of accesses found so far that nothing orders."""
        return self._ordering.unordered

    def synchronize(self) -> None:
        """Run everything; the host knows of all of it."""
        for stream in self.streams:
            stream.record().wait()

    def finish(self) -> None:
        """Run everything that was submitted.

        Raises:
            ContractViolation: accesses that nothing orders, with what ran last.
        """
        self.run_until([Point(stream, stream.submitted) for stream in self.streams])
        if self.unordered:
            first = self.unordered[0]
            ran = "; ".join(self.schedule[-MOST_SHOWN:])
            raise ContractViolation(first.rule, None, f"{first}. It ran: {ran}")


def _access(work: Work, *, writes: bool) -> Access:
    stream, step = work.point
    return Access(work.number, work.label, stream.name, step, work.purpose, writes, work.clock)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.on_device if isinstance(tensor, DeviceTensor) else tensor


def _may_run(work: Work) -> bool:
    return all(stream.ran >= step for stream, step in work.after)
