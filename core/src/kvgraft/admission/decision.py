"""Outcomes of admission, as values."""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["Decision", "Outcome", "Shortage"]


class Outcome(enum.Enum):
    """What became of a request that asked to run."""

    ADMITTED = "admitted"
    """Its slots are promised; load-back and allocation will succeed (A7)."""
    DEFERRED = "deferred"
    """It fits an emptier cache; nothing was changed, ask again (A9)."""
    NEVER_FITS = "never fits"
    """It is too large for a pool; reject it (A8)."""


class Shortage(NamedTuple):
    """A pool that cannot give what a request needs, in the pool's own slots.

    Attributes:
        component: whose pool.
        pool: `"device"`, `"host"` or the name of a private pool.
        needed: slots the request asks for.
        available: slots that could be given now.
        capacity: slots of the pool.
    """

    component: str
    pool: str
    needed: int
    available: int
    capacity: int

    def __str__(self) -> str:
        return (
            f"component {self.component!r} {self.pool} pool: needs {self.needed} slots, "
            f"{self.available} available of {self.capacity}"
        )


class Decision(NamedTuple):
    """The answer of admission.

    Attributes:
        outcome: admitted, deferred or never fits.
        shortages: the pools that were short; empty when admitted.
    """

    outcome: Outcome
    shortages: tuple[Shortage, ...] = ()

    @property
    def admitted(self) -> bool:
        """Whether the request may run."""
        return self.outcome is Outcome.ADMITTED

    def __str__(self) -> str:
        return "; ".join([self.outcome.value, *(str(shortage) for shortage in self.shortages)])
