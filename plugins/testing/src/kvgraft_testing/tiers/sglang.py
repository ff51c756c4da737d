"""Backends of SGLang: a `HiCacheStorage` below SGLang's own `HiCacheController` and host pool.

The controller's threads ask the backend, in the way that they do in a server. No GPU is needed:
nothing moves above the host pool.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty
from typing import Any, ClassVar

import sglang
import torch
from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.runtime_context import get_parallel

from kvgraft_testing.tiers.driver import (
    LONGEST_S,
    Key,
    Kind,
    OpenTier,
    Setting,
    Target,
    fail,
)

__all__ = ["SglangKind", "host_pool"]

HEADS, ITEM_NBYTES = 4, 2
MARK_EVERY = 4096
"""Bytes between two that tell whether memory is written afterwards."""

AFTERWARDS_S = 0.5
"""Seconds for which memory is watched when it must not change any more."""


class _DevicePool:
    """A GPU's pool as far as the controller asks where nothing moves to it."""

    device = "cpu"

    def __init__(self, n_layers: int) -> None:
        self.layer_num = n_layers

    def register_layer_transfer_counter(self, counter: object) -> None:
        pass

    def get_kvcache(self) -> _DevicePool:
        return self


def host_pool(setting: Setting, n_pages: int) -> Any:
    """SGLang's host pool with pages of the setting's size."""
    tokens, n_layers = n_pages * setting.page_tokens, len(setting.layers)
    width = setting.page_nbytes // (2 * n_layers * setting.page_tokens * HEADS * ITEM_NBYTES)
    dtype = getattr(torch, setting.dtype)

    def layers() -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros(1, HEADS, width, dtype=dtype) for _ in range(n_layers))

    def places(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.tensor([each.data_ptr() for each in tensors], dtype=torch.uint64)

    k, v = layers(), layers()
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=k, v=v, k_data_ptrs=places(k), v_data_ptrs=places(v), layout=KVBufferLayout.NHD
        ),
        page_size=setting.page_tokens,
        head_num=HEADS,
        head_dim=width,
        v_head_dim=width,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # else a small machine has no room for 1 MB
    return MHATokenToKVPoolHost(
        info,
        2.0,
        0,
        setting.page_tokens,
        setting.layout,
        pin_memory=False,
        device_capacity_tokens=tokens // 2,
        start_layer=0,
        end_layer=n_layers,
    )


