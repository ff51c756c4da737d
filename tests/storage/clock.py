"""Time for the tests."""

from __future__ import annotations

__all__ = ["Clock"]


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
