"""Copies of slots cost a few calls for each kind of plane and move all bytes of these alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvgraft import Tier
from kvgraft.pools import DevicePool, PlaneSpec, slot_index
from kvgraft.pools.device import PLANE_ALIGNMENT, copy_rows, stack_lanes
from kvgraft.pools.plan import PoolPlan

from ..gpu import accelerator

N_LAYERS = 48
STATE = [
    spec
    for layer in range(N_LAYERS)
    for spec in (
        PlaneSpec(layer, "conv", (10, 3), torch.bfloat16),
        PlaneSpec(layer, "recurrent", (2, 3, 5), torch.float32),
    )
]
"""A state of 48 layers: a row of 60 bytes and one of 120 in each."""


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the calls of torch inside its block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def as_slots(slots: Iterable[int]) -> bytes:
    return np.fromiter(slots, np.int32).tobytes()


def filled(pool: DevicePool) -> list[torch.Tensor]:
    """Random bytes in every plane; copies of them."""
    noise = torch.Generator().manual_seed(1)
    for plane in pool.planes:
        raw = torch.randint(0, 256, (*plane.view(torch.uint8).shape,), generator=noise)
        plane.view(torch.uint8).copy_(raw)
    return [plane.view(torch.uint8).clone() for plane in pool.planes]


def expect_copied(
    pool: DevicePool, before: list[torch.Tensor], read: list[int], write: list[int]
) -> None:
    for plane, held in zip(pool.planes, before, strict=True):
        held[write] = held[read]
        assert torch.equal(plane.view(torch.uint8), held)


@pytest.mark.parametrize("n_states", [1, 64])
def test_states_of_48_layers_are_copied_in_four_calls(n_states: int) -> None:
    pool = DevicePool(STATE, 130)
    before = filled(pool)
    read, write = list(range(n_states)), list(range(128, 128 - n_states, -1))
    stacks = stack_lanes(pool.lanes)
    sources, targets = torch.tensor(read), torch.tensor(write)
    with Calls() as calls:
        for stack in stacks:
            copy_rows(stack, sources, targets)
    assert calls.names == ["aten.index_select.default", "aten.index_copy_.default"] * 2
    expect_copied(pool, before, read, write)


@pytest.mark.parametrize("n_states", [1, 64])
def test_on_the_cpu_no_copy_calls_torch(n_states: int) -> None:
    pool = DevicePool(STATE, 130)
    before = filled(pool)
    read, write = list(range(n_states)), list(range(128, 128 - n_states, -1))
    pool.copy_slots(as_slots(read[:0]), as_slots(write[:0]))  # takes what it needs
    source, target = as_slots(read), as_slots(write)
    pool.copy_slots(as_slots([129]), as_slots([129]))
    with Calls() as calls:
        pool.copy_slots(source, target)
    assert calls.names == []
    expect_copied(pool, before, read, write)


@pytest.mark.gpu
@pytest.mark.parametrize("n_states", [1, 64])
def test_on_a_gpu_a_copy_costs_ten_calls_at_most(n_states: int) -> None:
    pool = DevicePool(STATE, 130, accelerator())
    before = filled(pool)
    read, write = list(range(n_states)), list(range(128, 128 - n_states, -1))
    pool.copy_slots(as_slots([129]), as_slots([128]))
    before = [plane.view(torch.uint8).clone() for plane in pool.planes]
    with Calls() as calls:
        pool.copy_slots(as_slots(read), as_slots(write))
    assert len(calls.names) <= 10
    expect_copied(pool, before, read, write)


def test_a_copy_takes_no_more_memory_than_it_may() -> None:
    pool = DevicePool(STATE, 12)
    before = filled(pool)
    read, write = [0, 1, 2, 3, 4], [11, 9, 8, 7, 6]
    for stack in stack_lanes(pool.lanes):
        row_nbytes = stack.shape[0] * stack.shape[2] * stack.element_size()
        with Calls() as calls:
            copy_rows(stack, torch.tensor(read), torch.tensor(write), 2 * row_nbytes + 1)
        assert sum("index_select" in name for name in calls.names) == 3
    expect_copied(pool, before, read, write)


def test_planes_are_contiguous_and_aligned_as_tensors_of_their_own() -> None:
    pool = DevicePool(STATE, 7)
    for plane in pool.planes:
        assert plane.is_contiguous()
        assert plane.shape[0] == 7
        assert not int(plane.count_nonzero())
    starts: dict[str, list[int]] = {}
    for spec, plane in zip(pool.specs, pool.planes, strict=True):
        starts.setdefault(spec.name, []).append(plane.data_ptr())
    for found in starts.values():
        assert {(start - found[0]) % PLANE_ALIGNMENT for start in found} == {0}
        assert len(set(found)) == N_LAYERS


def test_planes_of_a_pool_whose_boundary_moves_move_at_once_too() -> None:
    plan = PoolPlan(budgets={Tier.DEVICE: 4 << 20})
    with plan.building("mamba"):
        pool = DevicePool(STATE, 20)
    assert len(stack_lanes(pool.lanes)) == 2
    before = filled(pool)
    pool.copy_slots(as_slots([3, 4]), as_slots([19, 18]))
    expect_copied(pool, before, [3, 4], [19, 18])


def test_an_engines_tensor_with_a_row_per_layer_is_one_stack() -> None:
    specs = [PlaneSpec(layer, "state", (4,), torch.float32) for layer in range(5)]
    memory = torch.zeros((5, 9, 4))
    pool = DevicePool(specs, 9, tensors=[memory[layer] for layer in (4, 2, 0, 1, 3)])
    (stack,) = stack_lanes(pool.lanes)
    assert stack.data_ptr() == memory.data_ptr()
    assert stack.shape[:2] == (5, 9)
    before = filled(pool)
    copy_rows(stack, slot_index(as_slots([1])), slot_index(as_slots([8])))
    expect_copied(pool, before, [1], [8])


@pytest.mark.parametrize("rows", [(0, 1, 3), (0, 2, 3)])
def test_planes_at_other_distances_are_stacks_of_their_own(rows: tuple[int, ...]) -> None:
    specs = [PlaneSpec(layer, "state", (4,), torch.float32) for layer in range(4)]
    memory = torch.zeros((4, 9, 4))
    apart = [*(memory[row] for row in rows), torch.zeros((9, 4))]
    pool = DevicePool(specs, 9, tensors=apart)
    assert [len(stack) for stack in stack_lanes(pool.lanes)] == [1] * 4
    before = filled(pool)
    pool.copy_slots(as_slots([2, 0]), as_slots([5, 7]))
    expect_copied(pool, before, [2, 0], [5, 7])
