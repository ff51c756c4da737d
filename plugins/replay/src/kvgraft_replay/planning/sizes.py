"""The pools of each size: converts given sizes to tokens, slots and bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvgraft.assembly import mount_all
from kvgraft.config import CacheConfig, parse_config
from kvgraft.errors import ConfigError, KvgraftError
from kvgraft.packages.dispatch import Mounted
from kvgraft.sizes import format_nbytes, is_nbytes
from kvgraft.types import Tier
from kvgraft_arena.sizing import size_pools
from kvgraft_replay.planning.schema import ReachUse

__all__ = [
    "Pool",
    "Size",
    "all_sizes",
    "between",
    "built",
    "default_shapes",
    "grown",
    "lru_pages",
    "page_nbytes",
    "reaches",
    "slot_nbytes",
    "with_points",
]

Asked = int | str
"""Tokens, or bytes as text such as `40GB`."""

TENTH = 10
"""A pool grows by 1 / n."""


@dataclass(frozen=True, slots=True)
class Pool:
    """One component's pool on one tier; a slot holds `slot_tokens`, 0 for a state."""

    component: str
    tier: Tier
    slots: int
    nbytes: int
    slot_tokens: int


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of all pools.

    Attributes:
        device, host: the sizes as given.
        policy: the eviction policy.
        cache: settings of a cache of that size; the sizes in tokens.
        pools: pools of DEVICE, then of HOST.
        given: settings without sizes.
        points: the resume points that the split of bytes keeps, as a multiple of the rule's.
    """

    device: Asked
    host: Asked
    policy: str
    cache: dict[str, Any]
    pools: tuple[Pool, ...]
    given: Mapping[str, Any]
    points: float = 1.0

    def nbytes(self, tier: Tier) -> int:
        """Bytes of all pools of a tier."""
        return sum(pool.nbytes for pool in self.pools if pool.tier is tier)


def all_sizes(
    cache: Mapping[str, Any],
    devices: Sequence[Asked],
    hosts: Sequence[Asked],
    policies: Sequence[str],
    *,
    one_budget: bool = False,
) -> list[Size]:
    """Every size of DEVICE with every size of HOST and every policy.

    Args:
        cache: the other settings, as for `Cache.open`.
        devices: tokens of each device pool, or bytes of all together.
        hosts: the same on HOST; 0 for none.
        policies: names of eviction policies.
        one_budget: the pools of a tier share its bytes, and their sizes follow their use.

    Raises:
        ConfigError: a size that is too small, one of tokens for a budget, or an impossible setting.
    """
    tokens = [size for size in (*devices, *hosts) if size and not is_nbytes(size)]
    if one_budget and tokens:
        raise ConfigError(
            f"--one-budget: {tokens[0]} are tokens of each pool; give the bytes of all, as 40GB"
        )
    sized = _with_budgets if one_budget else _sized
    pairs = [sized(cache, device, host) for device in devices for host in hosts]
    return [_with_policy(size, policy) for size in pairs for policy in policies]


def _sized(cache: Mapping[str, Any], device: Asked, host: Asked, points: float = 1.0) -> Size:
    given = {**cache, "device_tokens": device, "host_tokens": host, "payload": False}
    config = size_pools(parse_config(given), points=points)
    sizes = {
        "components": config.components,
        "device_tokens": config.device_tokens,
        "host_tokens": config.host_tokens,
    }
    pools = tuple(_pools(config))
    return Size(device, host, "", {**given, **sizes}, pools, cache, points)


def with_points(size: Size, points: float) -> Size | None:
    """The same bytes, split with other resume points; None if that is the same split.

    It is the same if sizes are tokens or follow their use, or if no pool's reach is bounded.
    """
    if "device_memory" in size.cache or not any(map(is_nbytes, (size.device, size.host))):
        return None
    other = _sized(size.given, size.device, size.host, points)
    if other.pools == size.pools:
        return None
    return _with_policy(other, size.policy)


def _with_budgets(cache: Mapping[str, Any], device: Asked, host: Asked) -> Size:
    """Pools that share the bytes of each tier; they begin as fixed ones of that size."""
    budgets = {"device_memory": device, **({"host_memory": host} if host else {})}
    others = {name: value for name, value in cache.items() if not name.endswith("_memory")}
    size = _sized(others, device, host)
    config = parse_config({**size.cache, **budgets})
    given = {name: getattr(config, name) for name in budgets}
    return replace(size, cache={**size.cache, **given})


def built(config: CacheConfig) -> list[Mounted]:
    """The components of a cache without payload, in the tree's order."""
    return mount_all(config)


