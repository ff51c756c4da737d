"""Names that installed distributions publish, among them the parts of a cache.

A package publishes a part in the entry-point group `kvgraft.parts`, under a name of `PARTS`:

    [project.entry-points."kvgraft.parts"]
    storage = "kvgraft_storage.tier:StorageTier"

A part is loaded only when a cache needs it, except for those that `load_if_installed` loads when a
cache is opened. Your own may replace ours. `kvgraft.parts` has the interfaces of some,
`PartsFactory` the arguments that each is called with.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Final, NamedTuple

import importlib_metadata

from kvgraft.errors import ConfigError

__all__ = [
    "PARTS",
    "PARTS_GROUP",
    "Published",
    "how_to_install",
    "import_failure",
    "is_installed",
    "load_if_installed",
    "load_part",
    "published",
]


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


def how_to_install(*paths: str) -> str:
    """The next action where a package is missing.

    Args:
        paths: of the package in a clone, such as `plugins/file`, after those of this project's
            packages that it needs, which pip would not find; or of a file of requirements (.txt).
    """
    if paths[0].endswith(".txt"):
        return f"in a clone of kvgraft, pip install -r {shlex.quote(paths[0])}"
    return f"in a clone of kvgraft, pip install {shlex.join(f'./{path}' for path in paths)}"


PARTS_GROUP: Final = "kvgraft.parts"
"""Entry-point group of packages that bring a part."""

STORAGE: Final = ("plugins/storage",)
ACCELERATOR: Final = ("plugins/accelerator",)
ARENA: Final = ("plugins/arena",)
OBSERVE: Final = (*STORAGE, "plugins/observe")
RETENTION: Final = ("plugins/retention",)
SCHEDULING: Final = ("plugins/scheduling",)

PARTS: Final[Mapping[str, Sequence[str]]] = {
    "storage": STORAGE,
    "storage_settings": STORAGE,
    "guard": (*OBSERVE, *RETENTION, *SCHEDULING, "plugins/guard"),
    "events": OBSERVE,
    "explain": OBSERVE,
    "tracers": OBSERVE,
    "density": ("plugins/density",),
    "memory": ARENA,
    "sizes": ARENA,
    "lifetimes": RETENTION,
    "announce": RETENTION,
    "pins": RETENTION,
    "tenants": RETENTION,
    "tenants_settings": RETENTION,
    "clear": RETENTION,
    "sweeper": RETENTION,
    "identities": ("plugins/identity",),
    "steps": SCHEDULING,
    "pending": SCHEDULING,
    "engine_slots": SCHEDULING,
    "ready": SCHEDULING,
    "accelerator": ACCELERATOR,
    "streams": ACCELERATOR,
    "mapped": ACCELERATOR,
    "simulated": ("plugins/testing/requirements.txt",),
    "ranks": (*STORAGE, "plugins/ranks"),
}
"""The parts there are, and the package that brings each behind those that it needs; or a file of
requirements."""


@cache
def load_part(name: str) -> Any:
    """Import one of `PARTS`.

    Raises:
        ConfigError: no installed package brings it, several do, or it cannot be imported.
    """
    if name not in _parts():
        _parts.cache_clear()  # it may have been installed since
    if name not in _parts():
        raise ConfigError(f"part {name!r} is not installed; {how_to_install(*PARTS[name])}")
    found = _parts()[name]
    if found.contested is not None:
        raise ConfigError(f"part {name!r}: {found.contested}")
    try:
        return found.load()
    except Exception as error:
        raise ConfigError(
            f"part {name!r} of {found.distribution} {found.version}: {import_failure(error)}"
        ) from error


@cache
def _parts() -> dict[str, Published]:
    """Parts by name; kept, as looking for them takes tens of milliseconds."""
    return {each.name: each for each in published(PARTS_GROUP)}


def is_installed(name: str) -> bool:
    """Whether a package brings this part; imports nothing of it."""
    return name in _parts()


@cache
def load_if_installed(*names: str) -> None:
    """Import parts before they are needed; `load_part` reports later what is wrong with one."""
    with suppress(ConfigError):
        for name in names:
            load_part(name)
