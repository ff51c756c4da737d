"""The `full` component as a user gets it: found, given options, built."""

from __future__ import annotations

from typing import Any

import pytest

from kvgraft import HOST_MIRROR, Everything, Kind, PluginError, Reach, Tier
from kvgraft.packages.dispatch import Mounted, mount, parse_options
from kvgraft.pools import BuildContext
from tests.installed import assert_planes_survive, expect_no_torch, installed

CONTEXT = BuildContext(
    page_size=16, device="cpu", device_tokens=160, host_tokens=320, pin_host=False
)
DEEPSEEK_V3 = {"kind": "mla", "latent_dim": 512, "rope_dim": 64}


def built(options: dict[str, Any], context: BuildContext = CONTEXT) -> Mounted:
    return mount(installed("full"), options, context)


def test_the_entry_point_is_found_and_declares_a_mirrored_paged_component() -> None:
    plugin = installed("full")
    assert plugin.distribution == "kvgraft-full"
    declaration = plugin.declaration
    assert (declaration.kind, declaration.home) == (Kind.PAGED, Tier.DEVICE)
    assert declaration.capabilities == {HOST_MIRROR}


def test_finding_it_imports_no_torch() -> None:
    expect_no_torch("full")


def test_its_reach_is_everything_before_the_boundary() -> None:
    assert built({}).component.reach == Reach(Everything())


@pytest.mark.parametrize(
    ("options", "bytes_per_token"),
    [
        ({}, 32),
        ({"n_layers": 3, "n_kv_heads": 8, "head_dim": 128}, 3 * 8 * 256 * 2),
        ({"head_dim": 192, "v_head_dim": 128}, 2 * 320 * 2),
        ({"dtype": "float8_e4m3fn"}, 16),
        (DEEPSEEK_V3, 2 * 576 * 2),
    ],
)
def test_a_slot_takes_one_page_of_the_geometry(
    options: dict[str, Any], bytes_per_token: int
) -> None:
    assert built(options).component.device.slot_nbytes == 16 * bytes_per_token


@pytest.mark.parametrize(
    "options", [{}, {"head_dim": 3, "v_head_dim": 5, "dtype": "float8_e5m2"}, DEEPSEEK_V3]
)
def test_every_plane_survives_the_way_to_the_mirror_and_back(options: dict[str, Any]) -> None:
    assert_planes_survive(built(options).component)


def test_without_host_tokens_there_is_no_mirror() -> None:
    component = built({"host_tokens": 0}).component
    assert component.host is None
    assert component.device.capacity == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 64}, "component 'full': no option 'window'; options: "),
        ({"n_kv_heads": 0}, "component 'full': option n_kv_heads=0"),
        ({"kind": "mla"}, "component 'full': option latent_dim=None"),
        ({**DEEPSEEK_V3, "head_dim": 4}, "component 'full': option head_dim=4"),
        ({"layers": [1]}, r"component 'full': option layers=\[1\]"),
        ({"host_tokens": -1}, "component 'full': option host_tokens=-1"),
    ],
)
def test_impossible_options_are_refused_with_the_field_named(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PluginError, match=message):
        parse_options(installed("full"), options)


def test_a_pool_smaller_than_a_page_is_refused_with_the_field_named() -> None:
    with pytest.raises(PluginError, match="component 'full': option device_tokens: 15 tokens"):
        built({"device_tokens": 15})
