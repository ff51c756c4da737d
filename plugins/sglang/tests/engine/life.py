"""One life of SGLang's HiCache on a CPU: a controller with its threads over a kvgraft store.

    echo '{"extra": {...}, "steps": [["save", 0, 8], ...],
           "layout": "page_first", "pool": "mha", "tp": [0, 1], "storage": "dynamic"}' |
        python -m plugins.sglang.tests.engine.life

Each line is a life, a process of its own, forked when SGLang has been imported. It prints a JSON
list, the result of each step, and when it has ended its exit status:

    ["save", FIRST, N]    tokens of N pages completed in the store
    ["fetch", FIRST, N]   pages found, pages fetched, and how many of those hold other bytes
    ["save_states", FIRST, [N, ...]]  whether states behind that many pages were stored
    ["restorable", FIRST, N]    lengths that KV cache and states restore
    ["fetch_state", FIRST, N]         lengths that KV cache and states restore, and whether the
                                      state of the longest one came, with the bytes that it had
    ["save_blocks", FIRST, N]   how many pages of a DeepSeek V4 pool were stored
    ["fetch_blocks", FIRST, N]  lengths that both restore, pages fetched, and how many are wrong
    ["ask_groups", FIRST, N]    the same lengths, when a pool asks by groups of keys
    ["hang", VERB]        from now on no call of this verb of the store comes back
    ["remove", PATH]      the store's directory is removed
    ["kill", PID]         its server is killed
    ["counts"]            the backend's counts
    ["metrics"]           what SGLang's metrics are told
    ["drift"]             how SGLang's storage interface differs from the one relied on
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import sys
import threading
import time
from queue import Empty
from typing import Any

from kvgraft_testing.tiers import stand_ins

stand_ins.install()

import torch  # noqa: E402
from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache import hicache_storage  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import (  # noqa: E402
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.memory_pool_host import (  # noqa: E402
    DeepSeekV4PagedHostPool,
    LogicalHostPool,
)
from sglang.srt.mem_cache.pool_host import base  # noqa: E402
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.observability.metrics_collector import StorageMetrics  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

from kvgraft_sglang.interface import INTERFACE  # noqa: E402

LAYERS, HEADS, WIDTH, PAGE, TOKENS = 4, 2, 16, 16, 1024
DTYPE = torch.bfloat16


class DevicePool:
    """A GPU's pool as far as the controller asks where nothing moves to it."""

    device = "cpu"
    layer_num = LAYERS

    def register_layer_transfer_counter(self, counter: object) -> None:
        pass

    def get_kvcache(self) -> DevicePool:
        return self


class MLADevicePool(MLATokenToKVPool):  # type: ignore[misc]
    """As `DevicePool`, of a model whose ranks hold equal data."""

    device = "cpu"
    layer_num = LAYERS
    register_layer_transfer_counter = DevicePool.register_layer_transfer_counter
    get_kvcache = DevicePool.get_kvcache

    def __init__(self) -> None:
        pass


