"""The stores' part of `kvgraft doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvgraft.errors import ConfigError
from kvgraft_storage.driver import discover_storage, open_existing_storage

__all__ = ["checkup"]


def checkup(stores: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Sections of the report: the backends, and the stores at some URLs; `"ok"` or why not."""
    return {
        "storage backends": {each.name: each.problem or "ok" for each in discover_storage()},
        "stores": {url: _reached(url) for url in stores},
    }


def _reached(url: str) -> str:
    """`"ok"`, or why the store cannot be used."""
    try:
        store = open_existing_storage(url)
    except ConfigError as error:
        return str(error)
    try:
        store.stats()
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        store.close()
    return "ok"
