"""Planes of keys and values, and the paged pools that hold them."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from kvgraft import AttentionOptions, ComponentOptions, ConfigError, Dtype
from kvgraft.pools import (
    BuildContext,
    PlaneSpec,
    attention_planes,
    paged_pools,
    plane_nbytes,
    torch_dtype,
)

CONTEXT = BuildContext(
    page_size=16, device="cpu", device_tokens=100, host_tokens=200, pin_host=False
)


def test_every_dtype_name_is_a_torch_dtype_of_that_name() -> None:
    for name in get_args(Dtype):
        assert str(torch_dtype(name)) == f"torch.{name}"


def test_heads_have_a_key_and_a_value_plane_per_layer_in_layer_order() -> None:
    options = AttentionOptions(
        n_layers=2, layers=(3, 7), n_kv_heads=2, head_dim=192, v_head_dim=128
    )
    assert attention_planes(options, 16) == [
        PlaneSpec(3, "k", (16, 2, 192), torch.bfloat16),
        PlaneSpec(3, "v", (16, 2, 128), torch.bfloat16),
        PlaneSpec(7, "k", (16, 2, 192), torch.bfloat16),
        PlaneSpec(7, "v", (16, 2, 128), torch.bfloat16),
    ]


def test_values_are_as_wide_as_keys_unless_said_otherwise() -> None:
    planes = attention_planes(AttentionOptions(head_dim=80), 16)
    assert {spec.shape for spec in planes} == {(16, 1, 80)}


def test_mla_has_one_joined_plane_per_layer() -> None:
    options = AttentionOptions(kind="mla", latent_dim=512, rope_dim=64, dtype="float16")
    planes = attention_planes(options, 64)
    assert planes == [PlaneSpec(layer, "latent", (64, 576), torch.float16) for layer in (0, 1)]
    assert plane_nbytes(planes[0]) == 64 * 1152


def test_a_row_packed_by_the_engine_is_kept_as_bytes() -> None:
    options = AttentionOptions(kind="mla", latent_dim=656, rope_dim=0, dtype="uint8")
    assert plane_nbytes(attention_planes(options, 64)[0]) == 64 * 656


def test_paged_pools_hold_whole_pages_and_the_options_win_over_the_context() -> None:
    planes = attention_planes(AttentionOptions(), CONTEXT.page_size)
    device, host = paged_pools(ComponentOptions(), CONTEXT, planes)
    assert host is not None
    assert (device.capacity, host.capacity) == (6, 12)
    device, host = paged_pools(ComponentOptions(device_tokens=32, host_tokens=48), CONTEXT, planes)
    assert host is not None
    assert (device.capacity, host.capacity) == (2, 3)


def test_no_host_tokens_mean_no_mirror() -> None:
    planes = attention_planes(AttentionOptions(), CONTEXT.page_size)
    assert paged_pools(ComponentOptions(host_tokens=0), CONTEXT, planes)[1] is None


@pytest.mark.parametrize("option", ["device_tokens", "host_tokens"])
def test_a_pool_smaller_than_a_page_is_refused_by_its_option(option: str) -> None:
    planes = attention_planes(AttentionOptions(), CONTEXT.page_size)
    options = ComponentOptions.model_validate({option: 15})
    with pytest.raises(
        ConfigError, match=f"option {option}: 15 tokens make no page of 16; give 16"
    ):
        paged_pools(options, CONTEXT, planes)
