"""Opens a cache on every rank, or on none."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvgraft.assembly import PartsFactory, parts_of, size_pools
from kvgraft.config import CacheConfig, parse_config
from kvgraft.errors import ConfigError, KvgraftError
from kvgraft.transfers import Journal, TransferEngine
from kvgraft_ranks.agreement import Agreement
from kvgraft_ranks.cache import ranked_cache
from kvgraft_ranks.copies import AgreedEngine, ranked_journal
from kvgraft_ranks.link import Link
from kvgraft_ranks.tier import ranked_tier
from kvgraft_storage.tier import StorageTier

if TYPE_CHECKING:
    from kvgraft.cache import Cache

__all__ = ["open_on_ranks"]

TIMEOUT_S: Final[float] = CacheConfig.model_fields["transfer_timeout_s"].default
"""Longest wait for the other ranks of one whose settings are wrong."""

SIZES: Final = ("device_tokens", "host_tokens")
"""Settings that sizes in bytes become, of the cache and of components."""


def open_on_ranks(
    kind: type[Cache],
    group: Any,
    settings: CacheConfig | dict[str, Any],
    transfers: TransferEngine | None = None,
    clock: Callable[[], float] | None = None,
) -> Cache:
    """Open this rank's cache of a group; all ranks call it at the same time.

    They wait for each other at most `transfer_timeout_s`. Sizes in bytes become the smallest number
    of tokens that fits on a rank. Data in STORAGE gets the rank and the number of ranks in its
    name.

    Args:
        kind: `Cache`, or a class derived from it.
        group: a `torch.distributed` process group with a backend for the CPU.
        settings: of `CacheConfig`; equal on all ranks but for options that say which part a rank
            holds.
        transfers: engine of this rank's copies; by default as for one rank.
        clock: monotonic, in seconds; rank 0's counts.

    Raises:
        ConfigError: on all ranks, if a cache cannot be opened on one of them, or if pools or
            settings differ.
        RanksError: a rank does not open a cache.
    """
    if clock is not None and not callable(clock):
        raise ConfigError(f"clock {clock!r:.40}; give a function of no arguments")
    config: CacheConfig | None = None
    failure: KvgraftError | None = None
    try:
        config = settings if isinstance(settings, CacheConfig) else parse_config(settings)
    except ConfigError as error:
        failure = error
    timeout_s = TIMEOUT_S if config is None else config.transfer_timeout_s
    agreement = Agreement(Link(group, timeout_s), clock or time.monotonic)
    agreement.expect_all(failure)  # all ranks are here, and have a time
    assert config is not None
    cache: Cache | None = None
    try:
        config = _with_shard(_sized(config, agreement), agreement)
        cache = ranked_cache(kind, agreement)(
            config,
            transfers=None if transfers is None else AgreedEngine(transfers, agreement),
            clock=agreement.clock,
            parts=_ranked_parts(config, agreement),
        )
    except KvgraftError as error:
        failure = error
    try:
        agreement.expect_all(failure)
        assert cache is not None
        _expect_equal(cache, agreement)
    except BaseException:
        if cache is not None:
            cache.close()
        raise
    return cache


def _sized(config: CacheConfig, agreement: Agreement) -> CacheConfig:
    """Pools of the same number of tokens on all ranks, where they are sized in bytes.

    Components of bounded reach have numbers of their own among their options.
    """
    sized, failure = config, None
    try:
        sized = size_pools(config)
    except KvgraftError as error:
        failure = error
    agreement.expect_all(failure)
    names = [*sized.components] if sized is not config else []
    mine = {
        f"{option} {name}": options[option]
        for name, options in (("", vars(sized)), *((n, sized.components[n]) for n in names))
        for option in SIZES
        if options.get(option) is not None
    }
    found = [json.loads(each) for each in agreement.gather(json.dumps(mine).encode())]
    if not names:
        return config
    least = {key: min(each.get(key, own) for each in found) for key, own in mine.items()}
    options = {
        name: {**given, **{o: least[f"{o} {name}"] for o in SIZES if f"{o} {name}" in least}}
        for name, given in sized.components.items()
    }
    pools = {option: least[f"{option} "] for option in SIZES if f"{option} " in least}
    fixed = {"device_bytes": None, "host_bytes": None}
    return sized.model_copy(update={**fixed, **pools, "components": options})


def _with_shard(config: CacheConfig, agreement: Agreement) -> CacheConfig:
    """The settings with this rank and the number of ranks in the name of its stored data."""
    storage = config.storage
    if storage is None:
        return config
    link = agreement.link
    shard = f"{storage.sharding or ''}rank {link.rank} of {link.size}"
    return config.model_copy(update={"storage": storage.model_copy(update={"sharding": shard})})


def _expect_equal(cache: Cache, agreement: Agreement) -> None:
    """Refuse ranks with other pools or settings: they would decide differently (D1).

    Raises:
        ConfigError: on all ranks, naming the first difference.
    """
    mine = json.dumps(_facts(cache)).encode()
    found: list[dict[str, Any]] = [json.loads(each) for each in agreement.gather(mine)]
    for rank, facts in enumerate(found):
        for name, value in facts.items():
            if value != found[0].get(name):
                raise ConfigError(
                    f"ranks: {name} is {value} on rank {rank} and {found[0].get(name)} on rank 0; "
                    "give all ranks equal pools and settings"
                )


def _facts(cache: Cache) -> dict[str, Any]:
    """Settings and sizes that decisions depend on, by name."""
    config = cache.config
    given = ["page_size", "policy", "cut_tokens", "transfer_timeout_s", "pin_share", "max_tokens"]
    given += ["max_drafts", "decode_interval_tokens", "device_memory", "host_memory"]
    facts: dict[str, Any] = {name: str(getattr(config, name)) for name in given}
    facts["write_policy"] = config.write_policy.value
    facts["load"], facts["tenants"] = str(config.load), str(config.tenants)
    facts["storage"] = str(
        config.storage and config.storage.model_dump(exclude={"url", "sharding"})
    )
    facts["components"] = [each.name for each in cache.mounted]
    for each, component in zip(cache.mounted, cache.tree.components):
        facts[f"the reach of {each.name!r}"] = str(component.reach.fingerprint)
        device, host = each.component.device, each.component.host
        facts[f"slots of {each.name!r} on device"] = device.capacity
        facts[f"bytes of a slot of {each.name!r} on device"] = device.slot_nbytes
        if host is not None:
            facts[f"slots of {each.name!r} on host"] = host.capacity
            facts[f"bytes of a slot of {each.name!r} on host"] = host.slab_nbytes
    return facts


def _ranked_parts(config: CacheConfig, agreement: Agreement) -> PartsFactory:
    """The parts of a rank's cache, with the guard around them if it is on."""
    plain: Any = type(parts_of(config))

    class RankedParts(plain):  # type: ignore[misc]
        def __init__(self, config: CacheConfig) -> None:
            super().__init__(config)
            self.clock = agreement.clock

        def kind(self, plain: Any) -> Any:
            kind: Any = super().kind(plain)
            if isinstance(kind, type) and issubclass(kind, Journal):
                return ranked_journal(kind, agreement)
            if isinstance(kind, type) and issubclass(kind, StorageTier):
                return ranked_tier(kind, agreement)
            return kind

        def engine(self) -> TransferEngine:
            return AgreedEngine(super().engine(), agreement)

    parts: PartsFactory = RankedParts(config)
    return parts
