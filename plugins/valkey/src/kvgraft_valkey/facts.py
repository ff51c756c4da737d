"""Facts that the primaries of a store report: limits, eviction, durability."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvgraft_valkey.connection import AnyConnection

__all__ = ["Facts", "counts", "read_facts"]

LONGEST_VALUE = 512 << 20
"""Default limit of a string's length."""

BY_USE = ("-lru", "-lfu")
"""Suffixes of eviction policies that count uses."""


class Facts(NamedTuple):
    """Facts that hold for all primaries together.

    Attributes:
        value_nbytes: longest value.
        capacity_nbytes: memory they may use for everybody's data; None if one has no limit.
        evicts: whether each evicts to make room for this store's values.
        by_use: whether each evicts by last use or frequency of use.
        durable: whether each has acknowledged writes on its disk; false if it does not say.
    """

    value_nbytes: int
    capacity_nbytes: int | None
    evicts: bool
    by_use: bool
    durable: bool


def read_facts(connection: AnyConnection, *, expiring: bool) -> Facts:
    """Ask the primaries.

    Args:
        connection: open.
        expiring: whether this store's values have a time to live; the policies `volatile-*` evict
            only such values.

    Raises:
        OSError: they do not answer.
    """
    info, settings = connection.info(), connection.settings()
    limits = [int(each.get("maxmemory", "0")) for each in info]
    policies = [each.get("maxmemory_policy", "noeviction") for each in info]
    evicting = ("allkeys-", "volatile-") if expiring else ("allkeys-",)
    evicts = all(limits) and all(each.startswith(evicting) for each in policies)
    synced = [
        each.get("appendfsync") == "always" and each.get("no-appendfsync-on-rewrite") == "no"
        for each in settings
    ]
    return Facts(
        value_nbytes=min(
            int(each.get("proto-max-bulk-len", str(LONGEST_VALUE))) for each in settings
        ),
        capacity_nbytes=sum(limits) if all(limits) else None,
        evicts=evicts,
        by_use=evicts and all(each.endswith(BY_USE) for each in policies),
        durable=all(synced) and all(each.get("aof_enabled") == "1" for each in info),
    )


def counts(connection: AnyConnection) -> dict[str, int]:
    """The primaries' counts, of all data together.

    Raises:
        OSError: they do not answer.
    """
    info = connection.info()
    return {
        "servers": len(info),
        "servers_used_nbytes": _sum(info, "used_memory"),
        "servers_evicted_keys": _sum(info, "evicted_keys"),
        "servers_expired_keys": _sum(info, "expired_keys"),
    }


def _sum(info: Sequence[dict[str, str]], name: str) -> int:
    return sum(int(each.get(name, "0")) for each in info)