def _pools(config: CacheConfig) -> Iterator[Pool]:
    mounted = built(config)
    tokens = [
        0 if each.shape.reach.is_state else config.page_size // each.component.slots_per_page
        for each in mounted
    ]
    for each, n_tokens in zip(mounted, tokens):
        device = each.component.device
        nbytes = device.capacity * device.slot_nbytes
        yield Pool(each.name, Tier.DEVICE, device.capacity, nbytes, n_tokens)
    for each, n_tokens in zip(mounted, tokens):
        host = each.component.host
        if host is not None:
            nbytes = host.allocator.capacity * host.slab_nbytes
            yield Pool(each.name, Tier.HOST, host.allocator.capacity, nbytes, n_tokens)


def grown(size: Size, pool: Pool) -> Size | None:
    """The same sizes with one pool a tenth larger; None if the pool has no size of its own.

    Its size may be fixed, or follow its use in a budget.
    """
    if f"{pool.tier.value}_memory" in size.cache:
        return None
    setting = f"{pool.tier.value}_tokens"
    options = size.cache["components"][pool.component]
    tokens = options.get(setting) or size.cache[setting]
    larger = {**options, setting: tokens + max(tokens // TENTH, size.cache["page_size"])}
    components = {**size.cache["components"], pool.component: larger}
    cache = {**size.cache, "components": components}
    after = replace(size, cache=cache, pools=tuple(_pools(parse_config(cache))))
    return after if after.nbytes(pool.tier) > size.nbytes(pool.tier) else None


def lru_pages(mounted: Iterable[Mounted]) -> int | None:
    """The size in pages at which to read the exact curve; None if no curve applies.

    It applies if every component needs all tokens before a boundary and has them on DEVICE.
    """
    pages = []
    for each in mounted:
        if each.shape.home is Tier.HOST or not each.shape.reach.is_prefix_closed:
            return None
        pages.append(each.component.device.capacity // each.shape.slots_per_page)
    return min(pages)


def between(low: Size, high: Size) -> Size | None:
    """A size between two that differ only on DEVICE; None if they are adjacent.

    If one of them is in bytes, it is split as the larger one is.
    """
    low_nbytes, page_size = low.nbytes(Tier.DEVICE), low.cache["page_size"]
    if "device_memory" in low.cache:
        nbytes = (low.cache["device_memory"] + high.cache["device_memory"]) // 2
        middle = _with_budgets(low.given, f"{nbytes}B", low.host)
    elif any(map(is_nbytes, (low.device, high.device))):
        nbytes = (low_nbytes + high.nbytes(Tier.DEVICE)) // 2
        middle = _sized(low.given, f"{nbytes}B", low.host, high.points)
    else:
        tokens = (low.cache["device_tokens"] + high.cache["device_tokens"]) // 2
        middle = _sized(low.given, tokens // page_size * page_size, low.host)
    if middle.nbytes(Tier.DEVICE) <= low_nbytes:
        return None
    if isinstance(middle.device, str):
        middle = replace(middle, device=format_nbytes(nbytes))
    return _with_policy(middle, low.policy)


def _with_policy(size: Size, policy: str) -> Size:
    return replace(size, policy=policy, cache={**size.cache, "policy": policy})


def page_nbytes(mounted: Iterable[Mounted]) -> int:
    """Bytes of one page on DEVICE, of all components."""
    return sum(
        each.component.device.slot_nbytes * each.component.slots_per_page for each in mounted
    )


def default_shapes(size: Size) -> dict[str, str]:
    """Components with the shapes of their default options, and the bytes of a token or state."""
    found = {}
    for each in built(parse_config(size.cache)):
        plain = {**size.cache, "components": {each.name: {}}}
        try:
            (default,) = built(parse_config(plain))
        except KvgraftError:
            continue  # an option without a default
        slot = each.component.device.slot_nbytes
        if slot == default.component.device.slot_nbytes:
            tokens = size.cache["page_size"] // each.component.slots_per_page
            state = each.shape.reach.is_state
            nbytes = slot if state else slot // tokens
            found[each.name] = f"{format_nbytes(nbytes)} a {'state' if state else 'token'}"
    return found


def slot_nbytes(mounted: Iterable[Mounted]) -> dict[str, int]:
    """Bytes of one DEVICE slot by component."""
    return {each.name: each.component.device.slot_nbytes for each in mounted}


def reaches(size: Size) -> list[ReachUse]:
    """Bytes that each component's layers keep on DEVICE."""
    found: list[ReachUse] = []
    for each in built(parse_config(size.cache)):
        device, reach = each.component.device, each.shape.reach
        tokens = 1 if reach.is_state else size.cache["page_size"] // each.component.slots_per_page
        window = reach.width_tokens
        found.append(
            {
                "component": each.name,
                "n_layers": len({spec.layer for spec in device.specs}),
                "keeps": "a state"
                if reach.is_state
                else "every token"
                if reach.is_prefix_closed
                else f"{window:.0f} tokens"
                if math.isfinite(window)
                else str(reach),
                "per": "state" if reach.is_state else "token",
                "nbytes": device.slot_nbytes // tokens,
            }
        )
    return found
