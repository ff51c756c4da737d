"""Bytes are split among pools by need: windows and states get what can be of use there."""

from __future__ import annotations

from typing import Any

import pytest

from kvgraft import Cache, TokenKey, Trailing
from kvgraft.config import parse_config
from kvgraft.reach import Reach
from kvgraft.terms import Everything, StateAt
from kvgraft_arena.split import PoolShape, split_tokens

from ..serving import life

HEADS = {"n_layers": 2, "n_kv_heads": 2, "head_dim": 64}
"""1,024 bytes a token."""
STATE = {"n_layers": 2, "conv_dim": 0, "n_heads": 8, "head_dim": 16, "state_dim": 16}
"""16,384 bytes a state."""
WIDE = {**HEADS, "n_layers": 16}

FULL, WINDOW, WINDOW_4K, LARGE_STATE = (
    PoolShape(Reach(Everything()), 1000),
    PoolShape(Reach(Trailing(128)), 1000),
    PoolShape(Reach(Trailing(4096)), 1000),
    PoolShape(Reach(StateAt()), 80e6),
)


def opened(components: dict[str, Any], **settings: Any) -> Cache:
    given = {"page_size": 16, "payload": False, **settings}
    return Cache(parse_config({"components": components, **given}))


def nbytes(cache: Cache) -> dict[str, int]:
    pools = {each.name: each.component.device for each in cache.mounted}
    return {name: pool.capacity * pool.slot_nbytes for name, pool in pools.items()}


def test_a_window_gets_a_chunk_and_a_window_for_each_turn_of_the_base() -> None:
    full, window = split_tokens([FULL, WINDOW], 2048 * 100, 64)
    assert full == 2048 * 100
    assert window == 2 * 256 + 8192 + 100 * 256


def test_a_bounded_pool_has_never_more_tokens_than_the_base() -> None:
    assert split_tokens([FULL, WINDOW_4K], 640, 64) == [640, 640]
    assert split_tokens([FULL, WINDOW], 64, 64, points=8) == [64, 64]


def test_points_that_cost_more_than_the_tokens_they_stand_for_are_kept_less_often() -> None:
    """80 MB are the bytes of 80,000 tokens: one state for half as many."""
    full, states = split_tokens([FULL, LARGE_STATE], 800_000, 64)
    assert full == 800_000
    assert states // 2048 == 20
    assert split_tokens([FULL, LARGE_STATE], 800_000, 64, points=0.5)[1] // 2048 == 10


def test_without_a_reach_that_has_no_bound_the_widest_is_the_base() -> None:
    assert split_tokens([WINDOW, WINDOW_4K], 2048 * 10, 64)[1] == 2048 * 10
    assert split_tokens([WINDOW_4K], 2048, 64) == [2048]
    assert split_tokens([], 2048, 64) == []


@pytest.mark.parametrize("unit", ["device_bytes", "device_memory"])
@pytest.mark.parametrize("window", [64, 4000])
def test_pools_sized_in_bytes_give_the_base_what_windows_do_not_need(
    window: int, unit: str
) -> None:
    components = {"full": HEADS, "swa": {**HEADS, "window": window}}
    cache = opened(components, **{unit: "400MB"})
    taken = nbytes(cache)
    assert 0.98 * 400e6 < sum(taken.values()) <= 400e6
    assert taken["swa"] < (0.08 if window == 64 else 0.67) * 400e6
    cache.close()


def test_a_mirror_is_split_as_well_and_pools_of_their_own_size_keep_it() -> None:
    swa = {**HEADS, "window": 64}
    components = {"full": HEADS, "swa": swa, "swa@own": {**swa, "device_tokens": 4096}}
    cache = opened(components, device_bytes="100MB", host_bytes="400MB")
    full, other, own = (each.component for each in cache.mounted)
    assert own.device.capacity * 16 == 4096
    assert full.host is not None
    assert other.host is not None
    assert 10 * other.device.capacity < full.device.capacity * 3
    assert 10 * other.host.capacity < full.host.capacity * 2
    cache.close()


def test_states_alone_are_sized_in_bytes() -> None:
    cache = opened({"mamba": STATE}, device_bytes="40MB")
    assert nbytes(cache) == {"mamba": 40_000_000 // 16_384 * 16_384}
    cache.close()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "components",
    [
        {"full": HEADS, "swa": {**HEADS, "window": 200}},
        {"full": HEADS, "swa": {**WIDE, "window": 1000}},
        {"full": HEADS, "swa": {**HEADS, "window": 40}, "mamba": STATE},
        {"full": {**HEADS, "n_layers": 1}, "mamba": {**STATE, "n_layers": 64}},
    ],
    ids=["window", "wide window", "window and state", "large state"],
)
@pytest.mark.parametrize("size", ["1MB", "9MB", "60MB", "400MB"])
def test_no_request_that_fits_pools_of_equal_tokens_is_rejected(
    components: dict[str, Any], size: str
) -> None:
    """A pool's chunk may become smaller; the base never does."""
    if "mamba" in components and size == "1MB":
        size = "12MB"  # the smallest pools of states take more than 1 MB
    cache = opened(components, device_bytes=size)
    limit = float(size[:-2]) * 1e6
    token = sum(each["n_layers"] * 512 for name, each in components.items() if name != "mamba")
    state = components.get("mamba", {"n_layers": 0})["n_layers"] * 8192
    equal = int(min((limit - 16 * state) / token, limit / (token + state / 2048))) // 16 * 16
    request = cache.begin(TokenKey(range(equal - 64)), reserve=32)
    assert cache.admit(request).admitted
    life.prefill(cache, request)
    cache.finish(request)
    cache.close()
