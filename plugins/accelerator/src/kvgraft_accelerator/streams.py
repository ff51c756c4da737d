"""Copies on streams of a device: the engine of accelerators, and of the simulated one.

No thread waits, and slabs and the ring are taken once. The scheduler's thread submits copies and
polls events.

A backup gathers the rows of many planes into a ring on the device, in the layout of the host's
slabs, so that the bus moves one run of bytes for each page; large rows are copied as they are. A
load copies straight into place, layer by layer, with an event behind each.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

import torch

from kvgraft.errors import TransferError
from kvgraft.pools.component import PlaneCopy
from kvgraft.transfers.engine import Fence, Ticket, fences_of
from kvgraft_accelerator.protocol import Event, Purpose, Stream, StreamRuntime

__all__ = ["StreamTicket", "StreamTransferEngine"]

ALIGNMENT = 64
"""Bytes to which rows of the ring are aligned."""

N_PARTS = 3
"""Parts of the ring: one is filled, one emptied, one ready for either."""

MOST_KNOWN = 64
"""Sets of planes whose places in the ring are kept."""


class StreamTicket(Ticket):
    """Progress of one submission, read from its events.

    It ends when all of them have passed, also if it failed: until then its slots are in use.

    Attributes:
        events: behind each layer, and behind whatever else was submitted for it; None until then.
        failure: why it will have failed once it ends.
    """

    __slots__ = ("_lane", "_n_passed", "events", "failure")

    def __init__(self, copies: Sequence[PlaneCopy], lane: _Lane) -> None:
        super().__init__(copies)
        self.events: list[Event] | None = None
        self.failure: Exception | None = None
        self._n_passed = 0
        self._lane = lane

    @property
    def done(self) -> bool:
        """Whether the copies ended, well or badly."""
        return self._done or self._look(None)

    def layer_ready(self, layer: int) -> bool:
        """Whether a layer's data can be read (R7); layers without copies are ready."""
        self._look(None)
        return super().layer_ready(layer)

    def layer_event(self, layer: int) -> Event | None:
        """The event that a kernel which reads a layer waits for; None if there is nothing to copy.

        Raises:
            TransferError: the copies wait for a fence of the host, or could not be submitted.
        """
        if layer not in self.layers:
            return None
        self._lane.start_reached(None)
        if self.events is None or self.failure is not None:
            reason = self.failure or "its fence is not reached; name an event of the device"
            raise TransferError(f"layer {layer}: {reason}")
        return self.events[self.layers.index(layer)]

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end, at most `timeout_s` seconds; whether it ended."""
        return self._done or self._look(timeout_s)

    def wait_layer(self, layer: int, timeout_s: float) -> None:
        """Wait until a layer's data can be read; see `Ticket.wait_layer`."""
        if layer in self.layers:
            self._look(timeout_s, self.layers.index(layer) + 1)
        super().wait_layer(layer, 0)

    def _look(self, timeout_s: float | None, n_events: int | None = None) -> bool:
        """Take in events that passed, waiting if there is a time for it; whether all ended."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        self._lane.start_reached(self if timeout_s else None, timeout_s or 0.0)
        if self.events is None or self._done:
            return self._done
        for event in self.events[self._n_passed : n_events]:
            try:
                if end is None:
                    passed = event.done()
                else:
                    passed = event.wait(max(0.0, end - time.monotonic()))
            except Exception as error:  # noqa: BLE001 - the ticket carries the error
                self.failure, passed = self.failure or error, True
            if not passed:
                return False
            self._n_passed += 1
            if self.failure is None and self.layers_done < len(self.layers):
                self.finish_layer()
        if self._n_passed == len(self.events):
            self.finish(self.failure)
        return self._done


class StreamTransferEngine:
    """Copies on streams of one device, each direction in the order of submission.

    A copy starts behind the work that the submitting thread gave the device before, and behind its
    fence. Events of the device are waited for there; other fences by the host, when it polls.

    Its tickets are of the class `kind`.

    Args:
        runtime: the device.
        fence_timeout_s: how long a copy waits for a fence of the host before it fails.
    """

    kind: type[StreamTicket] = StreamTicket

    def __init__(self, runtime: StreamRuntime, fence_timeout_s: float = 30.0) -> None:
        self.runtime = runtime
        self._loads = _Loads(runtime, fence_timeout_s)
        self._backups = _Backups(runtime, fence_timeout_s)

    def submit(self, copies: Sequence[PlaneCopy], fence: Fence | None = None) -> Ticket:
        """Submit the copies to the device; see `TransferEngine.submit`."""
        is_backup = bool(copies) and copies[0].source.device == self.runtime.device
        lane = self._backups if is_backup else self._loads
        ticket = self.kind(copies, lane)
        lane.add(ticket, fence)
        return ticket

    def close(self) -> None:
        """Finish the submitted copies."""
        for lane in (self._loads, self._backups):
            lane.close()


class _Held(NamedTuple):
    """A submission that waits for fences of the host, or for one that does."""

    ticket: StreamTicket
    behind: tuple[Event, ...]
    fences: tuple[Fence, ...]
    until: float


class _Lane:
    """Submissions of one direction.

    Attributes:
        streams: those that it submits to.
    """

    streams: tuple[Stream, ...]

    def __init__(self, runtime: StreamRuntime, fence_timeout_s: float) -> None:
        self.runtime = runtime
        self._fence_timeout_s = fence_timeout_s
        self._held: deque[_Held] = deque()

    def add(self, ticket: StreamTicket, fence: Fence | None) -> None:
        """Start a submission behind what the device was given so far, and its fence."""
        try:
            events: list[Event] = [self.runtime.compute().record()]
        except TransferError as error:
            ticket.events, ticket.failure = [], error
            return
        fences: list[Fence] = []
        for each in fences_of(fence):
            if self.runtime.orders(each):
                events.append(each)  # type: ignore[arg-type]
            else:
                fences.append(each)
        until = time.monotonic() + self._fence_timeout_s
        self._held.append(_Held(ticket, tuple(events), tuple(fences), until))
        self.start_reached(None)

    def start_reached(self, ticket: StreamTicket | None, timeout_s: float = 0.0) -> None:
        """Submit what waits no more, oldest first; wait for the fences before `ticket`'s end."""
        end = time.monotonic() + timeout_s
        while self._held:
            held = self._held[0]
            wait = ticket is not None and ticket.events is None
            try:
                for fence in held.fences:
                    left = max(0.0, end - time.monotonic()) if wait else 0.0
                    if fence.wait(left) is False:
                        if time.monotonic() < held.until:
                            return
                        raise TransferError(
                            f"the fence was not reached in {self._fence_timeout_s} s"
                        )
                held.ticket.events = self.start(held.ticket, held.behind)
            except Exception as error:  # noqa: BLE001 - the ticket carries the error
                held.ticket.failure, held.ticket.events = error, self.ends()
            self._held.popleft()

    def start(self, ticket: StreamTicket, behind: Sequence[Event]) -> list[Event]:
        """Submit the copies behind some events; an event for each layer."""
        raise NotImplementedError

    def ends(self) -> list[Event]:
        """Events behind all that was submitted; none where the device is lost."""
        try:
            return [stream.record() for stream in self.streams]
        except TransferError:
            return []

    def close(self) -> None:
        """Finish what was submitted, as far as the device gets within the time for a fence."""
        while self._held:
            self.start_reached(self._held[-1].ticket, self._fence_timeout_s)
        for event in self.ends():
            with suppress(TransferError):  # tickets have told
                event.wait(self._fence_timeout_s)