def mla_pool(layout: str) -> MLATokenToKVPoolHost:
    rows = tuple(torch.zeros(TOKENS, 1, 2 * WIDTH, dtype=DTYPE) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=rows,
        data_ptrs=torch.tensor([each.data_ptr() for each in rows], dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=WIDTH,
        qk_rope_head_dim=WIDTH,
        kv_cache_dim=2 * WIDTH,
        dtype=DTYPE,
        device=torch.device("cpu"),
    )
    return MLATokenToKVPoolHost(
        info,
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )


def blocks_pool(layout: str) -> DeepSeekV4PagedHostPool:
    return DeepSeekV4PagedHostPool(
        pool_name=str(PoolName.DEEPSEEK_V4_C4),
        device_buffers=[torch.zeros(64, 96, dtype=torch.uint8) for _ in range(LAYERS)],
        item_bytes=96,
        num_host_pages=64,
        slot_page_size=PAGE,
        layout=layout,
        pin_memory=False,
    )


def host_pool(layout: str) -> MHATokenToKVPoolHost:
    def layers() -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros(TOKENS, HEADS, WIDTH, dtype=DTYPE) for _ in range(LAYERS))

    def places(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.tensor([each.data_ptr() for each in tensors], dtype=torch.uint64)

    k, v = layers(), layers()
    buffers = KVBuffers(
        k=k, v=v, k_data_ptrs=places(k), v_data_ptrs=places(v), layout=KVBufferLayout.NHD
    )
    info = MHABufferInfo(
        buffers=buffers,
        page_size=PAGE,
        head_num=HEADS,
        head_dim=WIDTH,
        v_head_dim=WIDTH,
        dtype=DTYPE,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(
        info,
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS,
    )


def logical_pool(layout: str) -> LogicalHostPool:
    return LogicalHostPool(2 * TOKENS, PAGE, layout)


HOST_POOLS = {"mha": host_pool, "mla": mla_pool, "deepseek_v4": logical_pool}
"""Of the KV cache, by the kind of model."""


def states_pool() -> MambaPoolHost:
    """States of a model with linear attention: float32 beside bfloat16."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, 8, HEADS, WIDTH, dtype=torch.float32),
        conv=(torch.zeros(LAYERS, 8, 3, WIDTH, dtype=DTYPE),),
    )
    return MambaPoolHost(info, 2.0, 0, device_capacity=8, pin_memory=False, layout="page_first")


def state_content(key: str, like: torch.Tensor) -> torch.Tensor:
    made = torch.Generator().manual_seed(int(key[:12], 16))
    return torch.randint(0, 256, like.shape, generator=made, dtype=torch.uint8)


def page_content(key: str, like: torch.Tensor) -> torch.Tensor:
    """The bytes of a page: random, by its hash."""
    made = torch.Generator().manual_seed(int(key[:12], 16))
    return torch.randn(like.numel(), generator=made).to(DTYPE)


class Life:
    def __init__(
        self,
        extra: dict[str, Any],
        layout: str = "page_first",
        pool: str = "mha",
        tp: tuple[int, int] = (0, 1),
        storage: str = "dynamic",
    ) -> None:
        get_parallel().override_permanently(
            attn_dcp_size=1,
            attn_dcp_rank=0,
            attn_tp_rank=0,
            attn_tp_size=1,
            attn_dp_rank=0,
            attn_dp_size=1,
            tp_rank=tp[0],
            tp_size=tp[1],
            pp_rank=0,
            pp_size=1,
        )
        base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # else a small machine has no room for 1 MB
        self.pool: Any = HOST_POOLS[pool](layout)
        self.states = states_pool()
        self.limit_s = 60.0
        self.controller = HiCacheController(
            MLADevicePool() if pool == "mla" else DevicePool(),
            self.pool,
            PAGE,
            None,
            threading.Event(),
            io_backend="direct",
            storage_backend=storage,
            prefetch_threshold=PAGE,
            model_name="tiny",
            storage_backend_extra_config={
                "backend_name": "kvgraft",
                "module_path": "kvgraft_sglang.backend",
                "class_name": "KvgraftStorage",
                **extra,
            },
        )
        self.store = self.controller.storage_backend
        self.store.register_mem_host_pool_v2(self.states, PoolName.MAMBA)
        if pool == "deepseek_v4":
            self.blocks = blocks_pool(layout)
            self.store.register_mem_host_pool_v2(self.blocks, PoolName.DEEPSEEK_V4_C4)

    def save(self, first: int, n: int) -> int:
        tokens, keys = self._sequence(first, n)
        indices = self.pool.alloc(len(tokens))
        for number, key in enumerate(keys):
            blank = self.pool.get_dummy_flat_data_page()
            self.pool.set_from_flat_data_page(int(indices[number * PAGE]), page_content(key, blank))
        self.controller.write_storage(indices, tokens, keys)
        done = self.controller.ack_backup_queue.get(timeout=self.limit_s)
        self.pool.free(indices)
        return int(done.completed_tokens)

    def fetch(self, first: int, n: int) -> tuple[int, int, int]:
        tokens, keys = self._sequence(first, n)
        asked = self.controller.prefetch("request", tokens)
        found = self.controller.prefetch_hit_queue.get(timeout=self.limit_s)
        assert found is asked
        n_found = len(found.hash_value)
        if not n_found:
            return 0, 0, 0
        found.host_indices = self.pool.alloc(n_found * PAGE)
        self.controller.prefetch_buffer.put(found)
        n_fetched = self._fetched() // PAGE
        n_wrong = sum(
            not torch.equal(page, page_content(key, page))
            for key, page in zip(
                keys,
                (
                    self.pool.get_data_page(int(found.host_indices[number * PAGE]))
                    for number in range(n_fetched)
                ),
            )
        )
        self.pool.free(found.host_indices)
        return n_found, n_fetched, n_wrong

    def save_states(self, first: int, lengths: list[int]) -> list[bool]:
        _, keys = self._sequence(first, max(lengths))
        ends = [keys[length - 1] for length in lengths]
        indices = self.states.alloc(len(ends))
        for index, key in zip(indices.tolist(), ends):
            blank = self.states.get_dummy_flat_data_page()
            self.states.set_from_flat_data_page(index, state_content(key, blank))
        moved = self.store.batch_set_v2([PoolTransfer(PoolName.MAMBA, indices, keys=ends)])
        self.states.free(indices)
        return list(moved[PoolName.MAMBA])

    def restorable(self, first: int, n: int) -> list[int]:
        _, keys = self._sequence(first, n)
        trailing = PoolHitPolicy.TRAILING_PAGES
        asked = PoolTransfer(PoolName.MAMBA, keys=keys[-1:], hit_policy=trailing)
        lengths: list[int] = self.store.batch_exists_v2(keys, [asked]).restorable_prefix_pages
        return lengths

    def fetch_state(self, first: int, n: int) -> tuple[list[int], bool, bool]:
        lengths = self.restorable(first, n)
        _, keys = self._sequence(first, n)
        end = keys[lengths[-1] - 1]
        index = self.states.alloc(1)
        wanted = PoolTransfer(PoolName.MAMBA, index, keys=[end])
        (came,) = self.store.batch_get_v2([wanted])[PoolName.MAMBA]
        state = self.states.get_data_page(int(index[0]))
        return lengths, came, torch.equal(state, state_content(end, state))

    def save_blocks(self, first: int, n: int) -> int:
        _, keys = self._sequence(first, n)
        indices = torch.arange(n * PAGE)
        for number, key in enumerate(keys):
            blank = self.blocks.get_dummy_flat_data_page()
            self.blocks.set_from_flat_data_page(number * PAGE, state_content(key, blank))
        transfer = PoolTransfer(PoolName.DEEPSEEK_V4_C4, indices, keys=keys)
        return sum(self.store.batch_set_v2([transfer])[PoolName.DEEPSEEK_V4_C4])

    def fetch_blocks(self, first: int, n: int) -> tuple[list[int], int, int]:
        lengths = self._lengths(first, n, PoolHitPolicy.ALL_PAGES)
        _, keys = self._sequence(first, n)
        transfer = PoolTransfer(PoolName.DEEPSEEK_V4_C4, torch.arange(n * PAGE), keys=keys)
        came = self.store.batch_get_v2([transfer])[PoolName.DEEPSEEK_V4_C4]
        pages = [self.blocks.get_data_page(number * PAGE) for number in range(n)]
        n_wrong = sum(
            ok and not torch.equal(page, state_content(key, page))
            for ok, key, page in zip(came, keys, pages)
        )
        return lengths, sum(came), n_wrong

    def ask_groups(self, first: int, n: int) -> list[int]:
        return self._lengths(first, n, PoolHitPolicy.BLOCK_GROUPS)

    def _lengths(self, first: int, n: int, policy: PoolHitPolicy) -> list[int]:
        _, keys = self._sequence(first, n)
        asked = PoolTransfer(PoolName.DEEPSEEK_V4_C4, keys=keys, hit_policy=policy)
        lengths: list[int] = self.store.batch_exists_v2(keys, [asked]).restorable_prefix_pages
        return lengths

    def _fetched(self) -> int:
        n_tokens, end = 0, time.monotonic() + self.limit_s
        while time.monotonic() < end:
            ack = self.controller.ack_prefetch_queue.get(timeout=self.limit_s)
            if ack.completed_tokens is not None:
                n_tokens = int(ack.completed_tokens)
            if ack.completed_req:
                return n_tokens
        raise Empty

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = self.controller.storage_backend.counts()
        return counts

    def drift(self) -> list[str]:
        return INTERFACE.differences({**vars(hicache_storage), "StorageMetrics": StorageMetrics})

    def metrics(self) -> dict[str, Any]:
        told: dict[str, Any] = vars(self.controller.storage_backend.get_stats())
        return told

    def hang(self, verb: str) -> None:
        def never(*given: object) -> None:
            threading.Event().wait()

        store = self.controller.storage_backend._backend
        setattr(store, verb, never)

    def remove(self, path: str) -> None:
        shutil.rmtree(path)

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def _sequence(self, first: int, n: int) -> tuple[list[int], list[str]]:
        tokens = list(range(1000 * first, 1000 * first + n * PAGE))
        return tokens, get_storage_hash_str(tokens, None, page_size=PAGE)


def live(given: dict[str, Any]) -> None:
    steps = given.pop("steps")
    life = Life(**given)
    results = [getattr(life, name)(*arguments) for name, *arguments in steps]
    life.controller.detach_storage_backend()
    sys.stdout.write(json.dumps(results) + "\n")
    sys.stdout.flush()
    atexit.register(os._exit, 0)  # its threads have ended then; freeing modules would take seconds


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if not child:
            live(json.loads(line))
            return
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
