"""Copies on streams of a device: the engine of accelerators, and of the simulated one.

No thread waits, and slabs and rings are allocated once. The scheduler's thread submits copies and
polls events. Copies cross the bus in large pieces:

    backup   planes ── gather ──► ring ── bus ──► slabs of the host
    load     slabs of the host ── bus ──► ring ── scatter ──► planes      an event for each group
    large rows, or few ────────── bus ──────────► as they are             of layers

A part of the ring is filled again behind the event of the copy that emptied it. Each direction has
a ring, one stream that stays on the device, and streams that cross the bus, normally one. A copy
engine serves several streams in turn, so with more of them the first layers of a load arrive later.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from kvgraft.errors import TransferError
from kvgraft.pools.component import PlaneCopy
from kvgraft.transfers.engine import Fence, Ticket, fences_of
from kvgraft_accelerator.fragments import (
    Fragments,
    Numbers,
    Rows,
    by_rows,
    expect_within,
    ids,
    joined,
    pieces,
    together,
)
from kvgraft_accelerator.protocol import Event, Purpose, StreamRuntime
from kvgraft_accelerator.routes import Routes, Slab, Straight

__all__ = ["StreamTicket", "StreamTransferEngine"]

T = TypeVar("T")

ALIGNMENT = 64
"""Bytes to which rows of the ring are aligned."""

MORE_PARTS = 2
"""Parts of a ring that do not cross the bus: one is filled or emptied, one is ready.
"""


class StreamTicket(Ticket):
    """Progress of one submission, read from its events.

    It ends when all of them have passed, even if it failed: until then its slots are in use.

    Attributes:
        events: events behind its copies, in the order of submission; None before it is submitted.
        ends: for each layer, how many of the events must have passed.
        failure: why it fails once it ends.
    """

    __slots__ = ("_lane", "_n_passed", "ends", "events", "failure")

    def __init__(self, copies: Sequence[PlaneCopy], lane: _Lane) -> None:
        super().__init__(copies)
        self.events: list[Event] | None = None
        self.ends: list[int] = []
        self.failure: Exception | None = None
        self._n_passed = 0
        self._lane = lane

    @property
    def done(self) -> bool:
        """Whether the copies ended, successfully or not."""
        return self._done or self._look(None)

    def layer_ready(self, layer: int) -> bool:
        """Whether a layer's data can be read (R7); layers without copies are ready."""
        self._look(None)
        return super().layer_ready(layer)

    def layer_event(self, layer: int) -> Event | None:
        """The event that a kernel waits for before it reads a layer; None if nothing is copied.

        Raises:
            TransferError: the copies wait for a fence of the host, or could not be submitted.
        """
        if layer not in self.layers:
            return None
        self._lane.start_reached(None)
        if self.events is None or self.failure is not None:
            reason = self.failure or "its fence is not reached; name an event of the device"
            raise TransferError(f"layer {layer}: {reason}")
        return self.events[self.ends[self.layers.index(layer)] - 1]

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end, at most `timeout_s` seconds; whether it ended."""
        return self._done or self._look(timeout_s)

    def wait_layer(self, layer: int, timeout_s: float) -> None:
        """Wait until a layer's data can be read; see `Ticket.wait_layer`."""
        if layer in self.layers:
            self._look(timeout_s, layer)
        if not super().layer_ready(layer):
            reason = self.error or f"not done after {timeout_s} s"
            raise TransferError(f"layer {layer}: {reason}; treat the load as failed")

    def _look(self, timeout_s: float | None, layer: int | None = None) -> bool:
        """Count events that passed, waiting if a time is given; whether all ended."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        self._lane.start_reached(self if timeout_s else None, timeout_s or 0.0)
        if self.events is None or self._done:
            return self._done
        wanted = None if layer is None or not self.ends else self.layers.index(layer)
        n_events = None if wanted is None else max(self.ends[: wanted + 1])
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
            while (
                self.failure is None
                and self.layers_done < len(self.layers)
                and self.ends[self.layers_done] <= self._n_passed
            ):
                self.finish_layer()
        if self._n_passed == len(self.events):
            self.finish(self.failure)
        return self._done


class StreamTransferEngine:
    """Copies on streams of one device; each direction writes in the order of submission.

    A copy starts after the work that the submitting thread gave the device before, and after its
    fence. The device waits for its own events; the host waits for other fences when it polls.

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

    @property
    def ring_nbytes(self) -> int:
        """Device memory of the rings of both directions."""
        return sum(lane.ring.nbytes for lane in (self._loads, self._backups) if lane.ring)

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
    """A submission that waits for host fences, or for an earlier one that does."""

    ticket: StreamTicket
    behind: tuple[Event, ...]
    fences: tuple[Fence, ...]
    until: float


