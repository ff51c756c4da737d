"""vLLM's tiering on a CPU: a spec whose worker copies from host to host.

vLLM copies to and from a GPU only. Everything above this worker, and the tier below it, is what
runs in production.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = ["HostSpec"]


class HostWorker(OffloadingWorker):
    """Copies at once; a chunk holds its group's pages one behind the other."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._rows = np.asarray(region.create_kv_memoryview()).view(np.uint8)
        self._caches = caches
        self._finished: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec
    ) -> bool:
        for place, page in self._pages(src_spec, dst_spec):
            place[:] = page
        return self._ended(job_id)

    def submit_load(
        self,
        job_id: int,
        src_spec: CPULoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,  # noqa: FBT001, FBT002 - vLLM's
    ) -> bool:
        for place, page in self._pages(dst_spec, src_spec):
            page[:] = place
        return self._ended(job_id)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        del self._rows
        self._region.cleanup()

    def _ended(self, job_id: int) -> bool:
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def _pages(self, blocks: GPULoadStoreSpec, chunks: CPULoadStoreSpec) -> Any:
        """Pairs of a chunk's part in the pool and a block's page in a cache tensor."""
        assert len(blocks.block_ids) == len(chunks.chunk_ids)
        pairs = iter(zip(blocks.block_ids, chunks.chunk_ids))
        for group, n_blocks in enumerate(blocks.group_sizes):
            for _ in range(n_blocks):
                block, chunk = next(pairs)
                start = 0
                for ref in self._caches.group_data_refs[group]:
                    tensor = self._caches.tensors[ref.tensor_idx].tensor
                    page = tensor[int(block)].view(torch.uint8).reshape(-1).numpy()
                    page = page[: ref.page_size_bytes]
                    yield self._rows[int(chunk)][start : start + len(page)], page
                    start += len(page)


class HostSpec(TieringOffloadingSpec):
    """`TieringOffloadingSpec` with that worker."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not self._worker:
            assert self.blocks_per_chunk == 1
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=None,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, region)
        return self._worker
