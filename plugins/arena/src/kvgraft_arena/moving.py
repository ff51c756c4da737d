"""Slots of a closed extent move to open ones of their pool, and every reference follows (K7)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.requests.components import RequestComponent, RequestState
from kvgraft.requests.eviction import Evictor
from kvgraft.requests.request import Request
from kvgraft.transfers import Journal
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.inserting import Run
from kvgraft.tree.node import Node
from kvgraft.types import Tier
from kvgraft_arena.holders import SlotHolders

if TYPE_CHECKING:
    from kvgraft_arena.extents import ArenaPool

__all__ = ["Mover"]


class _Place(NamedTuple):
    """Slots in a cell or a request, and the call that replaces them."""

    slots: bytes
    put: Callable[[bytes], None]


class Mover:
    """Empties closed extents.

    Args:
        evictor: makes room for the data that moves.
        journal: knows the fence that data may be waiting for.
        requests: the requests that hold slots of their own.
        holders: the nodes that hold slots.
        payload: whether the pools have memory.

    Attributes:
        moved_slots: slots that moved so far.
        keeps_tables: whether slots that a request's tables name stay until it ends, for engines
            whose tables only grow; false at first.
        on_move: called with slots that moved: tier, component, from where and to where; None for
            nobody.
    """

    def __init__(
        self,
        evictor: Evictor,
        journal: Journal,
        requests: Mapping[int, Request],
        holders: SlotHolders,
        *,
        payload: bool,
    ) -> None:
        self.evictor = evictor
        self.journal = journal
        self.requests = requests
        self.holders = holders
        self.payload = payload
        self.moved_slots = 0
        self.keeps_tables = False
        self.on_move: Callable[[Tier, TreeComponent, bytes, bytes], None] | None = None

    def empty(self, tier: Tier, pool: ArenaPool) -> None:
        """Move live slots out of the closed extent of `pool`, as far as that can be done now.

        The policy evicts as many slots as have to move. Slots that a transfer reads or writes wait.
        On DEVICE all slots wait while the kernels that write them have not run.
        """
        if tier is Tier.DEVICE and self._is_behind():
            return
        end, index = pool.allocator.end, pool.component.index
        closed = (end, end + pool.extent)
        n_slots = sum(_n_closed(place.slots, end) for place in self._places(tier, index, closed))
        if not n_slots:
            return
        self.evictor.ensure_free(pool.component, tier, n_slots, None)
        self._move(tier, pool, self._places(tier, index, closed))

    def _is_behind(self) -> bool:
        """Whether the engine gave a fence that is not reached yet."""
        fence = self.journal.fence
        return self.payload and fence is not None and fence.wait(0.0) is False

    def _move(self, tier: Tier, pool: ArenaPool, places: list[_Place]) -> None:
        """Move what fits into the free slots."""
        allocator, end = pool.allocator, pool.allocator.end
        moving: list[tuple[_Place, int]] = []
        n_slots = 0
        for place in places:
            n = _n_closed(place.slots, end)
            if n_slots + n <= allocator.n_free:
                moving.append((place, n))
                n_slots += n
        target = allocator.allocate(n_slots)
        assert target is not None
        source = b"".join(_closed(place.slots, end) for place, _ in moving)
        if not source:
            return
        pool.memory.copy_slots(source, target)
        at = 0
        for place, n in moving:
            place.put(_replaced(place.slots, end, target[at : at + n * SLOT_BYTES]))
            at += n * SLOT_BYTES
        allocator.free(source)
        self.moved_slots += n_slots
        if self.on_move is not None:
            self.on_move(tier, pool.component, source, target)

    def _places(self, tier: Tier, index: int, closed: tuple[int, int]) -> list[_Place]:
        """The places of slots of a closed extent that can move now: in cells and in requests."""
        first = closed[0]
        found: list[_Place] = []
        for node in self.holders.between(tier, index, *closed):
            if self.keeps_tables and node.cells[index].device_pins:
                continue
            if node.operations is None:
                found.append(self._in_cell(tier, index, node))
        if tier is Tier.DEVICE and not self.keeps_tables:
            for request in self.requests.values():
                found += _in_request(request.components[index])
        return [place for place in found if _n_closed(place.slots, first)]

    def _in_cell(self, tier: Tier, index: int, node: Node) -> _Place:
        cell, name = node.cells[index], tier.value
        slots: bytes = getattr(cell, name)

        def put(others: bytes) -> None:
            setattr(cell, name, others)
            self.holders.moved(tier, index, node, slots, others)

        return _Place(slots, put)


def _in_request(part: RequestComponent) -> list[_Place]:
    """A request's own slots of one component."""
    if not isinstance(part, RequestState):
        return [_Place(run.device, partial(_put_run, part, at)) for at, run in enumerate(part.runs)]
    found = [
        _Place(slots, partial(part.captured.__setitem__, page))
        for page, slots in part.captured.items()
    ]
    for name, state in (("live", part.live), ("tracked", part.tracked)):
        if state is not None:
            found.append(_Place(state, partial(setattr, part, name)))
    return found


def _put_run(part: RequestComponent, at: int, slots: bytes) -> None:
    run = part.runs[at]
    part.runs[at] = Run(run.first, run.end, slots, run.host, is_left=run.is_left)


def _n_closed(slots: bytes, end: int) -> int:
    return int((np.frombuffer(slots, np.int32) >= end).sum())


def _closed(slots: bytes, end: int) -> bytes:
    numbers = np.frombuffer(slots, np.int32)
    return bytes(numbers[numbers >= end])


def _replaced(slots: bytes, end: int, target: bytes) -> bytes:
    """`slots` with those that are closed replaced by `target`, in order."""
    numbers = np.frombuffer(slots, np.int32).copy()
    numbers[numbers >= end] = np.frombuffer(target, np.int32)
    return bytes(numbers)
