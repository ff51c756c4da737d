"""The engine on streams of a device: order, fences, layers, failures, bounds (B3, B4, R7)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import pytest
import torch

from kvgraft import TransferError
from kvgraft.transfers import PlaneCopy
from kvgraft_accelerator.protocol import CopySizes, Event, Purpose
from kvgraft_accelerator.streams import StreamTicket, StreamTransferEngine
from kvgraft_testing.simulated import DeviceTensor, SimulatedDevice

from .gates import Broken

N_LAYERS, N_SLOTS, LANES = 3, 16, 8
SIZES = CopySizes(ring_nbytes=768, straight_nbytes=512)
"""A part of the ring holds a slab."""

DEVICE_ROWS, HOST_ROWS = torch.tensor([9, 2, 3, 11]), torch.tensor([4, 5, 6, 0])


class Pools:
    """Planes on a simulated device, and slabs of the host with all planes side by side."""

    def __init__(self, sizes: CopySizes = SIZES) -> None:
        self.device = SimulatedDevice(sizes=sizes)
        self.engine = StreamTransferEngine(self.device)
        self.planes = [
            self.device.zeros((N_SLOTS, LANES), torch.int64, f"layer {layer}")
            for layer in range(N_LAYERS)
        ]
        memory = self.device.page_locked(N_SLOTS * N_LAYERS * LANES * 8, "slabs")
        self.slabs = memory.view(torch.int64).view(N_SLOTS, N_LAYERS * LANES)

    def copies(self, *, backup: bool) -> list[PlaneCopy]:
        lanes = [self.slabs[:, at * LANES : (at + 1) * LANES] for at in range(N_LAYERS)]
        pairs = zip(self.planes, lanes) if backup else zip(lanes, self.planes)
        rows = (DEVICE_ROWS, HOST_ROWS) if backup else (HOST_ROWS, DEVICE_ROWS)
        return [PlaneCopy(layer, *pair, *rows) for layer, pair in enumerate(pairs)]

    def compute(self) -> None:
        """The model writes the rows of every layer."""
        for layer, plane in enumerate(self.planes):
            for row in DEVICE_ROWS.tolist():
                plane[row] = 100 * layer + row

    def submit(self, *, backup: bool, fence: object = None) -> StreamTicket:
        ticket = self.engine.submit(self.copies(backup=backup), fence)  # type: ignore[arg-type]
        assert isinstance(ticket, StreamTicket)
        return ticket

    def wanted(self) -> list[list[int]]:
        """The slabs after a backup."""
        return [
            [100 * layer + row for layer in range(N_LAYERS) for _ in range(LANES)]
            for row in DEVICE_ROWS.tolist()
        ]


@pytest.mark.parametrize(
    "sizes",
    [SIZES, CopySizes(1 << 16, 512), CopySizes(768, 0)],
    ids=["in parts", "at once", "straight"],
)
def test_a_backup_arrives_in_the_slabs_behind_the_model(sizes: CopySizes) -> None:
    pools = Pools(sizes)
    pools.compute()
    ticket = pools.submit(backup=True)
    assert not ticket.done
    assert pools.slabs.eq(0).all(), "nothing ran yet"
    assert ticket.wait(1)
    assert pools.slabs[HOST_ROWS].tolist() == pools.wanted()
    gathered = any("gather" in step for step in pools.device.schedule)
    assert gathered == (sizes.straight_nbytes > 0)
    pools.engine.close()
    pools.device.finish()


def test_a_kernel_waits_for_the_event_of_its_layer_and_for_no_other() -> None:
    pools = Pools()
    pools.slabs[HOST_ROWS] = torch.tensor(pools.wanted())
    ticket = pools.submit(backup=False)
    event = ticket.layer_event(1)
    assert event is not None
    assert ticket.layer_event(7) is None
    pools.device.compute().wait(event)
    assert pools.planes[1][int(DEVICE_ROWS[0])].cpu().eq(100 + int(DEVICE_ROWS[0])).all()
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
    first, *others = pools.copies(backup=False)
    first = first._replace(source=first.source.clone())  # not page-locked: copied row by row
    refused = [each._replace(source_rows="no rows") for each in others]  # type: ignore[arg-type]
    ticket = pools.engine.submit([first, *refused])
    assert not ticket.done
    assert ticket.wait(1)
    assert ticket.error is not None
    pools.engine.close()
    pools.device.finish()


def test_copies_that_read_each_others_bytes_keep_their_order() -> None:
    pools = Pools()
    pools.slabs[HOST_ROWS] = torch.tensor(pools.wanted())
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
    device = SimulatedDevice(sizes=CopySizes(1 << 20, 512))
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
