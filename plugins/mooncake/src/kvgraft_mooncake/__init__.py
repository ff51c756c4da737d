"""The backend `mooncake`: memory of many machines, pooled by Mooncake Store.

options, location   parts of a URL: options, master and namespace, names of objects
store               the backend, made of
client, codes       calls of the client library; its result codes
regions             memory that it may read and write
admin               the master's HTTP service
"""

from __future__ import annotations

from kvgraft_mooncake.options import MooncakeOptions
from kvgraft_mooncake.store import MooncakeBackend
from kvgraft_storage import StorageDriver

__all__ = ["DRIVER", "MooncakeBackend", "MooncakeOptions"]

DRIVER = StorageDriver(
    api="1.1",
    summary="memory of many machines, by Mooncake Store",
    options=MooncakeOptions,
    open=MooncakeBackend.open,
)
"""The driver behind the entry point `mooncake`."""
