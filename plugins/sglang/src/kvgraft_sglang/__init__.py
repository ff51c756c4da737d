"""kvgraft's stores as a storage backend of SGLang's HiCache, below its GPU and CPU memory.

settings           the backend's entry in `--hicache-storage-backend-extra-config`
identity           the fingerprint: everything about the data that SGLang's page hashes do not say
page_store         the backend without SGLang: pages by hash and pool, waits that end
restorable         which lengths of a prefix can be restored from several pools
engine, interface  what is read from SGLang, which versions of it, and the signatures relied on
backend            the class that SGLang loads; the only module that imports SGLang

Importing this package imports neither SGLang nor torch.
"""

from __future__ import annotations

from kvgraft_sglang.identity import Engine, Pool
from kvgraft_sglang.page_store import PageStore
from kvgraft_sglang.settings import BackendSettings

__all__ = ["BackendSettings", "Engine", "PageStore", "Pool"]
