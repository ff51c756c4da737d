"""Valkey and Redis servers as a store of the storage tier: `valkey:HOST:PORT`.

options             options of a URL
opening, connection one client of a server or a cluster, and why there is none
facts               the servers' own data: limits, eviction, durability
records             the form of a value on the servers, and of a round trip
store               the backend

Importing this package does not import the client library; opening a store does.
"""

from __future__ import annotations

from kvgraft_storage import StorageBackend, StorageDriver
from kvgraft_valkey.options import ValkeyOptions

__all__ = ["DRIVER", "ValkeyOptions"]


def _open(location: str, options: ValkeyOptions) -> StorageBackend:
    from kvgraft_valkey.store import ValkeyBackend

    return ValkeyBackend.open(location, options)


DRIVER = StorageDriver(
    api="1.1",
    summary="a Valkey or Redis server or cluster, shared by the processes that reach it",
    options=ValkeyOptions,
    open=_open,
)
"""The driver behind the entry point `valkey`."""
