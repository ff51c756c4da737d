"""The embedded backend `file`: segments in a directory, no server.

store               the backend, made of
directory, disk     names and locks; files in whole blocks
open_files          how many of them are open
segment, record     one file, and how a value lies in it
catalog, writer     places of records; appending and making room
uses                uses of keys and changes of places, shared by processes
transfer, verifying one record in memory; a scan
"""

from __future__ import annotations

from kvgraft_file.options import FileOptions
from kvgraft_file.store import FileBackend
from kvgraft_storage import StorageDriver

__all__ = ["DRIVER", "FileBackend", "FileOptions"]

DRIVER = StorageDriver(
    api="1.2",
    summary="segment files in a directory, shared by the processes of one machine",
    options=FileOptions,
    open=FileBackend.open,
    open_existing=FileBackend.open_existing,
)
"""The driver behind the entry point `file`."""