class SglangTier(OpenTier):
    """SGLang's controller over the backend under test."""

    def __init__(
        self, name: str, backend: str, extra: dict[str, Any], setting: Setting, n_pages: int
    ) -> None:
        get_parallel().override_permanently(
            attn_dcp_size=1,
            attn_dcp_rank=0,
            attn_tp_rank=setting.rank,
            attn_tp_size=setting.n_ranks,
            attn_dp_rank=0,
            attn_dp_size=1,
            tp_rank=setting.rank,
            tp_size=setting.n_ranks,
            pp_rank=setting.stage,
            pp_size=setting.n_stages,
        )
        self._name = name
        self._page_tokens = setting.page_tokens
        self._pool: Any = host_pool(setting, n_pages)
        self._controller: Any = HiCacheController(
            _DevicePool(len(setting.layers)),
            self._pool,
            setting.page_tokens,
            None,
            threading.Event(),
            io_backend="direct",
            storage_backend=backend,
            prefetch_threshold=setting.page_tokens,
            model_name=setting.model,
            storage_backend_extra_config=extra,
        )
        self._n_running = 0

    def store(self, *batches: Mapping[Key, bytes]) -> list[bool]:
        waiting = {self._submit(batch): number for number, batch in enumerate(batches)}
        told = [False] * len(batches)
        while waiting:
            operation = self._next(self._controller.ack_backup_queue, "a store")
            number = waiting.pop(operation.id, None)
            if number is None:
                continue  # of `begin`
            told[number] = operation.completed_tokens == len(operation.host_indices)
            self._scribble(operation.host_indices)
            self._pool.free(operation.host_indices)
        return told

    def load(self, *batches: Sequence[Key]) -> dict[Key, bytes]:
        before = self._pages()
        found, used = self._load(batches)
        for start, told in self._pages().items():
            if start not in used and before[start] != told:
                fail("O1", self._name, "a load wrote beside the memory of its own pages")
        return found

    def load_beside(self, *batches: Sequence[Key]) -> dict[Key, bytes]:
        return self._load(batches)[0]

    def begin(self, stored: Mapping[Key, bytes], loaded: Sequence[Key]) -> None:
        for number, each in enumerate(loaded):
            operation = self._ask(f"left-{number}", [each])
            if operation is not None:
                self._controller.prefetch_buffer.put(operation)
        if stored:
            self._submit(stored)
        self._n_running += len(loaded) + len(stored)

    def close(self) -> None:
        self._controller.detach_storage_backend()
        if self._n_running:
            marks = self._pool.kv_buffer.view(torch.uint8).view(-1)[::MARK_EVERY]
            marks.fill_(0xEE)  # a few bytes: at once, before a late load has ended
            time.sleep(AFTERWARDS_S)
            if not bool((marks == 0xEE).all()):
                fail("O11", self._name, "memory was written after a shutdown")

    # -- inside

    def _load(self, batches: Sequence[Sequence[Key]]) -> tuple[dict[Key, bytes], set[int]]:
        """Pages that were loaded, and the tokens of the pool that a load may have written."""
        found: dict[Key, bytes] = {}
        waiting: dict[str, Any] = {}
        for number, batch in enumerate(batches):
            operation = self._ask(f"request-{number}", batch)
            if operation is not None:
                waiting[operation.request_id] = operation, list(operation.keys_asked)
                self._controller.prefetch_buffer.put(operation)
        used: set[int] = set()
        while waiting:
            ack = self._next(self._controller.ack_prefetch_queue, "a load")
            if ack.rid not in waiting:
                continue
            operation, names = waiting[ack.rid]
            used.update(operation.host_indices.tolist())
            if ack.completed_tokens is not None:
                n_pages = ack.completed_tokens // self._page_tokens
                for number, each in enumerate(names[:n_pages]):
                    found[each] = self._page(operation.host_indices, number)
            if ack.completed_req:
                del waiting[ack.rid]
                self._pool.free(operation.host_indices)
        return found, used

    def _ask(self, name: str, batch: Sequence[Key]) -> Any | None:
        """A prefetch of the pages that the backend says are there, ready for its thread."""
        there = []
        for each in batch:
            # SGLang takes an exception for a miss
            with contextlib.suppress(Exception):
                if self._controller.storage_backend.batch_exists([each.digest.hex()]) == 1:
                    there.append(each)
        if not there:
            return None
        operation = PrefetchOperation(name, [0] * len(there) * self._page_tokens)
        operation.hash_value = [each.digest.hex() for each in there]
        operation.host_indices = self._pool.alloc(len(there) * self._page_tokens)
        operation.keys_asked = there
        self._scribble(operation.host_indices)
        return operation

    def _submit(self, batch: Mapping[Key, bytes]) -> int:
        indices = self._pool.alloc(len(batch) * self._page_tokens)
        for number, content in enumerate(batch.values()):
            blank = self._pool.get_dummy_flat_data_page()
            flat = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(blank.dtype)
            start = int(indices[number * self._page_tokens])
            self._pool.set_from_flat_data_page(start, flat.view(blank.shape))
        hashes = [each.digest.hex() for each in batch]
        operation: int = self._controller.write_storage(indices, [0] * len(indices), hashes)
        return operation

    def _next(self, queue: Any, told: str) -> Any:
        try:
            return queue.get(timeout=LONGEST_S)
        except Empty:
            fail("O10", self._name, f"{told} did not end within {LONGEST_S:.0f} s")

    def _page(self, indices: torch.Tensor, number: int) -> bytes:
        page = self._pool.get_data_page(int(indices[number * self._page_tokens]), flat=True)
        return bytes(page.contiguous().view(torch.uint8).numpy())

    def _scribble(self, indices: torch.Tensor) -> None:
        """Write over pages, as a next user of the memory does."""
        for number in range(0, len(indices), self._page_tokens):
            blank = self._pool.get_dummy_flat_data_page()
            blank.view(torch.uint8).fill_(0xEE)
            self._pool.set_from_flat_data_page(int(indices[number]), blank)

    def _pages(self) -> dict[int, int]:
        """A number for the bytes of each page of the pool, by its first token."""
        return {
            start: hash(self._page(torch.arange(start, start + self._page_tokens), 0))
            for start in range(0, self._pool.size, self._page_tokens)
        }


class SglangKind(Kind):
    """`HiCacheStorage` of SGLang."""

    name: ClassVar[str] = "SGLang's HiCacheStorage"
    loads_in_parallel: ClassVar[bool] = False
    settings: ClassVar[Mapping[str, tuple[Setting, Setting]]] = {
        "dtype": (Setting(), Setting(dtype="bfloat16")),
        "layout": (Setting(), Setting(layout="layer_first")),
        "model": (Setting(), Setting(model="other")),
        "rank": (Setting(n_ranks=2), Setting(rank=1, n_ranks=2)),
        "n_ranks": (Setting(rank=1, n_ranks=2), Setting(rank=1, n_ranks=4)),  # equal heads
        "stage": (Setting(n_stages=2), Setting(stage=1, n_stages=2)),
    }

    def open(self, target: Target, directory: Path, setting: Setting, n_pages: int) -> SglangTier:
        assert target.loaded is not None
        backend, extra = _backend(target.loaded)
        extra.update(target.filled(directory))
        return SglangTier(target.name, backend, extra, setting, n_pages)

    def version(self) -> str:
        return f"SGLang {sglang.__version__}"


def _backend(loaded: type) -> tuple[str, dict[str, Any]]:
    """The name by which SGLang's factory makes it, and what that needs to know."""
    for name, entry in StorageBackendFactory._registry.items():
        if (entry["module_path"], entry["class_name"]) == (loaded.__module__, loaded.__name__):
            return name, {}
    return "dynamic", {
        "backend_name": loaded.__name__.lower(),
        "module_path": loaded.__module__,
        "class_name": loaded.__name__,
    }
