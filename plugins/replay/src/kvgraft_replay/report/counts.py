"""The cache's counts, in the form that reports read."""

from __future__ import annotations

from collections.abc import Mapping

from kvgraft.cache import Cache
from kvgraft.policies.policy import class_of, is_left_behind
from kvgraft.types import PointKind
from kvgraft_replay.report.schema import (
    CacheCounts,
    CandidateClass,
    PointCounts,
    PointSlots,
    StorageCounts,
    StoreContents,
)

__all__ = ["cache_counts", "storage_counts", "store_contents"]

PREFETCHES = ("started", "shared", "delivered", "in vain", "shrunk", "tokens")
STORES = ("nodes", "slots", "slots failed")
"""Counts that are shown even if they are 0."""


def cache_counts(cache: Cache) -> CacheCounts:
    """Transfers, evictions and copies since the cache was opened."""
    stats = cache.stats()
    loads, backups, requests = stats.load_backs, stats.backups, stats.requests
    return {
        "component_hits": {
            name: {
                "device_slots": of.hits.device,
                "host_slots": of.hits.host,
                "storage_slots": of.hits.storage,
            }
            for name, of in stats.components.items()
        },
        "load_backs": {
            "started": loads.started,
            "completed": loads.completed,
            "failed": loads.failed,
            "shared": requests.shared_loads,
            "skipped_recompute": requests.skipped_loads,
            "slots": dict(loads.slots),
        },
        "backups": {
            "started": backups.started,
            "completed": backups.completed,
            "failed": backups.failed,
            "slots": dict(backups.slots),
            "waits": backups.waits,
        },
        "evictions": {
            name: {
                "device": dict(of.device.evicted),
                "host": {} if of.host is None else dict(of.host.evicted),
            }
            for name, of in stats.components.items()
        },
        "copies_on_write": requests.copies_on_write,
        "checkpoints": requests.checkpoints,
        "resume_points": _point_counts(cache),
        "candidates": _candidates(cache),
    }


def _candidates(cache: Cache) -> list[CandidateClass]:
    """The eviction candidates by the policy's classes, without evict-first data; O(candidates)."""
    policy, found = cache.tree.policy, list[CandidateClass]()
    for component in cache.tree.components:
        for pool in (component.device, component.host):
            if pool is None:
                continue
            order = pool.queue
            classes: dict[int, list[tuple[int, float | None]]] = {}
            for stamp, node in order:
                if not is_left_behind(stamp):
                    entries = classes.setdefault(class_of(stamp), [])
                    entries.append((component.n_slots(node), order.score(stamp)))
            for use_class, entries in sorted(classes.items()):
                scores = [score for _, score in entries if score is not None]
                found.append(
                    {
                        "component": component.name,
                        "tier": pool.name,
                        "use_class": use_class,
                        "words": policy.describe(use_class),
                        "slots": sum(n_slots for n_slots, _ in entries),
                        "lowest_score": min(scores, default=None),
                        "highest_score": max(scores, default=None),
                    }
                )
    return found


def _point_counts(cache: Cache) -> PointCounts | None:
    """Resume points since the cache was opened, and the slots in the tree now; O(tree)."""
    points, tree = cache.points, cache.tree
    if not points.matter:
        return None
    bounded = [component for component in tree.components if not component.is_prefix_closed]
    slots: dict[str, PointSlots] = {
        component.name: {"kept": 0, "left_behind": 0} for component in bounded
    }
    for node in tree.nodes():
        for component in bounded:
            cell = node.cells[component.index]
            if cell.device is not None:
                of = slots[component.name]
                if is_left_behind(cell.stamp):
                    of["left_behind"] += component.n_slots(node)
                else:
                    of["kept"] += component.n_slots(node)
    return {
        "made": _by_kind(points.made),
        "skipped": _by_kind(points.skipped),
        "used": _by_kind(points.used),
        "lost": _by_kind(points.lost),
        "slots": slots,
    }


def _by_kind(counts: Mapping[PointKind, int]) -> dict[str, int]:
    return {kind.value: n for kind, n in counts.items()}


def storage_counts(cache: Cache, before: StoreContents | None) -> StorageCounts | None:
    """Counts of the storage tier since the cache was opened; None without one.

    Args:
        cache: the cache.
        before: the store's content when the cache was opened.
    """
    after = store_contents(cache)
    stats = cache.stats().storage
    if stats is None:
        return None
    return {
        "prefetches": {**dict.fromkeys(PREFETCHES, 0), **stats.prefetches},
        "in_vain": dict(stats.in_vain),
        "stores": {**dict.fromkeys(STORES, 0), **stats.stores},
        "calls": {verb: dict(by_status) for verb, by_status in stats.keys.items()},
        "breaker": stats.breaker,
        "abandoned_threads": stats.abandoned_threads,
        "last_error": stats.last_error,
        "before": before,
        "after": after,
    }


def store_contents(cache: Cache) -> StoreContents | None:
    """The store's content now; waits for its answer. None if there is none."""
    if not cache.storage:
        return None
    found = cache.storage.ask_store(cache.config.transfer_timeout_s)
    if found is None:
        return None
    return {
        "records": found.n_records,
        "bytes": found.nbytes,
        "capacity_bytes": found.capacity_nbytes,
        "details": dict(found.details),
    }
