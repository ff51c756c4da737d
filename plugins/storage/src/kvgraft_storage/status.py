"""The status of a key in a storage call."""

from __future__ import annotations

import enum

__all__ = ["TRANSIENT", "WRONG", "Status"]


class Status(str, enum.Enum):
    """The outcome for one key; anything but OK is a miss, with its reason (S9, S10)."""

    OK = "ok"
    """Read into the buffer, stored, or removed."""
    MISS = "miss"
    """Not there."""
    CORRUPT = "corrupt"
    """There, and damaged, truncated or half written."""
    STALE = "stale"
    """There and whole, but of another key, fingerprint, namespace or format version."""
    TOO_LARGE = "too_large"
    """Larger than the buffer when read, or than the backend takes when stored."""
    FULL = "full"
    """No room, and nothing that may be evicted."""
    TIMEOUT = "timeout"
    """Not done by the deadline."""
    DOWN = "down"
    """The backend failed, is detached, or is not called because it failed (the breaker is open)."""


WRONG = frozenset({Status.CORRUPT, Status.STALE, Status.TOO_LARGE})
"""Statuses of values that can never be used: they are removed."""

TRANSIENT = frozenset({Status.TIMEOUT, Status.DOWN})
"""Statuses that say nothing about the key: they must not be remembered as misses (S7)."""
