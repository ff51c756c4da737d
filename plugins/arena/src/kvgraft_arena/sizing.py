"""The number of tokens for pools whose size is given in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvgraft.assembly import (
    PartsFactory,
    build_components,
    check_device,
    chosen_packages,
    shared_budgets,
)
from kvgraft.config import CacheConfig
from kvgraft.errors import ConfigError, KvgraftError
from kvgraft.packages.dispatch import Mounted
from kvgraft.packages.registry import Plugin
from kvgraft.pools.plan import PoolPlan
from kvgraft.sizes import format_nbytes
from kvgraft.types import Tier
from kvgraft_arena.split import PoolShape, split_tokens

__all__ = ["planned_nbytes", "size_pools"]

MOST_PAGES = 2**31
"""Slots are numbered with int32."""

FAR_PAGES = 2**20
"""A pool that has the same size for so many pages as for the fewest does not follow the tokens."""


def size_pools(
    config: CacheConfig, plugins: Sequence[Plugin] = (), points: float = 1.0
) -> CacheConfig:
    """The settings with `device_tokens` and `host_tokens` for pools that are sized in bytes.

    They are the largest numbers of whole pages with which all components' pools of that tier
    together stay within the bytes. Components of bounded reach get the tokens that `split_tokens`
    says, as the same options in theirs. Finding them takes no memory of the pools.

    Args:
        config: the settings.
        plugins: packages used instead of installed ones of the same name.
        points: keep this many times the resume points of the rule.

    Raises:
        ConfigError: bytes that are too few for the smallest pools.
        PluginError: a component that cannot be used.
    """
    if config.device_bytes is None and config.host_bytes is None:
        return config
    check_device(config)
    chosen = chosen_packages(config, plugins)
    for tier, limit in ((Tier.DEVICE, config.device_bytes), (Tier.HOST, config.host_bytes)):
        if limit == 0 and tier is Tier.HOST:
            config = config.model_copy(update={"host_tokens": 0})
        elif limit is not None:
            config = _largest(config, chosen, tier, limit, points)
    return config


def planned_nbytes(config: CacheConfig, plugins: Sequence[Plugin] = ()) -> dict[Tier, int]:
    """Bytes that the pools of DEVICE and HOST will take; nothing is allocated.

    Raises:
        PluginError: a component that cannot be used.
    """
    plan = PoolPlan(payload=False)
    build_components(config, chosen_packages(config, plugins), plan, PartsFactory(config))
    return {tier: plan.nbytes(tier) for tier in (Tier.DEVICE, Tier.HOST)}


def _largest(
    config: CacheConfig, chosen: Mapping[str, Plugin], tier: Tier, limit: int, points: float
) -> CacheConfig:
    """The settings with the most tokens whose pools of one tier stay within `limit` bytes."""
    refused: KvgraftError | None = None
    budget = getattr(config, f"{tier.value}_memory") is not None
    setting = f"{tier.value}_memory" if budget else f"{tier.value}_bytes"
    option = f"{tier.value}_tokens"
    shapes: dict[str, PoolShape] = {}

    def sized(n_pages: int) -> CacheConfig:
        tokens = {option: n_pages * config.page_size}
        if tier is Tier.DEVICE and config.host_bytes is not None:
            tokens["host_tokens"] = n_pages * config.page_size
        split = split_tokens([*shapes.values()], tokens[option], config.page_size, points)
        components = {**config.components}
        for name, own in zip(shapes, split):
            if own < tokens[option]:
                components[name] = {**components[name], option: own}
        return config.model_copy(update={**tokens, "components": components})

    def built(n_pages: int) -> tuple[dict[str, Mounted], int] | None:
        nonlocal refused
        plan = PoolPlan(payload=False)
        try:
            mounted = build_components(sized(n_pages), chosen, plan, PartsFactory(config))
        except KvgraftError as error:
            refused = refused or error  # that of few pages names the given setting
            return None
        return mounted, plan.nbytes(tier)

    # A component may refuse few pages, and a pool has at most 2**31 slots.
    n_pages, fewest = 1, built(1)
    while fewest is None and n_pages < MOST_PAGES:
        n_pages *= 2
        fewest = built(n_pages)
    if fewest is None:
        assert refused is not None
        raise refused
    if fewest[1] > limit:
        raise ConfigError(
            f"setting {setting}: {format_nbytes(limit)} are less than the smallest pools "
            f"take, {format_nbytes(fewest[1])}; give more"
        )
    many = built(max(2 * n_pages, FAR_PAGES))
    if many is not None and many[1] == fewest[1]:
        if shared_budgets(config).get(tier):
            return sized(n_pages)
        raise ConfigError(
            f"setting {tier.value}_bytes: every component has a pool size of its own, so nothing "
            "follows it; leave one of them out"
        )
    if many is not None:
        for name, each in many[0].items():
            small, large = (_slots(found[0][name], tier) for found in (fewest, many))
            if small < large and option in chosen[name].declaration.options.model_fields:
                shapes[name] = _pool_shape(each, tier, config.page_size)
    low, high = n_pages, MOST_PAGES
    while high - low > 1:
        # In growing steps first: most sizes are far from the largest possible one.
        middle = min(2 * low, (low + high) // 2)
        found = built(middle)
        low, high = (low, middle) if found is None or found[1] > limit else (middle, high)
    if high == MOST_PAGES:
        raise ConfigError(
            f"setting {setting}: {format_nbytes(limit)} are more than {MOST_PAGES} pages take, the "
            "most that a pool can have; give less, or larger pages"
        )
    return sized(low)


def _slots(each: Mounted, tier: Tier) -> int:
    """Slots of a component's pool on a tier."""
    host = each.component.host
    return each.component.device.capacity if tier is Tier.DEVICE else host.capacity if host else 0


def _pool_shape(each: Mounted, tier: Tier, page_size: int) -> PoolShape:
    component = each.component
    host = component.host
    nbytes = (
        component.device.slot_nbytes if tier is Tier.DEVICE else host.slab_nbytes if host else 0
    )
    if each.shape.reach.is_state:
        return PoolShape(each.shape.reach, nbytes)
    return PoolShape(each.shape.reach, nbytes * component.slots_per_page / page_size)