class _Loads(_Lane):
    """HOST to DEVICE, layer by layer."""

    def __init__(self, runtime: StreamRuntime, fence_timeout_s: float) -> None:
        super().__init__(runtime, fence_timeout_s)
        self.stream = runtime.stream(Purpose.LOAD_BACK)
        self.streams = (self.stream,)

    def start(self, ticket: StreamTicket, behind: Sequence[Event]) -> list[Event]:
        """Straight into place."""
        for event in behind:
            self.stream.wait(event)
        return _copy(self.stream, ticket)


class _Backups(_Lane):
    """DEVICE to HOST, through the ring where rows are small."""

    def __init__(self, runtime: StreamRuntime, fence_timeout_s: float) -> None:
        super().__init__(runtime, fence_timeout_s)
        self.stream = runtime.stream(Purpose.BACKUP)
        self._gathers = runtime.stream(Purpose.GATHER)
        self.streams = (self._gathers, self.stream)
        self._ring = _Ring(runtime, runtime.sizes.ring_nbytes)
        self._layouts: dict[tuple[int, ...], _Layout] = {}

    def start(self, ticket: StreamTicket, behind: Sequence[Event]) -> list[Event]:
        """Gathered, or straight where rows are large or not a slab's."""
        for event in behind:
            self.stream.wait(event)
            self._gathers.wait(event)
        slabs = self._slabs(ticket.copies)
        if slabs is None:
            return _copy_at_once(self.stream, ticket)
        parts: list[Event] = []
        for slab in slabs:
            if len(slab.copies) > 1:
                parts += self._copy_slab(slab)
            else:
                parts += self.stream.copy([slab.copies])
        return [*[self.stream.record()] * len(ticket.layers), *parts]

    def _slabs(self, copies: Sequence[PlaneCopy]) -> list[_Slab] | None:
        """The copies by the host memory that they fill side by side; None to copy straight."""
        slabs: dict[tuple[int, int, int], list[PlaneCopy]] = {}
        for copy in copies:
            target = copy.target
            is_backup = target.device.type == "cpu" and copy.source.device.type != "cpu"
            if not is_backup or _row_nbytes(copy) >= self.runtime.sizes.straight_nbytes:
                return None
            key = (target.untyped_storage().data_ptr(), _stride(copy), id(copy.target_rows))
            slabs.setdefault(key, []).append(copy)
        return [run for each in slabs.values() for run in _runs(each, self._ring.part_nbytes)]

    def _copy_slab(self, slab: _Slab) -> list[Event]:
        """Through the ring, as many rows at a time as fit a part of it; the events behind each."""
        events: list[Event] = []
        layout = self._layout(slab)
        rows, n_rows = slab.copies[0].target_rows, layout.n_rows
        for first in range(0, len(rows), n_rows):
            some = slice(first, min(first + n_rows, len(rows)))
            all_rows = torch.arange(some.stop - first)
            part = self._ring.next()
            if part.emptied is not None:
                self._gathers.wait(part.emptied)
            filled, lanes = layout.of(part)
            read: dict[int, torch.Tensor] = {}  # planes that have their rows in common keep them so
            gathered = []
            for copy, source, into in zip(slab.copies, layout.sources, lanes):
                source_rows = read.get(id(copy.source_rows))
                if source_rows is None:
                    source_rows = read[id(copy.source_rows)] = copy.source_rows[some]
                gathered.append(PlaneCopy(copy.layer, source, into, source_rows, all_rows))
            (full,) = self._gathers.copy([gathered])
            self.stream.wait(full)
            whole = PlaneCopy(slab.copies[0].layer, filled, layout.target, all_rows, rows[some])
            (part.emptied,) = self.stream.copy([[whole]])
            events += (full, part.emptied)
        return events

    def _layout(self, slab: _Slab) -> _Layout:
        key = tuple([id(tensor) for copy in slab.copies for tensor in copy[1:3]])
        known = self._layouts.get(key)
        if known is None:
            if len(self._layouts) >= MOST_KNOWN:
                self._layouts.clear()
            known = self._layouts[key] = _Layout(slab, self._ring.part_nbytes)
        return known


