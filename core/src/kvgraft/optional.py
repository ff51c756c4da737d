"""Parts of a cache that are packages of their own.

A package publishes a part in the entry-point group `kvgraft.parts`, under one of the names below:

    [project.entry-points."kvgraft.parts"]
    storage = "kvgraft_storage.tier:StorageTier"

A part is looked for when a cache needs it, and no sooner; a package of yours may take the place of
ours. `kvgraft.parts` says what the core asks of some, `PartsFactory` with which arguments each is
called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

from kvgraft.entry_points import import_failure, published
from kvgraft.errors import ConfigError
from kvgraft.installing import how_to_install

__all__ = ["PARTS", "PARTS_GROUP", "load_part"]

PARTS_GROUP: Final = "kvgraft.parts"
"""Entry-point group of packages that bring a part."""

STORAGE: Final = ("plugins/storage",)
ACCELERATOR: Final = ("plugins/accelerator",)
ARENA: Final = ("plugins/arena",)
GUARD: Final = (*STORAGE, "plugins/guard")
OBSERVE: Final = (*STORAGE, "plugins/observe")
TESTING: Final = ("plugins/testing/requirements.txt",)

PARTS: Final[Mapping[str, Sequence[str]]] = {
    "storage": STORAGE,
    "guard": GUARD,
    "events": OBSERVE,
    "memory": ARENA,
    "accelerator": ACCELERATOR,
    "streams": ACCELERATOR,
    "mapped": ACCELERATOR,
    "simulated": TESTING,
}
"""The parts there are, and the package that brings each behind those that it needs; or a file of
requirements."""


@cache
def load_part(name: str) -> Any:
    """Import one of `PARTS`.

    Raises:
        ConfigError: no installed package brings it, several do, or it cannot be imported.
    """
    for each in published(PARTS_GROUP):
        if each.name != name:
            continue
        if each.contested is not None:
            raise ConfigError(f"part {name!r}: {each.contested}")
        try:
            return each.load()
        except Exception as error:
            raise ConfigError(
                f"part {name!r} of {each.distribution} {each.version}: {import_failure(error)}"
            ) from error
    raise ConfigError(f"part {name!r} is not installed; {how_to_install(*PARTS[name])}")
