"""vLLM's own `TieringOffloadingManager` over a kvgraft store: chunks outlive a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip(
    "vllm.v1.kv_offload.tiering.spec", reason="vLLM is not installed: make test-engines"
)

from plugins.vllm.tests.engines import CHUNK_NBYTES, chunk_keys, host
from vllm.v1.kv_offload.base import LookupResult


def test_chunks_are_found_and_loaded_after_a_restart(tmp_path: Path) -> None:
    tier = {"backend": "file", "path": str(tmp_path), "capacity": "4MB", "weights": "one"}
    payload = bytes(range(256)) * (CHUNK_NBYTES // 256)
    keys = chunk_keys(0, 3)
    with host(tier) as first:
        first.save(first.begin("a"), keys, payload)
    with host(tier) as second:
        request = second.begin("b")
        assert [second.find(request, key) for key in keys] == [LookupResult.HIT] * 3
        assert [second.read(request, key) for key in keys] == [payload] * 3
        assert second.find(request, chunk_keys(3, 4)[0]) is LookupResult.MISS
