"""The list of defects, filled by the modules beside this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .scene import Patch

__all__ = ["DEFECTS", "Defect", "breaks"]

Play = Callable[[Patch], None]


class Defect(NamedTuple):
    """A defect and the scene that shows it.

    Attributes:
        rule: the rule it breaks.
        component: where; None for the core.
        play: puts it in, then runs into it.
    """

    rule: str
    component: str | None
    play: Play


DEFECTS: dict[str, Defect] = {}
"""By name, which says what is wrong."""


def breaks(rule: str, component: str | None = None) -> Callable[[Play], Play]:
    """Register a scene under the name of its function."""

    def register(play: Play) -> Play:
        name = getattr(play, "__name__", "")
        assert name not in DEFECTS
        DEFECTS[name] = Defect(rule, component, play)
        return play

    return register
