"""The storage contract on the backend in memory."""

from __future__ import annotations

from pathlib import Path

from kvgraft_storage import StorageBackend
from kvgraft_testing.storage import MemoryBackend, StorageContract


def open_memory(directory: Path) -> StorageBackend:
    return MemoryBackend(1 << 20, 1 << 18)


class TestMemory(StorageContract):
    opener = staticmethod(open_memory)
