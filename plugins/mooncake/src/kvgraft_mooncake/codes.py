"""Numbers that Mooncake's client answers instead of bytes read (0.3.13)."""

from __future__ import annotations

import enum

__all__ = ["Code", "MooncakeError", "meaning"]


class MooncakeError(OSError):
    """A call failed for a reason that is not about one key."""


class Code(enum.IntEnum):
    """Codes that are handled one by one; the names are Mooncake's."""

    NO_AVAILABLE_HANDLE = -200
    """No segment has room."""
    INVALID_PARAMS = -600
    """The buffers are too small for the value, among others."""
    REPLICA_IS_NOT_READY = -703
    """It is being stored this moment."""
    OBJECT_NOT_FOUND = -704
    OBJECT_HAS_LEASE = -706
    """It was asked for within the last seconds, and may be being read."""
    TRANSFER_FAIL = -800
    """The buffers are too large for the value, or its holder does not answer."""
    RPC_FAIL = -900
    """The master does not answer."""


def meaning(code: int) -> str:
    """A code for people."""
    try:
        return f"{Code(code).name} ({code})"
    except ValueError:
        return f"error {code}"
