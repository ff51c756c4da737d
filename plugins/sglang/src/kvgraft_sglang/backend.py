"""The class that SGLang loads: `"class_name": "KvgraftStorage"` of `kvgraft_sglang.backend`.

It translates SGLang's interface to `PageStore`, which does the work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import sglang

from kvgraft import ConfigError
from kvgraft_sglang.engine import describe_engine, describe_pool, page_parts, tensor_memory
from kvgraft_sglang.identity import KV, Pool
from kvgraft_sglang.interface import INTERFACE
from kvgraft_sglang.page_store import Page, PageStore, Transfer
from kvgraft_sglang.settings import SGLANGS_OWN, BackendSettings
from kvgraft_storage import open_storage

INTERFACE.require_supported(sglang.__version__)  # before imports that another version may lack

from sglang.srt.mem_cache import hicache_storage as hicache  # noqa: E402
from sglang.srt.observability.metrics_collector import StorageMetrics  # noqa: E402

if TYPE_CHECKING:
    import torch

__all__ = ["KvgraftStorage"]

logger = logging.getLogger("kvgraft.sglang")


class KvgraftStorage(hicache.HiCacheStorage):
    """A kvgraft store below SGLang's host pools."""

    def __init__(self, storage_config: hicache.HiCacheStorageConfig, kwargs: object = None) -> None:
        changed = INTERFACE.differences({**vars(hicache), "StorageMetrics": StorageMetrics})
        if changed:
            raise ConfigError(
                f"kvgraft-sglang: SGLang {sglang.__version__} has another interface: "
                f"{'; '.join(changed)}; report it, and use another version until then"
            )
        given = storage_config.extra_config or {}
        self._settings = BackendSettings.of(given, SGLANGS_OWN)
        self._engine = describe_engine(
            storage_config, _server(), self._settings, version=sglang.__version__
        )
        self._from_buffers = bool(given.get("interface_v1", 0))
        self._backend = open_storage(self._settings.url)
        self._store: PageStore | None = None
        self._pools: dict[str, tuple[Any, Pool]] = {}
        self._refused: set[str] = set()

    # -- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        pool = describe_pool(KV, mem_pool_host, parts=self._from_buffers)
        if self._from_buffers and pool.page_nbytes and not pool.parts:
            logger.warning(
                "kvgraft-sglang: pages of layout %s are copied before they are stored; "
                "--hicache-mem-layout page_first saves that",
                pool.layout,
            )
        self._store = PageStore(self._engine, pool, self._settings, self._backend)
        self._pools[KV] = mem_pool_host, pool

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(getattr(host_pool_name, "value", host_pool_name))
        if name != KV:
            pool = describe_pool(name, host_pool, parts=False)
            self._pages.add_pool(pool)
            self._pools[name] = host_pool, pool

    @property
    def _pages(self) -> PageStore:
        if self._store is None:
            raise ConfigError("kvgraft-sglang: the host pool of the KV cache is not registered")
        return self._store

    # -- pages as tensors, one by one

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        targets = list(target_locations or [None] * len(keys))
        memory = [None if each is None else tensor_memory(each) for each in targets]
        usable = [number for number, view in enumerate(memory) if view is not None]
        loaded = self._pages.load(
            [keys[number] for number in usable],
            [view for view in memory if view is not None],
        )
        here = {number for number, ok in zip(usable, loaded) if ok}
        return [target if number in here else None for number, target in enumerate(targets)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [target_location if value is None else value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        tensors = [each.contiguous() for each in (target_locations if values is None else values)]
        pages = [view for each in tensors if (view := tensor_memory(each)) is not None]
        return len(pages) == len(keys) and all(self._pages.store(keys, pages))

    def exists(self, key: str) -> bool:
        return self._pages.find([key])[0]

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self._pages.n_leading(keys)

    # -- pages of host pools

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        return self._load(KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        return self._save(KV, keys, host_indices)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> hicache.PoolTransferResult:
        needed: dict[str, int | None] = {}
        for transfer in pool_transfers or ():
            if transfer.hit_policy == hicache.PoolHitPolicy.ALL_PAGES:
                needed[str(transfer.name)] = None
            elif transfer.hit_policy == hicache.PoolHitPolicy.TRAILING_PAGES:
                needed[str(transfer.name)] = max(1, len(transfer.keys or ()))
            elif str(transfer.name) not in self._refused:
                self._refused.add(str(transfer.name))
                logger.warning(
                    "kvgraft-sglang: pool %s asks by %s, which is not supported: it is told that "
                    "nothing of it is there; report it",
                    transfer.name,
                    getattr(transfer.hit_policy, "value", transfer.hit_policy),
                )
        found = self._pages.find_restorable(keys, needed)
        return hicache.PoolTransferResult(found.longest, dict(found.hits), found.lengths)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return self._each(transfers, self._load)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return self._each(transfers, self._save)

    def _each(
        self, transfers: Any, move: Callable[[str, Sequence[str], Any], list[bool]]
    ) -> dict[str, list[bool]]:
        return {
            transfer.name: move(str(transfer.name), transfer.keys or (), transfer.host_indices)
            for transfer in transfers
        }

    def _load(self, name: str, keys: Sequence[str], indices: Any) -> list[bool]:
        host, pool = self._pool(name)
        starts = _starts(pool, keys, indices)
        if starts is None:
            return [False] * len(keys)
        if pool.parts:
            return self._pages.load(keys, page_parts(host, indices, len(keys)), name)
        flat = [host.get_dummy_flat_data_page() for _ in keys]
        loaded = self._pages.load(keys, _memory(flat), name)
        for start, page, ok in zip(starts, flat, loaded):
            if ok:
                host.set_from_flat_data_page(start, page)
        return loaded

    def _save(self, name: str, keys: Sequence[str], indices: Any) -> list[bool]:
        host, pool = self._pool(name)
        starts = _starts(pool, keys, indices)
        if starts is None:
            return [False] * len(keys)
        if pool.parts:
            return self._pages.store(keys, page_parts(host, indices, len(keys)), name)
        flat = [host.get_data_page(start, flat=True).contiguous() for start in starts]
        return self._pages.store(keys, _memory(flat), name)

    def _pool(self, name: str) -> tuple[Any, Pool]:
        found = self._pools.get(name)
        if found is None:
            raise ConfigError(
                f"kvgraft-sglang: pool {name!r:.40} is none of {', '.join(self._pools)}; report it"
            )
        return found

    # -- the store

    def counts(self) -> dict[str, int]:
        """Pages by call and status since the start, such as `get.ok` and `get.corrupt`."""
        return self._pages.counts()

    def get_stats(self) -> StorageMetrics:
        """The pages moved since SGLang last asked, for `sglang:prefetch_pgs` and the like."""
        loads, stores = self._pages.take_loads(), self._pages.take_stores()
        return StorageMetrics(
            prefetch_pgs=[each.n_pages for each in loads],
            backup_pgs=[each.n_pages for each in stores],
            prefetch_bandwidth=_bandwidths(loads),
            backup_bandwidth=_bandwidths(stores),
        )

    def clear(self) -> None:
        self._pages.clear()

    def close(self) -> None:
        if self._store is None:
            self._backend.close()
        elif not self._store.close():
            logger.warning("kvgraft-sglang: the store did not close in time")


def _starts(pool: Pool, keys: Sequence[str], indices: Any) -> list[int] | None:
    """First token index of each page in its host pool; None if indices do not match the keys."""
    if not keys or indices is None or indices.numel() != len(keys) * pool.page_size:
        return None
    return [int(index) for index in indices[:: pool.page_size].tolist()]


def _bandwidths(transfers: Sequence[Transfer]) -> list[float]:
    """The GB/s of each transfer."""
    return [each.nbytes / max(each.duration_s, 1e-9) / 1e9 for each in transfers]


def _memory(tensors: Sequence[Any]) -> list[Page]:
    views = [tensor_memory(each) for each in tensors]
    return [view for view in views if view is not None]


def _server() -> Any | None:
    """The server's arguments; None without a server, as in tests."""
    from sglang.srt.runtime_context import get_server_args

    try:
        return get_server_args()
    except (AttributeError, ValueError, RuntimeError):
        return None
