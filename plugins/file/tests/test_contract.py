"""The storage contract on the file backend."""

from __future__ import annotations

from kvgraft_testing.storage import StorageContract


class TestFile(StorageContract):
    url = "file:{directory}?capacity=2MiB&segment=256KiB&refresh_s=0"