class _Lane:
    """Submissions of one direction.

    Attributes:
        over_bus, on_device: the purposes of its streams.
        announces_layers: whether a layer can be ready before all are.
        bus: the streams that cross the bus, the next one first.
        local: the stream that copies rows between planes and ring.
        ring: the ring; None if the device needs none.
    """

    over_bus: Purpose
    on_device: Purpose
    announces_layers: bool

    def __init__(self, runtime: StreamRuntime, fence_timeout_s: float) -> None:
        self.runtime = runtime
        self.bus = deque(runtime.stream(self.over_bus) for _ in range(runtime.sizes.n_streams))
        self.local = runtime.stream(self.on_device)
        self.ring = _Ring(runtime, self.over_bus.value) if runtime.stages else None
        self._fence_timeout_s = fence_timeout_s
        self._held: deque[_Held] = deque()
        sizes, part_nbytes = runtime.sizes, 0 if self.ring is None else self.ring.part_nbytes
        piece_nbytes = sizes.piece_nbytes if self.announces_layers else part_nbytes
        self._routes = Routes(
            runtime.address, self.sides, sizes.straight_nbytes, piece_nbytes, part_nbytes
        )
        self._last: Sequence[Event] = ()
        self._n_pieces = self._part_nbytes = 0

    def add(self, ticket: StreamTicket, fence: Fence | None) -> None:
        """Start a submission after the device's work so far and after its fence."""
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
        """Submit copies whose fences have passed, oldest first; waits for those of `ticket`."""
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
                held.ticket.events, held.ticket.ends = self.start(held.ticket, held.behind)
            except Exception as error:  # noqa: BLE001 - the ticket carries the error
                held.ticket.failure, held.ticket.events = error, self.give_up()
            self._held.popleft()

    def start(self, ticket: StreamTicket, behind: Sequence[Event]) -> tuple[list[Event], list[int]]:
        """Submit the copies after some events; returns the ticket's `events` and `ends`."""
        sizes = self.runtime.sizes
        self._n_pieces, self._part_nbytes = sizes.first_pieces, sizes.first_nbytes
        before = [] if self.announces_layers else self._last
        for event in (*behind, *before):
            for stream in self.bus:
                stream.wait(event)
        for event in behind:
            self.local.wait(event)
        events: list[Event] = []
        ends: dict[int, int] = {}
        steps = None if _is_chained(ticket.copies) else self._steps(ticket.copies)
        if steps is None:
            self._copy_rows(ticket.copies, events, ends)
        for step in steps or ():
            if isinstance(step, _Staged):
                events += self._stage(step)
            else:
                events += self.straight(step.fragments())
            ends.update(dict.fromkeys(step.layers, len(events)))
        if not self.announces_layers:
            first, *others = self.bus
            for stream in others:
                first.wait(stream.record())
            if others or not events:
                events.append(first.record())
        elif not events:
            events.append(self.local.record())
        self._last = events[-1:]
        if not self.announces_layers:
            ends.clear()
        return events, [ends.get(layer, len(events)) for layer in ticket.layers]

    def sides(self, source: T, target: T) -> tuple[T, T]:
        """The device's side first; between two of the device, the source first."""
        raise NotImplementedError

    def straight(self, fragments: Fragments) -> list[Event]:
        """Move pieces straight; returns the events behind them, the last behind all."""
        raise NotImplementedError

    def through_ring(self, part: _Part, slabs: Fragments, rows: Rows) -> list[Event]:
        """Fill a part of the ring and empty it.

        Args:
            part: the part.
            slabs: pieces that cross the bus.
            rows: rows to copy within the device.

        Returns:
            The events behind these copies.
        """
        raise NotImplementedError

    def cross(self, fragments: Fragments, behind: Sequence[Event]) -> list[Event]:
        """Move pieces over the bus; returns the event behind each call."""
        nbytes = max(1, int(fragments.nbytes.sum()))
        few = self.runtime.sizes.few_nbytes * len(fragments.nbytes) // nbytes
        first = 0
        events: list[Event] = []
        while first < len(fragments.nbytes):
            end = first + max(self._n_pieces, few)
            self._n_pieces *= 2
            stream = self.bus[0]
            self.bus.rotate(-1)
            for event in behind if len(events) < len(self.bus) else ():
                stream.wait(event)
            stream.move(Fragments(*(each[first:end] for each in fragments)))
            events.append(stream.record())
            first = end
        return events

    def _copy_rows(
        self, copies: Sequence[PlaneCopy], events: list[Event], ends: dict[int, int]
    ) -> None:
        """Copy layer by layer on one stream, or copy by copy if one reads the bytes of another."""
        stream = self.bus[0]
        for event in self._last:
            stream.wait(event)
        is_chained = _is_chained(copies)
        for layer, group in groupby(copies, key=lambda copy: copy.layer):
            some = list(group)
            events += stream.copy([[copy] for copy in some] if is_chained else [some])
            ends[layer] = len(events)
        self.local.wait(stream.record())

    def _steps(self, copies: Sequence[PlaneCopy]) -> list[_Staged | _Straight] | None:
        """Copies by their ways, first layers first; None if some have no address."""
        sizes = self.runtime.sizes
        steps: list[_Staged | _Straight] = []
        straight: list[_Crossing] = []
        for some in by_rows(copies):
            route = self._routes.of(some)
            if route is None:
                return None
            source_rows, target_rows = (rows.numpy() for rows in some[0][3:5])
            expect_within(source_rows, route.n_source_rows)
            expect_within(target_rows, route.n_target_rows)
            if not len(source_rows):
                continue
            if len(source_rows) * route.row_nbytes < sizes.few_nbytes:
                straight.append(_Crossing(route.every, source_rows, target_rows))
                continue
            if route.straight.layers:
                straight.append(_Crossing(route.straight, source_rows, target_rows))
            if route.slabs:
                on_device, on_host = self.sides(source_rows, target_rows)
                order = np.argsort(on_host)
                on_device, on_host = on_device[order], on_host[order]
                steps += [_Staged(slab.layers, slab, on_device, on_host) for slab in route.slabs]
        group_nbytes = sizes.group_nbytes if self.announces_layers else sys.maxsize
        steps += _grouped(straight, group_nbytes)
        return sorted(steps, key=lambda step: step.layers[0])

    def _stage(self, step: _Staged) -> Iterator[Event]:
        """Copy as many rows at a time as fit a part of the ring; returns the events behind."""
        assert self.ring is not None
        slab = step.slab
        stride = -(-slab.nbytes // ALIGNMENT) * ALIGNMENT
        first = 0
        while first < len(step.on_host):
            end = first + max(1, min(self._part_nbytes, self.ring.part_nbytes) // stride)
            self._part_nbytes *= 2
            on_device, on_host = (each[first:end] for each in step[2:])
            part = self.ring.next()
            in_ring = part.address + stride * np.arange(len(on_host), dtype=np.int64)
            slabs = joined(*self.sides(in_ring, slab.host + slab.host_step * on_host), slab.nbytes)
            rows = Rows(slab.planes, *self.sides(on_device, in_ring), np.ones_like(on_host))
            yield from self.through_ring(part, slabs, rows)
            first = end

    def give_up(self) -> list[Event]:
        """A submission failed half way: later ones wait for it; returns the events behind."""
        self._last = self.ends()
        for part in () if self.ring is None else self.ring.parts:
            part.emptied = self._last
        return list(self._last)

    def ends(self) -> list[Event]:
        """Events behind all work submitted; none if the device is lost."""
        try:
            return [stream.record() for stream in (*self.bus, self.local)]
        except TransferError:
            return []

    def close(self) -> None:
        """Wait for the submitted copies, at most the time for a fence."""
        while self._held:
            self.start_reached(self._held[-1].ticket, self._fence_timeout_s)
        for event in self.ends():
            with suppress(TransferError):  # tickets say so
                event.wait(self._fence_timeout_s)


class _Loads(_Lane):
    """HOST to DEVICE, first layers first.

    Pools are written on `local`, or by copies that are ordered between two works of `local`.
    """

    over_bus, on_device = Purpose.LOAD_BACK, Purpose.SCATTER
    announces_layers = True

    def sides(self, source: T, target: T) -> tuple[T, T]:
        """The target is on the device."""
        return target, source

    def straight(self, fragments: Fragments) -> list[Event]:
        """Copy into place, after the scatters of earlier submissions."""
        crossed = self.cross(fragments, self._last)
        for event in crossed:
            self.local.wait(event)
        return [*crossed, self.local.record()]

    def through_ring(self, part: _Part, slabs: Fragments, rows: Rows) -> list[Event]:
        """Over the bus into the ring, then into place."""
        full = self.cross(slabs, part.emptied)
        for event in full:
            self.local.wait(event)
        self.local.move_rows(rows)
        part.emptied = [self.local.record()]
        return [*full, *part.emptied]


class _Backups(_Lane):
    """DEVICE to HOST; layers are announced together. Gathers may be ahead of the bus."""

    over_bus, on_device = Purpose.BACKUP, Purpose.GATHER
    announces_layers = False

    def sides(self, source: T, target: T) -> tuple[T, T]:
        """The source is on the device."""
        return source, target

    def straight(self, fragments: Fragments) -> list[Event]:
        """To the host."""
        return self.cross(fragments, ())

    def through_ring(self, part: _Part, slabs: Fragments, rows: Rows) -> list[Event]:
        """Gather into the ring, then over the bus."""
        for event in part.emptied:
            self.local.wait(event)
        self.local.move_rows(rows)
        full = [self.local.record()]
        part.emptied = self.cross(slabs, full)
        return [*full, *part.emptied]


class _Staged(NamedTuple):
    """Rows that go through the ring.

    Attributes:
        layers: the layers that they belong to.
        slab: the planes.
        on_device, on_host: the rows; those of the host ascend, because consecutive slabs are one
            piece.
    """

    layers: Sequence[int]
    slab: Slab
    on_device: Numbers
    on_host: Numbers


class _Crossing(NamedTuple):
    """Rows of planes that go straight."""

    straight: Straight
    source_rows: Numbers
    target_rows: Numbers


class _Straight(NamedTuple):
    """Some layers that go straight; per crossing, where their planes begin and end."""

    layers: Sequence[int]
    parts: list[tuple[_Crossing, int, int]]

    def fragments(self) -> Fragments:
        """The pieces."""
        return together(
            [
                pieces(each.straight.planes[:, first:end], each.source_rows, each.target_rows)
                for each, first, end in self.parts
            ]
        )


class _Part:
    """A part of a ring.

    Attributes:
        memory: uint8 `[nbytes]`.
        address: address of its first byte.
        emptied: the events after which it can be filled again.
    """

    def __init__(self, memory: torch.Tensor, address: int) -> None:
        self.memory, self.address = memory, address
        self.emptied: Sequence[Event] = ()


class _Ring:
    """Device memory whose parts are filled and emptied in turns.

    Args:
        runtime: the device.
        direction: names it in messages.
    """

    def __init__(self, runtime: StreamRuntime, direction: str) -> None:
        n_parts = MORE_PARTS + runtime.sizes.n_streams
        self.part_nbytes = runtime.sizes.ring_nbytes // n_parts // ALIGNMENT * ALIGNMENT
        self.nbytes = n_parts * self.part_nbytes
        self.parts: deque[_Part] = deque()
        for number in range(n_parts):
            label = f"part {number} of the ring of {direction}"
            memory = runtime.zeros((self.part_nbytes,), torch.uint8, label)
            self.parts.append(_Part(memory, runtime.address(memory) or 0))

    def next(self) -> _Part:
        """The part that was used longest ago."""
        self.parts.rotate(-1)
        return self.parts[-1]


def _is_chained(copies: Sequence[PlaneCopy]) -> bool:
    """Whether one reads the bytes of another."""
    return not set(ids(copies, "source")).isdisjoint(ids(copies, "target"))


def _grouped(crossings: Sequence[_Crossing], least_nbytes: int) -> Iterator[_Straight]:
    """Group whole layers, first layers first, until a group has so many bytes."""
    found = sorted(
        (layer, number, first, end, row_nbytes * len(each.source_rows))
        for number, each in enumerate(crossings)
        for layer, first, end, row_nbytes in each.straight.layers
    )
    layers: list[int] = []
    parts: dict[int, tuple[_Crossing, int, int]] = {}
    nbytes = 0
    for layer, number, first, end, more_nbytes in found:
        if nbytes >= least_nbytes and layer != layers[-1]:
            yield _Straight(layers, list(parts.values()))
            layers, parts, nbytes = [], {}, 0
        layers.append(layer)
        begin = parts[number][1] if number in parts else first
        parts[number] = crossings[number], begin, end
        nbytes += more_nbytes
    if layers:
        yield _Straight(layers, list(parts.values()))
