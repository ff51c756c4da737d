"""The `swa` component as a user gets it: found, given options, built."""

from __future__ import annotations

from typing import Any

import pytest

from kvgraft import HOST_MIRROR, Kind, PluginError, Reach, Span, Tier, Trailing
from kvgraft.packages.dispatch import Mounted, mount, parse_options
from kvgraft.pools import BuildContext
from kvgraft.reach import PageReach
from tests.installed import assert_planes_survive, expect_no_torch, installed

CONTEXT = BuildContext(
    page_size=16, device="cpu", device_tokens=160, host_tokens=320, pin_host=False
)
DEEPSEEK_V3 = {"kind": "mla", "latent_dim": 512, "rope_dim": 64}


def built(options: dict[str, Any], context: BuildContext = CONTEXT) -> Mounted:
    return mount(installed("swa"), options, context)


def test_the_entry_point_is_found_and_declares_a_mirrored_paged_component() -> None:
    plugin = installed("swa")
    assert plugin.distribution == "kvgraft-swa"
    declaration = plugin.declaration
    assert (declaration.kind, declaration.home) == (Kind.PAGED, Tier.DEVICE)
    assert declaration.capabilities == {HOST_MIRROR}


def test_finding_it_imports_no_torch() -> None:
    expect_no_torch("swa")


@pytest.mark.parametrize("window", [1, 100, 4096])
def test_its_reach_is_the_trailing_window(window: int) -> None:
    assert built({"window": window}).component.reach == Reach(Trailing(window))


def test_a_window_that_is_not_whole_pages_keeps_every_page_it_touches() -> None:
    reach = PageReach(built({"window": 17}).component.reach, CONTEXT.page_size)
    assert reach.spans(5) == (Span(3, 5),)


@pytest.mark.parametrize("options", [{}, DEEPSEEK_V3])
def test_a_slot_takes_one_page_with_any_window(options: dict[str, Any]) -> None:
    sizes = {
        built({**options, "window": window}).component.device.slot_nbytes for window in (16, 64)
    }
    assert sizes == {16 * (2 * 576 * 2 if options else 32)}


@pytest.mark.parametrize("options", [{}, {"head_dim": 3, "v_head_dim": 5}, DEEPSEEK_V3])
def test_every_plane_survives_the_way_to_the_mirror_and_back(options: dict[str, Any]) -> None:
    assert_planes_survive(built(options).component)


def test_without_host_tokens_there_is_no_mirror() -> None:
    component = built({"host_tokens": 0}).component
    assert component.host is None
    assert component.device.capacity == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "component 'swa': option window=0"),
        ({"window": None}, "component 'swa': option window=None"),
        ({"window_size": 64}, "component 'swa': no option 'window_size'; did you mean 'window'"),
        ({"kind": "mla"}, "component 'swa': option latent_dim=None"),
    ],
)
def test_impossible_options_are_refused_with_the_field_named(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PluginError, match=message):
        parse_options(installed("swa"), options)


def test_a_pool_smaller_than_a_page_is_refused_with_the_field_named() -> None:
    with pytest.raises(PluginError, match="component 'swa': option device_tokens: 15 tokens"):
        built({"device_tokens": 15})
