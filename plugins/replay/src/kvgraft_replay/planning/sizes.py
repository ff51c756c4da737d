"""The pools of each size: from what was asked for to tokens, slots and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvgraft.assembly import mount_all, size_pools
from kvgraft.config import CacheConfig, parse_config
from kvgraft.packages.dispatch import Mounted
from kvgraft.sizes import format_nbytes, is_nbytes
from kvgraft.types import Tier

__all__ = [
    "Pool",
    "Size",
    "all_sizes",
    "between",
    "built",
    "grown",
    "lru_pages",
    "page_nbytes",
    "slot_nbytes",
]

Asked = int | str
"""Tokens, or bytes as text such as `40GB`."""

TENTH = 10
"""A pool grows by one part of this many."""


@dataclass(frozen=True, slots=True)
class Pool:
    """One component's pool on one tier."""

    component: str
    tier: Tier
    slots: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of all pools.

    Attributes:
        device, host: as asked for.
        policy: the eviction policy.
        cache: settings of a cache of that size; the sizes in tokens.
        pools: of DEVICE first, then of HOST.
    """

    device: Asked
    host: Asked
    policy: str
    cache: dict[str, Any]
    pools: tuple[Pool, ...]

    def nbytes(self, tier: Tier) -> int:
        """Bytes of all pools of a tier."""
        return sum(pool.nbytes for pool in self.pools if pool.tier is tier)


def all_sizes(
    cache: Mapping[str, Any],
    devices: Sequence[Asked],
    hosts: Sequence[Asked],
    policies: Sequence[str],
) -> list[Size]:
    """Every size of DEVICE with every size of HOST, and each pair with every policy.

    Args:
        cache: the other settings, as for `Cache.open`.
        devices: tokens of each device pool, or bytes of all together.
        hosts: the same on HOST; 0 for none.
        policies: names of eviction policies.

    Raises:
        ConfigError: a size that is too small, or an impossible setting.
    """
    pairs = [_sized(cache, device, host) for device in devices for host in hosts]
    return [
        replace(size, policy=policy, cache={**size.cache, "policy": policy})
        for size in pairs
        for policy in policies
    ]


def _sized(cache: Mapping[str, Any], device: Asked, host: Asked) -> Size:
    given = {**cache, "device_tokens": device, "host_tokens": host, "payload": False}
    config = size_pools(parse_config(given))
    tokens = {"device_tokens": config.device_tokens, "host_tokens": config.host_tokens}
    return Size(device, host, "", {**given, **tokens}, tuple(_pools(built(config))))


def built(config: CacheConfig) -> list[Mounted]:
    """The components of a cache without payload, in the tree's order."""
    return mount_all(config)


def _pools(mounted: Iterable[Mounted]) -> Iterator[Pool]:
    mounted = list(mounted)
    for each in mounted:
        device = each.component.device
        nbytes = device.capacity * device.slot_nbytes
        yield Pool(each.name, Tier.DEVICE, device.capacity, nbytes)
    for each in mounted:
        host = each.component.host
        if host is not None:
            nbytes = host.allocator.capacity * host.slab_nbytes
            yield Pool(each.name, Tier.HOST, host.allocator.capacity, nbytes)


def grown(size: Size, pool: Pool) -> Size | None:
    """The same sizes but for one pool that is a tenth larger; None if its size is fixed."""
    setting = f"{pool.tier.value}_tokens"
    options = size.cache["components"][pool.component]
    tokens = options.get(setting) or size.cache[setting]
    larger = {**options, setting: tokens + max(tokens // TENTH, size.cache["page_size"])}
    components = {**size.cache["components"], pool.component: larger}
    cache = {**size.cache, "components": components}
    after = replace(size, cache=cache, pools=tuple(_pools(built(parse_config(cache)))))
    return after if after.nbytes(pool.tier) > size.nbytes(pool.tier) else None


def lru_pages(mounted: Iterable[Mounted]) -> int | None:
    """Pages for which the exact curve tells the hit rate; None where no curve does.

    It does where every component needs all tokens before a boundary and has them on DEVICE.
    """
    pages = []
    for each in mounted:
        if each.shape.home is Tier.HOST or not each.shape.reach.is_prefix_closed:
            return None
        pages.append(each.component.device.capacity // each.shape.slots_per_page)
    return min(pages)


def between(low: Size, high: Size) -> Size | None:
    """A size in the middle of two that differ on DEVICE alone; None where they are neighbours."""
    page_size = low.cache["page_size"]
    n_pages = (low.cache["device_tokens"] + high.cache["device_tokens"]) // 2 // page_size
    tokens = n_pages * page_size
    if tokens <= low.cache["device_tokens"]:
        return None
    cache = {**low.cache, "device_tokens": tokens}
    pools = tuple(_pools(built(parse_config(cache))))
    middle = replace(low, device=tokens, cache=cache, pools=pools)
    if is_nbytes(low.device) or is_nbytes(high.device):
        middle = replace(middle, device=format_nbytes(middle.nbytes(Tier.DEVICE)))
    return middle


def page_nbytes(mounted: Iterable[Mounted]) -> int:
    """Bytes of one page on DEVICE, of all components."""
    return sum(
        each.component.device.slot_nbytes * each.component.slots_per_page for each in mounted
    )


def slot_nbytes(mounted: Iterable[Mounted]) -> dict[str, int]:
    """Bytes of one DEVICE slot by component."""
    return {each.name: each.component.device.slot_nbytes for each in mounted}
