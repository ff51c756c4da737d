"""nano-vllm's and mini-sglang's own schedulers over `examples/nano_vllm.py` and `mini_sglang.py`.

They run where a clone of the engine is in PYTHONPATH: nano-vllm at bb823b3, mini-sglang's `python`.
"""

from __future__ import annotations

import importlib.util
import random
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
BLOCK, N_BLOCKS = 16, 48
SEEDS = range(8)


def found(name: str) -> Path | None:
    """Where an engine's package is; it is not imported."""
    spec = importlib.util.find_spec(name)
    places = spec.submodule_search_locations if spec is not None else None
    return Path(places[0]) if places else None


def prompts(seed: int) -> list[list[int]]:
    """Prompts with beginnings in common."""
    rng = random.Random(seed)
    bases = [[rng.randrange(9) for _ in range(rng.randrange(20, 200))] for _ in range(5)]
    return [
        rng.choice(bases)[: rng.randrange(1, 200)] + [rng.randrange(9) for _ in range(9)]
        for _ in range(30)
    ]


class Memory:
    """A model's memory: each token's slot holds a hash of the tokens up to it."""

    def __init__(self, n_slots: int) -> None:
        self.slots = np.zeros(n_slots, np.int64)

    def run(self, slots: Any, tokens: Sequence[int], start: int) -> int:
        """Compute tokens from `start` on, which read all before them; the next token."""
        stamps, stamp = [], 7
        for token in tokens:
            stamp = (stamp * 31 + token + 1) % (1 << 40)
            stamps.append(stamp)
        self.slots[slots[start:]] = stamps[start:]
        wrong = np.flatnonzero(self.slots[slots] != stamps)
        assert not len(wrong), f"token {wrong[0]} of {len(stamps)} reads another's data"
        return stamp % 9


@pytest.fixture
def nano(monkeypatch: pytest.MonkeyPatch) -> Any:
    """nano-vllm's modules for scheduling, without those that need a GPU."""
    place = found("nanovllm")
    if place is None:
        pytest.skip("no clone of nano-vllm in PYTHONPATH")
    package = types.ModuleType("nanovllm")
    package.__path__ = [str(place)]
    monkeypatch.setitem(sys.modules, "nanovllm", package)
    scheduler = importlib.import_module("nanovllm.engine.scheduler")
    sequence = importlib.import_module("nanovllm.engine.sequence")
    monkeypatch.setattr(sequence.Sequence, "block_size", BLOCK)
    params = importlib.import_module("nanovllm.sampling_params").SamplingParams
    return types.SimpleNamespace(scheduler=scheduler, Sequence=sequence.Sequence, params=params)


def served_by_nano(nano: Any, seed: int) -> tuple[list[list[int]], int, int, Any]:
    """The answers, tokens that were cached, preemptions, and the block manager."""
    config = types.SimpleNamespace(
        max_num_seqs=8,
        max_num_batched_tokens=256,
        eos=-1,
        kvcache_block_size=BLOCK,
        num_kvcache_blocks=N_BLOCKS,
    )
    scheduler, memory = nano.scheduler.Scheduler(config), Memory(N_BLOCKS * BLOCK)
    rng = random.Random(seed)
    seqs = [
        nano.Sequence(each, nano.params(max_tokens=rng.choice((1, 20, 150)), ignore_eos=True))
        for each in prompts(seed)
    ]
    for seq in seqs:
        scheduler.add(seq)
    cached = preempted = 0
    while not scheduler.is_finished():
        waiting = len(scheduler.waiting)
        batch, is_prefill = scheduler.schedule()
        preempted += max(0, len(scheduler.waiting) - waiting)
        tokens = []
        for seq in batch:
            end = seq.num_cached_tokens + seq.num_scheduled_tokens
            table = np.repeat(np.array(seq.block_table) * BLOCK, BLOCK)
            slots = (table + np.tile(np.arange(BLOCK), len(seq.block_table)))[:end]
            tokens.append(memory.run(slots, seq.token_ids[:end], seq.num_cached_tokens))
            cached -= seq.num_scheduled_tokens
        scheduler.postprocess(batch, tokens, is_prefill)
    cached += sum(len(seq) - 1 for seq in seqs)
    return [seq.completion_token_ids for seq in seqs], cached, preempted, scheduler.block_manager


def test_nano_vllm_answers_the_same_and_reads_its_own_blocks(
    nano: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [served_by_nano(nano, seed) for seed in SEEDS]
    ours = runpy.run_path(str(ROOT / "examples/nano_vllm.py"))["BlockManager"]
    monkeypatch.setattr(nano.scheduler, "BlockManager", ours)
    for seed in SEEDS:
        answers, cached, _, manager = served_by_nano(nano, seed)
        assert answers == own[seed][0]
        assert cached > 0
        manager.cache.check_integrity()
        assert not manager.cache.requests
    assert sum(served_by_nano(nano, seed)[2] for seed in SEEDS) <= sum(each[2] for each in own)


def test_mini_sglang_reads_its_own_pages_and_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    place = found("minisgl")
    if place is None:
        pytest.skip("no clone of mini-sglang in PYTHONPATH")
    empty = torch.empty  # its page tables are written by way of pinned memory, which a CPU has not

    def unpinned(*size: int, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        del pin_memory
        return empty(*size, **more)

    monkeypatch.setattr(torch, "empty", unpinned)
    manager_of = importlib.import_module("minisgl.scheduler.cache").CacheManager
    put_in = runpy.run_path(str(ROOT / "examples/mini_sglang.py"))["put_in"]
    for seed in SEEDS:
        table = torch.zeros(8, 1024, dtype=torch.int32)
        manager = manager_of(N_BLOCKS, BLOCK, table, "naive")
        put_in(manager)
        assert served_by_mini(manager, table, seed) > 0
        manager.check_integrity()
        assert manager.prefix_cache.size_info.protected_size == 0


def served_by_mini(manager: Any, table: torch.Tensor, seed: int) -> int:
    """Requests one after the other and side by side; the tokens that they found."""
    rng, memory, found_tokens = random.Random(seed), Memory(N_BLOCKS * BLOCK), 0
    running: dict[int, Any] = {}
    for number, prompt in enumerate(prompts(seed)):
        ids = torch.tensor(prompt, dtype=torch.int32)
        row = number % 8
        for ended in [each for each in running if each == row or rng.random() < 0.3]:
            manager.cache_req(running.pop(ended), finished=True)
        handle = manager.match_req(types.SimpleNamespace(input_len=len(ids), input_ids=ids))[0]
        manager.lock(handle)
        if manager.available_size < len(prompt) + BLOCK - handle.cached_len:
            manager.unlock(handle)
            continue
        if handle.cached_len:
            table[row, : handle.cached_len] = handle.get_matched_indices()
        found_tokens += handle.cached_len
        req = types.SimpleNamespace(
            input_ids=ids,
            table_idx=row,
            cached_len=handle.cached_len,
            device_len=len(ids),
            cache_handle=handle,
        )
        with manager.lazy_free_region():
            manager.allocate_paged([req])
            memory.run(table[row, : len(ids)].numpy(), prompt, handle.cached_len)
            req.cached_len = len(ids)
            manager.cache_req(req, finished=False)
        memory.run(table[row, : len(ids)].numpy(), prompt, len(ids))
        running[row] = req
    with manager.lazy_free_region():
        for req in running.values():
            manager.cache_req(req, finished=True)
    return found_tokens
