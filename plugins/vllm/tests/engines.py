"""vLLM's own manager over a tier, without an engine: chunks are bytes that the test writes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from vllm.v1.kv_offload import base as offload
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = ["CHUNK_NBYTES", "Host", "chunk_keys", "host"]

CHUNK_NBYTES = 8192
STEP_S = 0.002
"""Seconds between two scheduling steps, in which a model would run."""

LONGEST_S = 20.0
"""Longest wait for an answer of a tier."""

NO_REQUESTS = offload.ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


def chunk_keys(first: int, last: int, group: int = 0) -> list[offload.OffloadKey]:
    """Keys of chunks by their numbers."""
    return [
        offload.make_offload_key(number.to_bytes(32, "big"), group) for number in range(first, last)
    ]


def offloading_config(
    tier: dict[str, Any], n_chunks: int, chunk_nbytes: int = CHUNK_NBYTES
) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("layers.0",), group_id=0),),
        worker_kv_bytes_per_block=chunk_nbytes,
        enable_kv_cache_events=True,
        extra_config={
            "cpu_bytes_to_use": n_chunks * chunk_nbytes,
            "secondary_tiers": [
                {"type": "KvgraftTier", "module_path": "kvgraft_vllm.tier", **tier}
            ],
        },
        engine_id=uuid.uuid4().hex,
        model=OffloadingModelConfig(name="tiny", dtype="float16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )


class Host:
    """vLLM's CPU tier and manager over one store.

    Attributes:
        manager: vLLM's `TieringOffloadingManager`.
        tier: the `KvgraftTier` below it.
    """

    def __init__(self, spec: TieringOffloadingSpec) -> None:
        self.manager: Any = spec.get_manager()
        self.tier: Any = self.manager.secondary_tiers[0]
        self._rows = np.asarray(self.manager.primary_tier.get_kv_memoryview())

    def begin(self, name: str) -> offload.ReqContext:
        """A new request."""
        request = offload.ReqContext(req_id=name)
        self.manager.on_new_request(request)
        return request

    def end(self, request: offload.ReqContext) -> None:
        self.manager.on_request_finished(request)
        self.step()

    def step(self) -> None:
        """The end of a scheduling step."""
        self.manager.on_schedule_end(NO_REQUESTS)

    def settle(self) -> None:
        """Steps until nothing is on its way."""
        while self.manager.has_pending_work():
            time.sleep(STEP_S)
            self.step()

    def save(self, request: offload.ReqContext, keys: Sequence[bytes], payload: bytes) -> None:
        """As if the GPU had computed chunks, all of one payload, and wait until they are stored."""
        output = self.manager.prepare_store(keys, request)
        assert list(output.keys_to_store) == list(keys)
        for chunk in output.store_spec.chunk_ids:
            self._rows[int(chunk)] = np.frombuffer(payload, self._rows.dtype)
        self.manager.complete_store(keys, request)
        self.settle()

    def find(self, request: offload.ReqContext, key: bytes) -> Any:
        """Look a chunk up until vLLM knows; HIT once it is in CPU memory."""
        end = time.monotonic() + LONGEST_S
        while time.monotonic() < end:
            result = self.manager.lookup(key, request)
            if result in (offload.LookupResult.HIT, offload.LookupResult.MISS):
                return result
            self.step()
            time.sleep(STEP_S)
        raise AssertionError(f"no answer in {LONGEST_S} s")

    def read(self, request: offload.ReqContext, key: bytes) -> bytes:
        """The bytes of a chunk in CPU memory."""
        (chunk,) = self.manager.prepare_load([key], request).chunk_ids
        payload = bytes(self._rows[int(chunk)])
        self.manager.complete_load([key], request)
        return payload

    def close(self) -> None:
        del self._rows
        self.manager.shutdown()


@contextmanager
def host(
    tier: dict[str, Any], n_chunks: int = 16, chunk_nbytes: int = CHUNK_NBYTES
) -> Iterator[Host]:
    """A manager of vLLM; what it stored stays in the store."""
    made = Host(TieringOffloadingSpec(offloading_config(tier, n_chunks, chunk_nbytes)))
    try:
        yield made
    finally:
        made.close()
