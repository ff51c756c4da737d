"""The contract of storage backends, as tests to run.

    class TestMine(StorageContract):                            pytest
        url = "mine:{directory}?capacity=4MiB"

    results = check_storage("mine:{directory}?capacity=4MiB")   a list, without pytest

See `docs/storage.md`.
"""

from __future__ import annotations

from kvgraft_testing.storage.checking import check_storage
from kvgraft_testing.storage.clause import STORAGE_CLAUSES, StorageClause
from kvgraft_testing.storage.contract import StorageContract
from kvgraft_testing.storage.memory import MemoryBackend
from kvgraft_testing.storage.subject import Opener

__all__ = [
    "STORAGE_CLAUSES",
    "MemoryBackend",
    "Opener",
    "StorageClause",
    "StorageContract",
    "check_storage",
]
