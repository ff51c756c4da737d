"""The `mamba` component as a user gets it: found, given options, built."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvgraft import (
    COPY_ON_WRITE,
    HOST_MIRROR,
    ComponentMatch,
    Kind,
    MatchView,
    PluginError,
    Reach,
    StateAt,
    Tier,
)
from kvgraft.packages.dispatch import Mounted, mount, parse_options
from kvgraft.pools import BuildContext, Component, PlaneSpec, SlotAllocator, slot_index
from tests.installed import expect_no_torch, installed

CONTEXT = BuildContext(
    page_size=16, device="cpu", device_tokens=65_536, host_tokens=131_072, pin_host=False
)
MAMBA2 = {"conv_dim": 10, "conv_width": 3, "n_heads": 2, "head_dim": 3, "state_dim": 5}


def built(options: dict[str, Any], context: BuildContext = CONTEXT) -> Mounted:
    return mount(installed("mamba"), options, context)


def sized(device_tokens: int, host_tokens: int) -> BuildContext:
    return BuildContext(16, "cpu", device_tokens, host_tokens, pin_host=False)


def test_the_entry_point_is_found_and_declares_a_copied_and_mirrored_state() -> None:
    plugin = installed("mamba")
    assert plugin.distribution == "kvgraft-mamba"
    declaration = plugin.declaration
    assert (declaration.kind, declaration.home) == (Kind.STATE, Tier.DEVICE)
    assert declaration.capabilities == {HOST_MIRROR, COPY_ON_WRITE}


def test_finding_it_imports_no_torch() -> None:
    expect_no_torch("mamba")


def test_its_reach_is_the_state_at_the_boundary() -> None:
    assert built({}).component.reach == Reach(StateAt())


def test_a_state_has_both_planes_per_layer_and_stays_float32_under_a_bfloat16_model() -> None:
    component = built({**MAMBA2, "n_layers": 2, "layers": [1, 4]}).component
    assert component.device.specs == (
        PlaneSpec(1, "conv", (10, 3), torch.bfloat16),
        PlaneSpec(1, "recurrent", (2, 3, 5), torch.float32),
        PlaneSpec(4, "conv", (10, 3), torch.bfloat16),
        PlaneSpec(4, "recurrent", (2, 3, 5), torch.float32),
    )
    assert component.device.slot_nbytes == 2 * (10 * 3 * 2 + 2 * 3 * 5 * 4)


def test_layers_without_a_convolution_have_no_plane_for_it() -> None:
    specs = built({"conv_dim": 0}).component.device.specs
    assert {spec.name for spec in specs} == {"recurrent"}


def test_the_default_state_is_as_small_as_documented() -> None:
    assert built({}).component.device.slot_nbytes == 224


@pytest.mark.parametrize(
    ("options", "context", "states"),
    [
        ({}, CONTEXT, (32, 64)),
        ({}, sized(1000, 1000), (16, 16)),
        ({}, sized(1000, 0), (16, 0)),
        ({"device_tokens": 40_960, "host_tokens": 0}, CONTEXT, (20, 0)),
        ({"states": 3, "host_states": 5}, CONTEXT, (3, 5)),
        ({"host_states": 0}, CONTEXT, (32, 0)),
        ({"host_states": 7}, sized(1000, 0), (16, 0)),
    ],
)
def test_pools_hold_the_states_asked_for_or_one_per_2048_tokens(
    options: dict[str, Any], context: BuildContext, states: tuple[int, int]
) -> None:
    component = built(options, context).component
    host = component.host.capacity if component.host is not None else 0
    assert (component.device.capacity, host) == states


@pytest.mark.parametrize("options", [{}, MAMBA2, {"conv_dim": 0, "state_dtype": "float16"}])
def test_every_plane_survives_the_way_to_the_mirror_and_back(options: dict[str, Any]) -> None:
    assert_planes_survive(built(options).component)


def test_a_copied_state_has_the_bytes_of_every_plane_and_is_its_own() -> None:
    device = built({**MAMBA2, "states": 4}).component.device
    source, target = states_of(device.allocator, 2)
    fill(device.lanes, source)
    device.copy_slots(source, target)
    read, write = slot_index(source), slot_index(target)
    for plane in device.planes:
        assert plane[read].count_nonzero() > 0
        assert torch.equal(plane[write], plane[read])
        plane[write] = 0
        assert plane[read].count_nonzero() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"states": 0}, "component 'mamba': option states=0"),
        ({"host_states": -1}, "component 'mamba': option host_states=-1"),
        ({"conv_dim": 0, "conv_width": 3}, "component 'mamba': option conv_width=3: .*conv_dim 0"),
        ({"state_dtype": "fp32"}, "component 'mamba': option state_dtype='fp32'"),
        ({"checkpoint_interval_tokens": 0}, "option checkpoint_interval_tokens=0"),
        (
            {"checkpoint_interval": 64},
            "no option 'checkpoint_interval'; did you mean 'checkpoint_interval_tokens'",
        ),
        ({"window": 64}, "component 'mamba': no option 'window'; options: "),
    ],
)
def test_impossible_options_are_refused_with_the_field_named(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PluginError, match=message):
        parse_options(installed("mamba"), options)


def test_an_interval_that_is_not_whole_pages_is_refused_with_the_next_that_is() -> None:
    with pytest.raises(
        PluginError,
        match="component 'mamba': option checkpoint_interval_tokens: 100 is not a multiple of "
        "page_size 16; use 112",
    ):
        built({"checkpoint_interval_tokens": 100})


def test_a_match_is_annotated_in_pages_and_its_anchor_left_alone() -> None:
    finalize = built({"checkpoint_interval_tokens": 64}).finalize_match_result
    assert finalize is not None
    here = MatchView(anchor=2, device_anchor=1, base=5, limit=9, host_slots=1)
    assert finalize(here) == ComponentMatch(limit_pages=2, checkpoint_pages=(4, 8))


def test_a_match_with_nothing_to_capture_is_left_as_it_is() -> None:
    finalize = built({}).finalize_match_result
    assert finalize is not None
    assert finalize(MatchView(anchor=2, device_anchor=2, base=5, limit=9, host_slots=0)) is None


def test_checkpoints_of_one_request_leave_half_of_the_states_to_run_on() -> None:
    finalize = built({"checkpoint_interval_tokens": 16, "states": 6}).finalize_match_result
    assert finalize is not None
    found = finalize(MatchView(anchor=0, device_anchor=0, base=0, limit=12, host_slots=0))
    assert found is not None
    assert found.checkpoint_pages == (4, 8, 12)


def states_of(allocator: SlotAllocator, n: int) -> list[bytes]:
    taken = [allocator.allocate(1) for _ in range(n)]
    return [slot for slot in taken if slot is not None]


def fill(lanes_of_planes: list[torch.Tensor], slots: bytes) -> None:
    """Bytes that differ from row to row and plane to plane."""
    noise = torch.Generator().manual_seed(7)
    for lanes in lanes_of_planes:
        shape = (len(slots) // 4, lanes.shape[1])
        lanes[slot_index(slots)] = torch.randint(1, 100, shape, generator=noise).to(lanes.dtype)


def assert_planes_survive(component: Component) -> None:
    """From one slot to a host slot and back to another, plane by plane."""
    device, host = component.device, component.host
    assert host is not None
    assert [spec[:2] for spec in device.specs] == [spec[:2] for spec in host.specs]
    there, back = states_of(device.allocator, 2)
    fill(device.lanes, there)
    for lanes, mirrored in zip(device.lanes, host.lanes, strict=True):
        mirrored[2] = lanes[slot_index(there)][0]
    for lanes, mirrored in zip(device.lanes, host.lanes, strict=True):
        lanes[slot_index(back)] = mirrored[2]
    for lanes in device.lanes:
        assert lanes[slot_index(there)].count_nonzero() > 0
        assert torch.equal(lanes[slot_index(back)], lanes[slot_index(there)])
