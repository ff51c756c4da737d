"""Settings of the backend, from SGLang's `--hicache-storage-backend-extra-config`.

    {"backend_name": "kvgraft", "module_path": "kvgraft_sglang.backend",
     "class_name": "KvgraftStorage", "interface_v1": 1,
     "backend": "file", "path": "/var/cache/kvgraft", "capacity": "40GB"}

Options that are neither the backend's nor SGLang's are the store's.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from kvgraft_storage import StoreSettings

__all__ = ["SGLANGS_OWN", "BackendSettings"]

SGLANGS_OWN = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
"""Keys of the entry that SGLang reads and leaves in it."""


class BackendSettings(StoreSettings):
    """A backend: its store, as in `StoreSettings`, and how long SGLang's threads wait for it.

    Attributes:
        lookup_timeout_s: longest time for which a thread waits for a lookup in the store.
        call_timeout_s: longest time for which a thread waits for a call that moves pages, of up to
            128 of them; pages that have not arrived by then are misses.
        allow_clear: whether SGLang may clear the store, which removes everything in it, data of
            other models and engines too.
    """

    adapter: ClassVar[str] = "kvgraft-sglang"

    lookup_timeout_s: float = Field(default=1.0, gt=0)
    call_timeout_s: float = Field(default=10.0, gt=0)
    allow_clear: bool = False
