"""The backend keeps the storage contract, on one server and on a cluster."""

from __future__ import annotations

from pathlib import Path

from kvgraft_storage import StorageBackend, open_storage
from kvgraft_testing.storage import StorageContract

from . import shared
from .servers import needs_server

pytestmark = needs_server


def on_single(directory: Path) -> StorageBackend:
    return open_storage(f"{shared.single().url}?prefix=contract:")


def on_evicting(directory: Path) -> StorageBackend:
    return open_storage(f"{shared.evicting().url}?prefix=contract:")


def on_full(directory: Path) -> StorageBackend:
    return open_storage(f"{shared.full().url}?prefix=contract:")


def on_durable(directory: Path) -> StorageBackend:
    return open_storage(f"{shared.durable().url}?prefix=contract:")


def on_cluster(directory: Path) -> StorageBackend:
    return open_storage(f"{shared.cluster().url}&prefix=contract:")


class TestSingle(StorageContract):
    opener = staticmethod(on_single)


class TestEvicting(StorageContract):
    opener = staticmethod(on_evicting)


class TestFull(StorageContract):
    opener = staticmethod(on_full)


class TestDurable(StorageContract):
    opener = staticmethod(on_durable)


class TestCluster(StorageContract):
    opener = staticmethod(on_cluster)
