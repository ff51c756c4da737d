"""Whether the contract suite sees defects on the toy device.

Run by `test_accelerator` in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import hypothesis
import numpy as np
import pytest
import torch

from kvgraft import ConfigError, hookimpl
from kvgraft.packages.registry import Plugin, load_plugin, select
from kvgraft.transfers import pair_planes
from kvgraft_accelerator import streams
from kvgraft_testing.checking import Checker
from kvgraft_testing.machine import (
    Setup,
    drive,
    machine_for,
    references,
    search,
    setup_for,
)
from kvgraft_testing.machine.accelerators import PromptedAcceleratorEngine
from kvgraft_testing.machine.memory import DeviceRows
from kvgraft_testing.result import Status
from tests.devices.player import COMPONENTS
from tests.devices.toy import load

TOY = load()
SETTINGS = hypothesis.settings(max_examples=12, stateful_step_count=40, derandomize=True)
MORE = hypothesis.settings(SETTINGS, max_examples=60)
"""For a defect that shows in copies alone, of which one example in six has some."""


@pytest.fixture(autouse=True)
def _late() -> Iterator[None]:
    TOY.delay(50)
    yield
    TOY.delay(50)


def in_company(name: str | Plugin) -> Setup:
    """A component beside others of each kind, on the device."""
    named = name if isinstance(name, str) else name.name
    options = {named: COMPONENTS[named]} if named in COMPONENTS else {}
    return replace(setup_for([name], options, references()), device="toy")


def test_bytes_that_were_copied_too_early_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    start = streams._Lane.start
    monkeypatch.setattr(streams._Lane, "start", lambda self, ticket, _: start(self, ticket, ()))
    TOY.delay(300)
    found = search(machine_for(in_company("full")), MORE)
    assert found is not None, "survived"
    assert found.violation.rule in {"B3", "T9", "R5"}, found.violation


def test_copies_run_before_the_host_learns_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def seen(self: PromptedAcceleratorEngine, index: int = 0) -> None:
        ticket = self.pending[index]
        assert not ticket.done
        told.append(all(event.wait(30) for event in ticket.events or ()))  # type: ignore[attr-defined]
        assert not ticket.done
        assert not any(map(ticket.layer_ready, ticket.layers))
        step(self, index)
        assert ticket.done

    step = PromptedAcceleratorEngine.step
    monkeypatch.setattr(PromptedAcceleratorEngine, "step", seen)
    assert drive(in_company("full"), settings=SETTINGS).violation is None
    assert told
    assert all(told)


class Looking:
    """A component whose copies look at memory of the device from the host."""

    def __init__(self) -> None:
        (full,) = select(["full"])
        self.create_component = full.implementation.create_component  # type: ignore[attr-defined]

    @hookimpl
    def declare_component(self) -> object:
        (full,) = select(["full"])
        return replace(full.declaration, name="looking")

    @hookimpl
    def build_hicache_transfers(self, component, query):  # type: ignore[no-untyped-def]
        for lanes in component.device.lanes:
            lanes.numpy()
        return pair_planes(component, query)

    @hookimpl
    def commit_hicache_transfers(self, component, query):  # type: ignore[no-untyped-def]
        del component, query

    @hookimpl
    def abort_hicache_transfers(self, component, query):  # type: ignore[no-untyped-def]
        del component, query


def test_a_component_that_looks_at_the_devices_memory_is_found() -> None:
    plugin = load_plugin("looking", Looking())
    checker = Checker(plugin, {"head_dim": 16}, "dev", device="toy")
    result = checker.decide("B3-copies-cover-every-slot-and-plane")
    assert result.status is Status.FAILED, result
    assert "can't convert toy:0 device type tensor to numpy" in result.evidence
    here = Checker(plugin, {"head_dim": 16}, "dev")
    assert here.decide("B3-copies-cover-every-slot-and-plane").status is Status.PASSED


def test_a_device_whose_streams_torch_does_not_know_is_refused() -> None:
    (full,) = select(["full"])
    with pytest.raises(ConfigError, match="device 'meta' is no accelerator; use cpu, simulated, o"):
        Checker(full, device="meta")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_rows_of_a_device_are_written_and_read_as_those_of_an_array(dtype: torch.dtype) -> None:
    array = torch.arange(60, dtype=dtype).view(10, 6).numpy()[:, ::2]
    memory = torch.arange(60, dtype=dtype).view(10, 6).to("toy")
    rows = DeviceRows(memory[:, ::2])
    assert (len(rows), rows.shape, rows.dtype) == (10, (10, 3), array.dtype)
    new = np.arange(6).reshape(2, 3)
    for numbers, values in (([7, 2], new), (np.array([0, 9]), np.array(249)), ([], new[:0])):
        rows[numbers] = array[numbers] = values.astype(array.dtype)
        assert (rows[list(range(10))] == array).all()
    assert memory.cpu()[:, 1::2].equal(torch.arange(60, dtype=dtype).view(10, 6)[:, 1::2])