class _Slab(NamedTuple):
    """Planes that lie side by side in rows of host memory.

    Attributes:
        copies: their copies, in the order of the bytes.
        start: the first byte of row 0 in its memory.
        nbytes: of a row.
    """

    copies: list[PlaneCopy]
    start: int
    nbytes: int


class _Layout:
    """Tensors that copies of a slab's planes need each time, made once.

    Attributes:
        n_rows: that a part of the ring has room for.
        sources: the planes, as elements of the target's.
        target: the host's rows, all planes side by side, uint8 `[n_rows, nbytes]`.
    """

    def __init__(self, slab: _Slab, part_nbytes: int) -> None:
        self._stride = -(-slab.nbytes // ALIGNMENT) * ALIGNMENT
        self._nbytes = slab.nbytes
        self.n_rows = part_nbytes // self._stride
        self._targets = [copy.target for copy in slab.copies]
        self._starts = [_start(copy) - slab.start for copy in slab.copies]
        self._planes = [copy.source for copy in slab.copies]  # so that their `id`s stay theirs
        self.sources = [_as(copy.source, copy.target.dtype) for copy in slab.copies]
        first = slab.copies[0]
        self.target = torch.empty(0, dtype=torch.uint8).set_(
            first.target.untyped_storage(),
            slab.start,
            (len(first.target), slab.nbytes),
            (_stride(first), 1),
        )
        self._parts: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def of(self, part: _Part) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Rows of a part of the ring, uint8 `[n_rows, nbytes]`, and in them those of each plane."""
        known = self._parts.get(id(part))
        if known is None:
            rows = part.memory[: self.n_rows * self._stride].view(self.n_rows, self._stride)
            lanes = []
            for target, start in zip(self._targets, self._starts):
                at = start // target.element_size()
                lanes.append(rows.view(target.dtype)[:, at : at + target.shape[1]])
            known = self._parts[id(part)] = rows[:, : self._nbytes], lanes
        return known


class _Part:
    """A part of the ring.

    Attributes:
        memory: uint8 `[nbytes]`.
        emptied: the event behind which it can be filled again; None if it never was.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.emptied: Event | None = None


class _Ring:
    """Memory of the device that is filled and emptied in turns.

    Args:
        runtime: the device.
        nbytes: of all parts.
    """

    def __init__(self, runtime: StreamRuntime, nbytes: int) -> None:
        self.part_nbytes = nbytes // N_PARTS // ALIGNMENT * ALIGNMENT
        self._parts = deque(
            _Part(runtime.zeros((self.part_nbytes,), torch.uint8, f"part {number} of the ring"))
            for number in range(N_PARTS)
        )

    def next(self) -> _Part:
        """The part that was handed out longest ago."""
        self._parts.rotate(-1)
        return self._parts[-1]


def _copy(stream: Stream, ticket: Ticket) -> list[Event]:
    """Submit copies layer by layer, or one by one where one reads the bytes of another."""
    groups = [list(group) for _, group in groupby(ticket.copies, key=lambda copy: copy.layer)]
    if not _is_chained(ticket):
        return stream.copy(groups)
    chains = [stream.copy([[copy] for copy in group]) for group in groups]
    return [*(chain[-1] for chain in chains), *(event for chain in chains for event in chain[:-1])]


def _as(plane: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return plane if plane.dtype == dtype else plane.view(dtype)


def _copy_at_once(stream: Stream, ticket: Ticket) -> list[Event]:
    """The same where nobody waits for a layer."""
    if _is_chained(ticket) or not ticket.copies:
        return _copy(stream, ticket)
    return stream.copy([ticket.copies]) * len(ticket.layers)


def _is_chained(ticket: Ticket) -> bool:
    sources = {id(copy.source) for copy in ticket.copies}
    return any(id(copy.target) in sources for copy in ticket.copies)


def _row_nbytes(copy: PlaneCopy) -> int:
    return copy.target.shape[1] * copy.target.element_size()


def _stride(copy: PlaneCopy) -> int:
    """Bytes from row to row of the target."""
    return copy.target.stride(0) * copy.target.element_size()


def _start(copy: PlaneCopy) -> int:
    """The first byte of the target's row 0 in its memory."""
    return int(copy.target.storage_offset()) * copy.target.element_size()


def _runs(copies: Sequence[PlaneCopy], most_nbytes: int) -> Iterator[_Slab]:
    """Copies into the same rows of the same memory, joined where their bytes touch."""
    run: list[PlaneCopy] = []
    start = end = 0
    for copy in sorted(copies, key=_start):
        at, nbytes = _start(copy), _row_nbytes(copy)
        if run and (at != end or at + nbytes - start > most_nbytes):
            yield _Slab(run, start, end - start)
            run = []
        if not run:
            start = at
        run.append(copy)
        end = at + nbytes
    if run:
        yield _Slab(run, start, end - start)
