"""kvgraft in SGLang: its prefix cache, and stores below the memory of its HiCache.

tree               the prefix cache: what is kept, and from where a request resumes
allocator          SGLang's allocators over the pools of the cache
tree_settings      its settings, from an environment variable
general_plugin     the function that SGLang runs in each process; it registers the tree

settings           the backend's entry in `--hicache-storage-backend-extra-config`
identity           the fingerprint: everything about the data that SGLang's page hashes do not say
page_store         the backend without SGLang: pages by hash and pool, waits that end
restorable         which lengths of a prefix can be restored from several pools
engine, interface  what is read from SGLang, which versions of it, and the signatures relied on
backend            the storage backend that SGLang loads; it, `tree` and `allocator` import SGLang

Importing this package imports neither SGLang nor torch.
"""

from __future__ import annotations

from kvgraft_sglang.identity import Engine, Pool
from kvgraft_sglang.page_store import PageStore
from kvgraft_sglang.settings import BackendSettings

__all__ = ["BackendSettings", "Engine", "PageStore", "Pool"]
