"""`Cache.storage` in a cache without a storage tier."""

from __future__ import annotations

from typing import Any, Literal

from kvgraft.errors import NoStorageError

__all__ = ["NoStorage"]


class NoStorage:
    """No storage tier: false where `StorageTier` is true, and each use says how to have one.

    Raises:
        NoStorageError: any of the tier's methods is used. `hasattr` answers False.
    """

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return "<no storage tier>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NoStorageError(
            f"storage.{name}: this cache has no storage tier; open it with storage={{'model': "
            "'my-model', 'weights': 'rev-1', 'url': 'file:/var/cache/kvgraft'}, or ask "
            "`if cache.storage:` first"
        )
