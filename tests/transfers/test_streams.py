"""The engine on streams of a device: order, fences, layers, failures, bounds (B3, B4, R7)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from itertools import product

import pytest
import torch

from kvgraft import TransferError
from kvgraft.transfers import PlaneCopy
from kvgraft_accelerator.fragments import Fragments, Rows
from kvgraft_accelerator.protocol import CopySizes, Event, Purpose
from kvgraft_accelerator.streams import StreamTicket, StreamTransferEngine
from kvgraft_testing.simulated import DeviceTensor, SimulatedDevice
from kvgraft_testing.simulated.streams import SimulatedStream

from .gates import Broken

N_LAYERS, N_SLOTS, LANES = 3, 16, 4
N_PLANES = 2 * N_LAYERS
SIZES = CopySizes(ring_nbytes=3 * 192, straight_nbytes=64, piece_nbytes=64, few_nbytes=1)
"""A slab has 192 bytes: a part of the ring holds one, or those of a layer in three rows."""

DEVICE_ROWS, HOST_ROWS = torch.tensor([9, 2, 3, 11]), torch.tensor([4, 5, 6, 0])


class Pools:
    """Planes on a simulated device, and slabs of the host with all planes side by side."""

    def __init__(
        self,
        sizes: CopySizes = SIZES,
        device: SimulatedDevice | None = None,
        n_slots: int = N_SLOTS,
    ) -> None:
        self.device = device or SimulatedDevice(sizes=sizes)
        self.engine = StreamTransferEngine(self.device)
        self.planes = [
            self.device.zeros((n_slots, LANES), torch.int64, f"plane {at}")
            for at in range(N_PLANES)
        ]
        memory = self.device.page_locked(n_slots * N_PLANES * LANES * 8, "slabs")
        self.slabs = memory.view(torch.int64).view(n_slots, N_PLANES * LANES)

    def copies(self, *, backup: bool, rows: slice = slice(None)) -> list[PlaneCopy]:
        """Keys and values of each layer."""
        lanes = [self.slabs[:, at * LANES : (at + 1) * LANES] for at in range(N_PLANES)]
        pairs = zip(self.planes, lanes) if backup else zip(lanes, self.planes)
        both = (DEVICE_ROWS[rows], HOST_ROWS[rows])
        return [
            PlaneCopy(at // 2, *pair, *(both if backup else both[::-1]))
            for at, pair in enumerate(pairs)
        ]

    def compute(self, first: int = 0) -> None:
        """The model writes the rows of every layer."""
        for at, plane in enumerate(self.planes):
            for row in DEVICE_ROWS.tolist():
                plane[row] = first + 100 * at + row

    def fill(self, first: int = 0) -> None:
        """The host writes the same into the slabs."""
        self.slabs[HOST_ROWS] = torch.tensor(self.wanted(first))

    def submit(
        self, *, backup: bool, fence: object = None, rows: slice = slice(None)
    ) -> StreamTicket:
        copies = self.copies(backup=backup, rows=rows)
        ticket = self.engine.submit(copies, fence)  # type: ignore[arg-type]
        assert isinstance(ticket, StreamTicket)
        return ticket

    def wanted(self, first: int = 0) -> list[list[int]]:
        """The slabs after a backup."""
        return [
            [first + 100 * at + row for at in range(N_PLANES) for _ in range(LANES)]
            for row in DEVICE_ROWS.tolist()
        ]

    def loaded(self) -> list[list[int]]:
        """The same rows of the planes."""
        return torch.cat([each.cpu()[DEVICE_ROWS] for each in self.planes], dim=1).tolist()

    def went(self, way: str) -> bool:
        return any(f" {way} " in step for step in self.device.schedule)


AT_ONCE = SIZES._replace(ring_nbytes=1 << 16)
"""Slabs that follow one another are one piece."""

WAYS = {
    "in parts": (SIZES, True),
    "at once": (AT_ONCE, True),
    "in turns": (SIZES._replace(n_streams=2), True),
    "straight in turns": (SIZES._replace(straight_nbytes=0, group_nbytes=1, n_streams=2), False),
    "a plane more than a part holds": (SIZES._replace(ring_nbytes=3 * 128), True),
    "straight": (SIZES._replace(straight_nbytes=0), False),
    "no ring": (SIZES._replace(ring_nbytes=0), False),
    "few": (SIZES._replace(few_nbytes=4 * 192 + 1), False),
}
"""Sizes, and whether rows go through the ring."""


@pytest.mark.parametrize(("sizes", "is_staged"), WAYS.values(), ids=WAYS)
def test_a_backup_arrives_in_the_slabs_behind_the_model(
    sizes: CopySizes, *, is_staged: bool
) -> None:
    pools = Pools(sizes)
    pools.compute()
    ticket = pools.submit(backup=True)
    assert not ticket.done
    assert pools.slabs.eq(0).all(), "nothing ran yet"
    assert ticket.wait(1)
    assert pools.slabs[HOST_ROWS].tolist() == pools.wanted()
    assert pools.went("gather") == is_staged
    pools.engine.close()
    pools.device.finish()


@pytest.mark.parametrize(("sizes", "is_staged"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("reverse", [False, True])
def test_a_load_arrives_in_the_planes_behind_the_model(
    sizes: CopySizes, *, is_staged: bool, reverse: bool
) -> None:
    pools = Pools(sizes)
    if reverse:
        pools.device.choose = lambda n: n - 1
    pools.fill()
    pools.compute(5)
    ticket = pools.submit(backup=False)
    assert ticket.wait(1)
    assert pools.loaded() == pools.wanted()
    assert pools.went("scatter") == is_staged
    pools.engine.close()
    pools.device.finish()


@pytest.mark.parametrize(
    ("sizes", "ends"),
    [
        (SIZES, [0, 1, 2]),
        (SIZES._replace(piece_nbytes=65), [0, 1, 1]),  # 3 planes each: a key is with layer 0
        (SIZES._replace(piece_nbytes=193), [0, 0, 0]),
        (SIZES._replace(straight_nbytes=0, group_nbytes=1), [0, 1, 2]),
        (SIZES._replace(straight_nbytes=0, group_nbytes=257), [0, 0, 1]),
        (SIZES._replace(straight_nbytes=0), [0, 0, 0]),
    ],
)
def test_layers_of_a_load_are_announced_in_groups_of_large_pieces(
    sizes: CopySizes, ends: list[int]
) -> None:
    pools = Pools(sizes)
    ticket = pools.submit(backup=False)
    events = [ticket.layer_event(layer) for layer in range(N_LAYERS)]
    assert None not in events
    groups = list(dict.fromkeys(map(id, events)))
    assert [groups.index(id(event)) for event in events] == ends
    for layer, event in enumerate(events):
        pools.device.compute().wait(event)  # type: ignore[arg-type]
        pools.planes[2 * layer + 1][int(DEVICE_ROWS[-1])].cpu()
        assert [ticket.layer_ready(each) for each in range(N_LAYERS)] == [
            end <= ends[layer] for end in ends
        ]
    assert ticket.done
    pools.device.finish()


@pytest.mark.parametrize(
    ("group_nbytes", "n_events", "ends"),
    [(1, 3, [0, 1, 2]), (257, 2, [0, 0, 1]), (9999, 1, [0] * 3)],
)
def test_layers_with_rows_of_their_own_cross_together(
    group_nbytes: int, n_events: int, ends: list[int]
) -> None:
    """Keys, and values of the last layer, have other rows than the values of the others."""
    pools = Pools(SIZES._replace(straight_nbytes=0, group_nbytes=group_nbytes))
    pools.fill()
    others = torch.tensor([1, 5, 7, 2]), torch.tensor([4, 5, 6, 0])
    copies = [
        copy._replace(target_rows=others[0]) if at in (0, 2, 4, 5) else copy
        for at, copy in enumerate(pools.copies(backup=False))
    ]
    ticket = pools.engine.submit(copies[::-1])
    assert isinstance(ticket, StreamTicket)
    events = [ticket.layer_event(layer) for layer in range(N_LAYERS)]
    assert len(set(map(id, events))) == n_events
    assert [list(dict.fromkeys(map(id, events))).index(id(each)) for each in events] == ends
    for copy, event in zip(copies, [event for event in events for _ in range(2)]):
        pools.device.compute().wait(event)  # type: ignore[arg-type]
        found = copy.target.cpu()[copy.target_rows]
        assert found.equal(pools.slabs[HOST_ROWS][:, copy.source.storage_offset() :][:, :LANES])
    assert ticket.wait(1)
    pools.device.finish()


@pytest.mark.parametrize("backup", [True, False])
@pytest.mark.parametrize("few_nbytes", [1, 193])
@pytest.mark.parametrize("n_streams", [1, 2, 3])
def test_one_direction_writes_in_the_order_of_submission(
    n_streams: int, few_nbytes: int, *, backup: bool
) -> None:
    """One row goes straight where that is few, four rows through the ring."""
    one, some, every, most = slice(1), slice(None, None, 2), slice(None), slice(1, None)
    pairs = ((one, every), (every, one), (every, some), (one, one), (every, most))
    for rows, n_slabs in product(pairs, (1, 9)):
        ring_nbytes = (2 + n_streams) * n_slabs * 192
        sizes = SIZES._replace(ring_nbytes=ring_nbytes, few_nbytes=few_nbytes)
        pools = Pools(sizes._replace(n_streams=n_streams))
        pools.fill()
        pools.device.synchronize()
        for some in rows:
            pools.submit(backup=backup, rows=some)
        pools.device.finish()


def test_the_two_directions_do_not_wait_for_each_other() -> None:
    for first in (True, False):
        pools = Pools()
        pools.submit(backup=first)
        assert pools.submit(backup=not first).wait(1)
        ways = ("backup", "gather", "load-back", "scatter")
        assert [pools.went(way) for way in ways] == [not first, not first, first, first]
        pools.device.synchronize()
    assert pools.engine.ring_nbytes == 2 * SIZES.ring_nbytes


@pytest.mark.parametrize("backup", [True, False])
def test_a_part_that_fails_fails_its_ticket_and_the_layers_behind_it(*, backup: bool) -> None:
    n_events = len(Pools().submit(backup=backup).events or ())
    for number in range(n_events):
        pools = Pools()
        ticket = pools.submit(backup=backup)
        assert ticket.events is not None
        pools.device.fail(ticket.events[number : number + 1])
        while not ticket.done:
            assert ticket.wait(1)
        assert isinstance(ticket.error, TransferError)
        ready = [ticket.layer_ready(layer) for layer in range(N_LAYERS)]
        assert ready == [end <= number for end in ticket.ends]


class Refusing(SimulatedDevice):
    """Refuses the last of so many moves, once."""

    def __init__(self, n_moves: int, n_streams: int) -> None:
        super().__init__(sizes=SIZES._replace(ring_nbytes=1 << 20, n_streams=n_streams))
        self.left = n_moves

    def submit_moves(self, stream: SimulatedStream, fragments: Fragments) -> None:
        self.left -= 1
        if self.left == 0:
            raise TransferError("refused")
        super().submit_moves(stream, fragments)


N_MANY = SIZES.first_pieces + 8
MANY = torch.arange(N_MANY) * 2
"""Rows that do not follow one another, more than the first call takes."""


@pytest.mark.parametrize("backup", [True, False])
@pytest.mark.parametrize("n_moves", range(1, 4))
@pytest.mark.parametrize("n_streams", [1, 2])
def test_copies_behind_one_that_was_refused_half_way_wait_for_the_half(
    n_streams: int, n_moves: int, *, backup: bool
) -> None:
    pools = Pools(device=Refusing(n_moves, n_streams), n_slots=2 * N_MANY)
    copies = [
        copy._replace(source_rows=MANY, target_rows=MANY) for copy in pools.copies(backup=backup)
    ]
    refused, *good = (pools.engine.submit(copies) for _ in range(5))  # the ring goes round
    assert refused.wait(1)
    assert "refused" in str(refused.error)
    assert all(ticket.wait(1) and ticket.error is None for ticket in good)
    pools.device.finish()


@pytest.mark.parametrize("backup", [True, False])
def test_the_first_call_takes_few_pieces_and_each_later_one_twice_as_many(*, backup: bool) -> None:
    n = 4 * SIZES.first_pieces
    pools = Pools(SIZES._replace(straight_nbytes=0, n_streams=2), n_slots=2 * n)
    key, *_ = pools.copies(backup=backup)
    rows = torch.arange(n) * 2
    copies = [key._replace(source_rows=rows, target_rows=rows)]
    way = "backup" if backup else "load-back"
    for few_nbytes, calls in ((1, 3), (n * LANES * 8, 1)):
        pools.device.sizes = pools.device.sizes._replace(few_nbytes=few_nbytes)
        for _ in range(2):
            ticket = pools.engine.submit(copies)
            assert isinstance(ticket, StreamTicket)
            pools.device.compute().wait(ticket.layer_event(0))  # type: ignore[arg-type]
            pools.planes[0].fill_(1)
            pools.device.finish()
            pools.device.synchronize()
            assert sum(f" {way} on " in step for step in pools.device.schedule) == calls
            pools.device.schedule.clear()


class Noting(SimulatedDevice):
    """Notes the sizes of what crosses the bus, call by call, and the rows moved on the device."""

    def __init__(self, sizes: CopySizes) -> None:
        super().__init__(sizes=sizes)
        self.pieces: list[list[int]] = []
        self.rows: list[tuple[int, ...]] = []

    def submit_moves(self, stream: SimulatedStream, fragments: Fragments) -> None:
        if stream.purpose.crosses_bus:
            self.pieces.append(fragments.nbytes.tolist())
        super().submit_moves(stream, fragments)

    def submit_rows(self, stream: SimulatedStream, rows: Rows) -> None:
        self.rows.append((rows.planes.shape[1], *map(len, rows[1:])))
        super().submit_rows(stream, rows)


@pytest.mark.parametrize("backup", [True, False])
def test_pages_that_are_neighbours_on_the_host_are_one_piece_in_any_order(*, backup: bool) -> None:
    device = Noting(AT_ONCE._replace(piece_nbytes=193))
    pools = Pools(device=device)
    on_device, on_host = torch.tensor([9, 2, 3, 11, 0]), torch.tensor([6, 0, 5, 12, 4])
    rows = (on_device, on_host) if backup else (on_host, on_device)
    copies = [
        copy._replace(source_rows=rows[0], target_rows=rows[1])
        for copy in pools.copies(backup=backup)
    ]
    pools.slabs.copy_(torch.arange(pools.slabs.numel()).view_as(pools.slabs))
    for at, plane in enumerate(pools.planes):
        plane.copy_(torch.arange(N_SLOTS * LANES).view(N_SLOTS, LANES) - 1000 * (at + 1))
    assert pools.engine.submit(copies).wait(1)
    assert device.pieces == [[192, 3 * 192, 192]]
    assert device.rows == [(N_PLANES, 5, 5, 5)], "a number for each row, not for each plane of it"
    for at, plane in enumerate(pools.planes):
        lanes = pools.slabs[:, at * LANES : (at + 1) * LANES]
        assert plane.cpu()[on_device].equal(lanes[on_host])
    assert pools.slabs.lt(0).any() == backup
    device.finish()


@pytest.mark.parametrize("backup", [True, False])
def test_parts_of_the_ring_take_twice_as_much_each_time(*, backup: bool) -> None:
    """So the bus begins early."""
    sizes = SIZES._replace(ring_nbytes=3 * 5 * 192, piece_nbytes=193, first_nbytes=192)
    device = Noting(sizes)
    pools = Pools(device=device, n_slots=64)
    rows = torch.arange(19) * 3
    copies = [
        copy._replace(source_rows=rows, target_rows=rows) for copy in pools.copies(backup=backup)
    ]
    for _ in range(2):
        assert pools.engine.submit(copies).wait(1)
        assert [len(each) for each in device.pieces] == [1, 2, 4, 5, 5, 2]
        device.pieces.clear()
    device.finish()


def test_a_kernel_waits_for_the_event_of_its_layer_and_for_no_other() -> None:
    pools = Pools()
    pools.fill()
    ticket = pools.submit(backup=False)
    event = ticket.layer_event(1)
    assert event is not None
    assert ticket.layer_event(7) is None
    pools.device.compute().wait(event)
    assert pools.planes[2][int(DEVICE_ROWS[0])].cpu().eq(200 + int(DEVICE_ROWS[0])).all()
    assert [ticket.layer_ready(layer) for layer in range(N_LAYERS)] == [True, True, False]
    assert not ticket.done
    ticket.wait_layer(2, 1)
    assert ticket.wait(0)
    pools.device.finish()


def test_an_event_of_the_device_is_a_fence_that_the_host_does_not_wait_for() -> None:
    pools = Pools()
    other = pools.device.stream(Purpose.COMPUTE)
    with pools.device.on(other):
        pools.compute()
    ticket = pools.submit(backup=True, fence=other.record())
    assert ticket.events is not None
    assert ticket.wait(1)
    assert pools.slabs[HOST_ROWS].tolist() == pools.wanted()
    pools.device.finish()


def test_a_fence_of_the_host_holds_back_its_copy_and_those_behind_it() -> None:
    pools, fence = Pools(), threading.Event()
    first, second = pools.submit(backup=False, fence=fence), pools.submit(backup=False)
    backup = pools.submit(backup=True)
    assert first.events is second.events is None
    assert backup.events is not None, "the other direction goes on"
    with pytest.raises(TransferError, match="its fence is not reached; name an event"):
        second.layer_event(0)
    assert not first.wait(0.01)
    with pytest.raises(TransferError, match=r"layer 2: not done after 0\.01 s; treat the load"):
        second.wait_layer(2, 0.01)
    fence.set()
    assert second.wait(1)
    assert first.done
    pools.engine.close()


def test_a_fence_that_raises_or_is_never_reached_fails_its_copy_alone() -> None:
    pools = Pools()
    pools.engine = StreamTransferEngine(pools.device, fence_timeout_s=0.01)
    broken = pools.submit(backup=False, fence=Broken())
    late = pools.submit(backup=False, fence=threading.Event())
    good = pools.submit(backup=False)
    assert broken.wait(1)
    assert isinstance(broken.error, OSError)
    while not late.wait(0.02):
        pass
    assert isinstance(late.error, TransferError)
    assert "0.01 s" in str(late.error)
    assert good.wait(1)
    assert good.error is None


@pytest.mark.parametrize("backup", [True, False])
def test_a_copy_that_fails_ends_its_ticket_when_all_its_copies_have_ended(*, backup: bool) -> None:
    pools = Pools()
    first = pools.submit(backup=backup)
    assert first.events is not None
    pools.device.fail(first.events[-1:])
    second = pools.submit(backup=backup)
    while not first.done:
        assert first.wait(1)
    assert isinstance(first.error, TransferError)
    assert all(event.passed for event in first.events)  # type: ignore[attr-defined]
    if not backup:
        assert first.layer_ready(0)
        with pytest.raises(TransferError, match="treat the load as failed"):
            first.wait_layer(N_LAYERS - 1, 1)
    assert second.wait(1)
    assert second.error is None


def test_a_copy_that_cannot_be_submitted_ends_behind_those_that_were() -> None:
    pools = Pools()
    first, second, *others = pools.copies(backup=False)
    first = first._replace(source=first.source.clone())  # not page-locked: copied row by row
    refused = [each._replace(source_rows="no rows") for each in others]  # type: ignore[arg-type]
    ticket = pools.engine.submit([first, second, *refused])
    assert not ticket.done
    assert ticket.wait(1)
    assert ticket.error is not None
    pools.engine.close()
    pools.device.finish()


def test_copies_that_read_each_others_bytes_keep_their_order() -> None:
    pools = Pools()
    pools.fill()
    pools.device.choose = lambda n: n - 1
    stage = pools.device.zeros((N_SLOTS, LANES), torch.int64, "a stage")
    rows = torch.arange(len(HOST_ROWS))
    chain: Sequence[PlaneCopy] = [
        PlaneCopy(0, pools.slabs[:, :LANES], stage, HOST_ROWS, rows),
        PlaneCopy(0, stage, pools.planes[0], rows, DEVICE_ROWS),
    ]
    ticket = pools.engine.submit(chain)
    assert ticket.wait(1)
    assert pools.planes[0].cpu()[DEVICE_ROWS][:, 0].tolist() == DEVICE_ROWS.tolist()


def test_an_event_is_the_devices_and_a_lock_is_not() -> None:
    pools = Pools()
    event: Event = pools.device.compute().record()
    assert pools.device.orders(event)
    assert not pools.device.orders(threading.Event())
    assert not SimulatedDevice().orders(event)
    assert isinstance(pools.planes[0], DeviceTensor)


MOST_CALLS = 120
"""Of Python's and of C's functions, for each plane of a transfer."""


@pytest.mark.parametrize("backup", [True, False])
def test_nothing_is_done_in_python_for_each_page(*, backup: bool) -> None:
    n_planes, n_pages = 16, 64
    device = SimulatedDevice(sizes=CopySizes(1 << 20, 512, few_nbytes=1))
    engine = StreamTransferEngine(device)
    planes = [device.zeros((n_pages, 1), torch.int64, f"plane {at}") for at in range(n_planes)]
    slabs = device.page_locked(n_pages * n_planes * 8, "slabs").view(torch.int64)
    lanes = [slabs.view(n_pages, n_planes)[:, at : at + 1] for at in range(n_planes)]
    sources, targets = (planes, lanes) if backup else (lanes, planes)

    def calls(n: int) -> int:
        pages = torch.arange(0, 2 * n, 2), torch.arange(2 * n - 1, 0, -2)
        copies = [PlaneCopy(0, *pair, *pages) for pair in zip(sources, targets)]
        counted = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal counted
            counted += event in {"call", "c_call"}

        sys.setprofile(count)
        try:
            engine.submit(copies)
        finally:
            sys.setprofile(None)
        device.synchronize()
        return counted

    for _ in range(4):  # the ring went round
        calls(4)
    few, many = calls(4), calls(32)
    assert abs(many - few) < n_planes
    assert many < MOST_CALLS * n_planes
