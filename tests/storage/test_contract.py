"""The storage contract on the backends that are here."""

from __future__ import annotations

from pathlib import Path

from kvgraft.storage import StorageBackend
from kvgraft.testing.storage import MemoryBackend, StorageContract


def open_memory(directory: Path) -> StorageBackend:
    return MemoryBackend(1 << 20, 1 << 18)


class TestFile(StorageContract):
    url = "file:{directory}?capacity=2MiB&segment=256KiB&refresh_s=0"


class TestMemory(StorageContract):
    opener = staticmethod(open_memory)
