"""The backend keeps the storage contract; for capacity see `check_capacity.py`."""

from __future__ import annotations

from kvgraft_testing.storage import StorageContract


class TestMooncake(StorageContract):
    url = "mooncake:127.0.0.1/contract{directory}"
