"""Entry points of installed distributions, read with importlib-metadata.

A stale copy of a distribution's metadata further down the path is not a second owner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import importlib_metadata

__all__ = ["Published", "import_failure", "published"]


class Published(NamedTuple):
    """One name of a group.

    Attributes:
        name: the entry point's.
        distribution, version: the first owner's.
        owners: the distributions that publish it.
        load: imports the object it names; errors of the import pass through.
    """

    name: str
    distribution: str
    version: str
    owners: tuple[str, ...]
    load: Callable[[], object]

    @property
    def contested(self) -> str | None:
        """Why it cannot be used, if it has several owners (P4)."""
        if len(self.owners) == 1:
            return None
        return f"published by {' and '.join(self.owners)}; uninstall all but one"


def published(group: str) -> list[Published]:
    """Everything of a group, by name; imports nothing."""
    points: dict[str, list[importlib_metadata.EntryPoint]] = {}
    for point in importlib_metadata.entry_points(group=group):
        same = points.setdefault(point.name, [])
        if not any(_owner(point) == _owner(other) for other in same):
            same.append(point)
    return [
        Published(name, *_owner(same[0]), tuple(_owner(point)[0] for point in same), same[0].load)
        for name, same in sorted(points.items())
    ]


def import_failure(error: BaseException) -> str:
    """The error that an import raised, in one line."""
    return " ".join(f"import failed: {type(error).__name__}: {error}".split())


def _owner(point: importlib_metadata.EntryPoint) -> tuple[str, str]:
    dist = point.dist
    return (dist.name, dist.version) if dist is not None else ("", "")
