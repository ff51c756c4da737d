"""The error that replay adds to the core's tree.

    KvgraftError
    └── TraceError    a damaged or foreign trace

Its message is one line, like those of the core: subject, numbers, next action.
"""

from __future__ import annotations

from kvgraft.errors import KvgraftError

__all__ = ["TraceError"]


class TraceError(KvgraftError):
    """A trace file, or a line of it, cannot be replayed."""
