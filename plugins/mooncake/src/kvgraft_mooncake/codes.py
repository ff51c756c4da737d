"""Error codes of Mooncake's client (0.3.13)."""

from __future__ import annotations

import enum

__all__ = ["Code", "MooncakeError", "meaning"]


class MooncakeError(OSError):
    """A call failed for a reason that is not about one key."""


class Code(enum.IntEnum):
    """Codes with a meaning of their own here; the names are Mooncake's."""

    NO_AVAILABLE_HANDLE = -200
    """No segment has room."""
    INVALID_PARAMS = -600
    """The buffers are too small for the value, among others."""
    REPLICA_IS_NOT_READY = -703
    """The value is being stored."""
    OBJECT_NOT_FOUND = -704
    OBJECT_HAS_LEASE = -706
    """The value is leased: it was asked for within the last seconds, and may be in a read."""
    TRANSFER_FAIL = -800
    """The buffers are too large for the value, or its holder does not answer."""
    RPC_FAIL = -900
    """The master does not answer."""


def meaning(code: int) -> str:
    """A code's name and number for messages."""
    try:
        return f"{Code(code).name} ({code})"
    except ValueError:
        return f"error {code}"
