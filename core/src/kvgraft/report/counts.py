"""What a cache itself has counted, in the shape every report reads."""

from __future__ import annotations

from kvgraft.cache import Cache
from kvgraft.report.schema import CacheCounts
from kvgraft.types import Direction

__all__ = ["cache_counts"]


def cache_counts(cache: Cache) -> CacheCounts:
    """Transfers, evictions and copies since the cache was opened."""
    loads = cache.journal.counters[Direction.LOAD_BACK]
    backups = cache.journal.counters[Direction.BACKUP]
    return {
        "load_backs": {
            "started": loads.started,
            "completed": loads.completed,
            "failed": loads.failed,
            "shared": cache.leasing.shared_loads,
            "skipped_recompute": cache.leasing.skipped_loads,
            "slots": dict(loads.slots),
        },
        "backups": {
            "started": backups.started,
            "completed": backups.completed,
            "failed": backups.failed,
            "slots": dict(backups.slots),
        },
        "evictions": {
            track.name: {
                "device": {str(cause): n for cause, n in track.device_evictions.items()},
                "host": {str(cause): n for cause, n in track.host_evictions.items()},
            }
            for track in cache.tree.tracks
        },
        "copies_on_write": cache.slots.copies_on_write,
        "checkpoints": cache.checkpoints,
    }
