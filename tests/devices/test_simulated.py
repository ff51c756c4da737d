"""The simulated device on its own: late, private, and strict about order."""

from __future__ import annotations

import pytest
import torch

from kvgraft import ContractViolation, TransferError
from kvgraft.devices import PlaneCopy
from kvgraft_accelerator.protocol import Purpose
from kvgraft_testing.simulated import DeviceTensor, SimulatedDevice

ROWS = torch.arange(4)


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


def plane(device: SimulatedDevice, label: str = "a plane") -> DeviceTensor:
    return device.zeros((8, 2), torch.int64, label)


def slab(device: SimulatedDevice) -> torch.Tensor:
    return device.page_locked(8 * 16, "a slab").view(torch.int64).view(8, 2)


def copied(source: torch.Tensor, target: torch.Tensor, layer: int = 0) -> PlaneCopy:
    return PlaneCopy(layer, source, target, ROWS, ROWS)


def test_the_host_cannot_touch_the_devices_memory(device: SimulatedDevice) -> None:
    rows = plane(device)
    assert rows.device != torch.device("cpu")
    with pytest.raises(RuntimeError):
        rows.numpy()
    with pytest.raises(RuntimeError, match="an address of a simulated device's memory"):
        rows.data_ptr()
    with pytest.raises(RuntimeError, match="of a simulated device and of the CPU; copy them first"):
        rows.add_(torch.ones(8, 2, dtype=torch.int64))
    assert str(rows) == "DeviceTensor([8, 2], torch.int64, privateuseone)"


def test_work_runs_when_the_host_waits_for_it_and_no_earlier(device: SimulatedDevice) -> None:
    rows = plane(device)
    rows[2] = 7
    assert device.schedule == []
    event = device.compute().record()
    rows[3] = 9
    assert not event.done()
    assert event.wait()
    assert len(device.schedule) == 1
    assert rows[2:4].cpu().tolist() == [[7, 7], [9, 9]]
    device.finish()


def test_torch_operators_are_kernels(device: SimulatedDevice) -> None:
    rows = plane(device)
    rows[torch.tensor([1, 5])] = 3
    doubled = (rows + rows)[torch.tensor([5, 0])]
    assert isinstance(doubled, DeviceTensor)
    assert device.schedule == []
    assert doubled.cpu().tolist() == [[6, 6], [0, 0]]
    assert rows.view(torch.uint8).shape == (8, 16)
    assert int(rows.sum()) == 12


def test_a_schedule_may_run_work_of_other_streams_first() -> None:
    drawn = iter([1, 0, 0, 0])
    device = SimulatedDevice(lambda n: next(drawn) % n)
    rows, side = plane(device), device.stream(Purpose.LOAD_BACK)
    with device.named("first"):
        rows[0] = 1
    with device.on(side), device.named("second"):
        rows[1] = 1
    device.compute().record().wait()
    assert device.schedule == ["2 second on stream load-back", "1 first on stream compute"]


def test_a_copy_that_no_event_orders_behind_a_kernel_is_named(device: SimulatedDevice) -> None:
    rows, side = plane(device, "the plane"), device.stream(Purpose.BACKUP)
    with device.named("the forward"):
        rows[3] = 1
    side.copy([[copied(rows, slab(device))]])
    with pytest.raises(ContractViolation) as caught:
        device.finish()
    assert caught.value.rule == "B4"
    assert (
        "backup of 0 on stream backup reads 16 bytes of the plane that the forward on stream "
        "compute writes; no event orders them: let stream backup wait for one that stream compute "
        "records behind the forward"
    ) in str(caught.value)


@pytest.mark.parametrize("by", ["an event", "an event of an event", "the host", "other rows"])
def test_ordered_accesses_are_not_named(device: SimulatedDevice, by: str) -> None:
    rows, side, third = plane(device), *(device.stream(Purpose.BACKUP) for _ in range(2))
    rows[7 if by == "other rows" else 3] = 1
    event = device.compute().record()
    if by == "an event":
        side.wait(event)
    elif by == "an event of an event":
        third.wait(event)
        side.wait(third.record())
    elif by == "the host":
        event.wait()
    side.copy([[copied(rows, slab(device))]])
    device.finish()


def test_an_event_that_was_recorded_too_early_orders_nothing(device: SimulatedDevice) -> None:
    rows, side = plane(device), device.stream(Purpose.BACKUP)
    side.wait(device.compute().record())
    rows[3] = 1
    side.copy([[copied(rows, slab(device))]])
    with pytest.raises(ContractViolation, match="B4"):
        device.finish()


def test_the_host_is_notified_when_it_touches_a_slab_too_early(device: SimulatedDevice) -> None:
    rows, locked, side = plane(device), slab(device), device.stream(Purpose.BACKUP)
    (event,) = side.copy([[copied(rows, locked)]])
    event.wait()
    device.host(locked, "the store", writes=False)
    side.copy([[copied(rows, locked)]])
    device.host(locked, "the store", writes=False)
    with pytest.raises(
        ContractViolation, match=r"B3: core: the store on host thread \d+ reads 64 b"
    ):
        device.finish()


def test_page_locked_memory_is_read_late_and_other_memory_at_once(device: SimulatedDevice) -> None:
    locked, pageable = slab(device), torch.zeros(8, 2, dtype=torch.int64)
    late, now, side = plane(device), plane(device), device.stream(Purpose.LOAD_BACK)
    side.copy([[copied(locked, late), copied(pageable, now)]])
    locked.fill_(5)
    pageable.fill_(5)
    device.compute().wait(side.record())
    assert late.cpu()[:4].eq(5).all()
    assert now.cpu().eq(0).all()


def test_copies_of_one_group_run_in_any_order() -> None:
    device = SimulatedDevice(lambda n: n - 1)
    source, target, side = plane(device), plane(device), device.stream(Purpose.LOAD_BACK)
    other = plane(device)
    other.fill_(2)
    device.synchronize()
    side.copy([[copied(source, target), copied(other, target)]])
    device.compute().wait(side.record())
    assert target.cpu().eq(0).all()


def test_work_that_raises_fails_the_event_behind_it_and_no_other(device: SimulatedDevice) -> None:
    def broken() -> None:
        raise ValueError("an illegal access")

    side = device.stream(Purpose.LOAD_BACK)
    (first,) = side.copy([[copied(slab(device), plane(device))]])
    with device.on(side):
        device.launch("a kernel", broken)
    second = side.record()
    (third,) = side.copy([[copied(slab(device), plane(device))]])
    assert first.wait()
    with pytest.raises(TransferError, match="stream load-back: an illegal access"):
        second.wait()
    with pytest.raises(TransferError):
        second.done()
    assert third.wait()


def test_rows_that_are_not_there_are_refused_at_once(device: SimulatedDevice) -> None:
    outside = copied(slab(device), plane(device))._replace(source_rows=ROWS + 100)
    with pytest.raises(IndexError, match="rows 100 to 103 of a plane of 8"):
        device.stream(Purpose.LOAD_BACK).copy([[outside]])
