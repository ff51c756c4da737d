"""The CPU engine on its own: order, fences, layers, failures, bounds (B4, R7)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from kvgraft import TransferError
from kvgraft.transfers import CpuTransferEngine, PlaneCopy

from .gates import Broken, GatedRows, HeldFence

ROWS = torch.arange(4)


@pytest.fixture
def engine() -> Iterator[CpuTransferEngine]:
    engine = CpuTransferEngine()
    yield engine
    engine.close()


def copy(layer: int = 0, value: int = 1) -> PlaneCopy:
    return PlaneCopy(
        layer, torch.full((4, 2), value), torch.zeros((4, 2), dtype=torch.int64), ROWS, ROWS
    )


def test_submitting_does_not_wait_and_a_copy_does_not_start_before_its_fence(
    engine: CpuTransferEngine,
) -> None:
    fence, moved = HeldFence(), copy()
    ticket = engine.submit([moved], fence)
    assert fence.met.wait(60)
    assert not ticket.done
    assert moved.target.sum() == 0
    # data that the computation writes before the fence is copied
    moved.source.fill_(7)
    fence.set()
    assert ticket.wait(60)
    assert ticket.error is None
    assert moved.target.eq(7).all()


def test_submissions_run_in_their_order(engine: CpuTransferEngine) -> None:
    fence, target = HeldFence(), torch.zeros((4, 2), dtype=torch.int64)
    tickets = [
        engine.submit([copy(value=value)._replace(target=target)], fence if value == 1 else None)
        for value in (1, 2, 3)
    ]
    assert not any(ticket.done for ticket in tickets)
    fence.set()
    assert tickets[-1].wait(60)
    assert all(ticket.done for ticket in tickets)
    assert target.eq(3).all()


def test_a_layer_can_be_read_before_the_next_one_has_arrived(engine: CpuTransferEngine) -> None:
    gate = threading.Event()
    first, last = copy(layer=2), copy(layer=5)
    gated = last._replace(source=GatedRows(last.source, gate))  # type: ignore[arg-type]
    ticket = engine.submit([first, gated])
    ticket.wait_layer(2, 5)
    assert ticket.layer_ready(2)
    assert first.target.eq(1).all()
    assert not ticket.layer_ready(5)
    assert ticket.layer_ready(3), "a layer nothing is copied for has nothing to wait for"
    assert not ticket.done
    with pytest.raises(TransferError, match=r"layer 5: not done after 0\.05 s"):
        ticket.wait_layer(5, 0.05)
    gate.set()
    ticket.wait_layer(5, 5)
    assert last.target.eq(1).all()
    assert ticket.wait(60)


def test_a_copy_that_raises_fails_its_ticket_and_no_other(engine: CpuTransferEngine) -> None:
    outside = copy(layer=1)._replace(source_rows=ROWS + 100)
    bad = engine.submit([copy(layer=0), outside, copy(layer=2)])
    good = engine.submit([copy()])
    assert good.wait(60)
    assert good.error is None
    assert isinstance(bad.error, IndexError)
    assert bad.layer_ready(0)
    assert not bad.layer_ready(1)
    for layer in (1, 2):
        with pytest.raises(TransferError, match=f"layer {layer}: .*treat the load as failed"):
            bad.wait_layer(layer, 5)


def test_a_fence_that_raises_or_is_never_reached_fails_the_copy() -> None:
    engine = CpuTransferEngine(fence_timeout_s=0.05)
    moved = copy()
    broken = engine.submit([moved], Broken())
    late = engine.submit([moved], HeldFence())
    assert late.wait(60)
    assert isinstance(broken.error, OSError)
    assert isinstance(late.error, TransferError)
    assert "0.05 s" in str(late.error)
    assert moved.target.sum() == 0
    engine.close()


def test_waiting_is_bounded(engine: CpuTransferEngine) -> None:
    fence = HeldFence()
    ticket = engine.submit([copy()], fence)
    started = time.monotonic()
    assert not ticket.wait(0.05)
    assert 0.04 < time.monotonic() - started < 30
    fence.set()


def test_copies_after_the_end_fail_at_once() -> None:
    engine = CpuTransferEngine()
    engine.close()
    moved = copy()
    ticket = engine.submit([moved])
    assert ticket.done
    assert str(ticket.error) == "the engine is closed: nothing is copied any more"
    assert moved.target.sum() == 0
    engine.close()


def test_closing_finishes_submitted_copies() -> None:
    engine = CpuTransferEngine(n_workers=2)
    copies = [copy(value=value) for value in range(1, 9)]
    tickets = [engine.submit([each]) for each in copies]
    engine.close()
    assert all(ticket.done and ticket.error is None for ticket in tickets)
    assert all(each.target.eq(value).all() for value, each in enumerate(copies, 1))
