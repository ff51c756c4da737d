"""Stores and loads of kvgraft's tier and of vLLM's `fs` through vLLM's manager, in MiB/s.

    python -m plugins.vllm.tests.speed

Each round stores and loads with one and then with the other, in an order that alternates. Between
two scheduling steps there are 2 ms, for both. Both write and read with direct I/O; only kvgraft's
payloads are checked. Nothing is made durable.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import numpy as np
from plugins.vllm.tests.engines import STEP_S, chunk_keys, host
from vllm.v1.kv_offload.base import LookupResult

TOTAL_NBYTES = 128 << 20
N_ROUNDS = 15
Speeds = tuple[float, float]


def measure(tier: dict[str, Any], chunk_nbytes: int) -> Speeds:
    """MiB/s of storing everything and of loading it after a restart."""
    n_chunks = TOTAL_NBYTES // chunk_nbytes
    keys = chunk_keys(0, n_chunks)
    payload = np.random.default_rng(0).bytes(chunk_nbytes)
    with host(tier, n_chunks + 8, chunk_nbytes) as first:
        begun = time.perf_counter()
        first.save(first.begin("a"), keys, payload)
        stored = time.perf_counter() - begun
    with host(tier, n_chunks + 8, chunk_nbytes) as second:
        request = second.begin("b")
        begun = time.perf_counter()
        while {second.manager.lookup(key, request) for key in keys} != {LookupResult.HIT}:
            second.step()
            time.sleep(STEP_S)
        loaded = time.perf_counter() - begun
        assert second.read(request, keys[-1]) == payload
    return TOTAL_NBYTES / stored / (1 << 20), TOTAL_NBYTES / loaded / (1 << 20)


def round_of(chunk_nbytes: int, number: int) -> dict[str, Speeds]:
    told = {}
    for kind in ("kvgraft", "fs")[:: 1 if number % 2 else -1]:
        with tempfile.TemporaryDirectory() as place:
            tiers: dict[str, dict[str, Any]] = {
                "kvgraft": {"path": place, "capacity": "1GB", "weights": "x"},
                "fs": {"type": "fs", "root_dir": place},
            }
            told[kind] = measure(tiers[kind], chunk_nbytes)
    return told


if __name__ == "__main__":
    print("| chunk | | kvgraft | fs | kvgraft/fs of a round |")
    print("|---|---|---|---|---|")
    for chunk_nbytes in (128 << 10, 1 << 20):
        rounds = [round_of(chunk_nbytes, number) for number in range(N_ROUNDS)]
        for place, what in enumerate(("store", "load")):
            mine = [each["kvgraft"][place] for each in rounds]
            its = [each["fs"][place] for each in rounds]
            low, ratio, high = statistics.quantiles([a / b for a, b in zip(mine, its)], n=4)
            print(
                f"| {chunk_nbytes >> 10} KiB | {what} | {statistics.median(mine):.0f} "
                f"| {statistics.median(its):.0f} | {ratio:.2f} [{low:.2f} {high:.2f}] |",
                flush=True,
            )
