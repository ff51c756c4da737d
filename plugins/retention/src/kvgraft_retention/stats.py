"""Counts of tenants, pinned prefixes and cleared namespaces, as values; each is a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["ClearStats", "PinStats", "PoolShare", "TenantStats", "TenantTokens"]


class PinStats(NamedTuple):
    """The pinned prefixes of one owner (K6); slots by component, in each pool's own units.

    Pages that several pins hold count for each of them here, and once against the bound, even if
    they are not cached.

    Attributes:
        pins: how many.
        tokens: tokens of their prefixes.
        device: slots on DEVICE.
        host: slots on HOST, of prefixes that DEVICE did not have; of a component at home there,
            all.
    """

    pins: int
    tokens: int
    device: Mapping[str, int]
    host: Mapping[str, int]


class PoolShare(NamedTuple):
    """One tenant's part of a pool, in slots.

    Attributes:
        guarantee: slots that other tenants' requests cannot take.
        limit: most slots it ever has.
        evictable: its part of the pool's, see `kvgraft.stats.PoolStats`.
        pinned: the same.
        private: the same.
        in_flight: the same.
        promised: the same.
        lost: its slots that were evicted for other tenants' requests, so far.
    """

    guarantee: int
    limit: int
    evictable: int
    pinned: int
    private: int
    in_flight: int
    promised: int
    lost: int

    @property
    def used(self) -> int:
        """Its slots."""
        return self.evictable + self.pinned + self.private + self.in_flight


class TenantTokens(NamedTuple):
    """One tenant's admitted requests, and the tokens of their prompts, as in `TokenStats`.

    Attributes:
        admitted: admissions.
        asked: prompt tokens.
        device: prompt tokens that were resumed from DEVICE alone.
        host: tokens that HOST had.
        storage: those that HOST had because STORAGE brought them.
    """

    admitted: int
    asked: int
    device: int
    host: int
    storage: int

    @property
    def reused(self) -> int:
        """Prompt tokens that need not be computed, from any tier."""
        return self.device + self.host + self.storage


class TenantStats(NamedTuple):
    """One tenant's requests and slots.

    Attributes:
        tokens: of its prompts.
        device: by component, its part of the DEVICE pool.
        host: by component, its part of the HOST pool.
    """

    tokens: TenantTokens
    device: Mapping[str, PoolShare]
    host: Mapping[str, PoolShare]


class ClearStats(NamedTuple):
    """The outcome of `Cache.clear`; slots by component, in each pool's own units.

    Of a large tree they count the part that the call visited: `complete` is false then.

    Attributes:
        namespaces: existing namespaces that it cleared.
        device: slots freed on DEVICE.
        host: slots freed on HOST; 0 of a component without a HOST pool.
        held_device: slots on DEVICE that stay until requests and transfers release them.
        held_host: the same on HOST.
        requests: requests that have begun and not ended: they share nothing any more.
        pins: pinned prefixes of these namespaces, which ended.
        complete: whether all of their data was visited. Otherwise each `poll` goes on, and requests
            that need room take it there first.
        durable: whether no later process finds stored data of them either, once `drain` returned
            True. False where the store keeps no versions, or none is attached: a later process
            clears them, too, with the same version.
    """

    namespaces: int
    device: Mapping[str, int]
    host: Mapping[str, int]
    held_device: Mapping[str, int]
    held_host: Mapping[str, int]
    requests: int
    pins: int
    complete: bool
    durable: bool
