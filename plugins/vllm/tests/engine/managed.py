"""Engines with kvgraft's cache manager, with vLLM's own, and without a prefix cache.

    python -m plugins.vllm.tests.engine.managed llama gemma3_text qwen3_next

All answer the same requests. The manager is put in as vLLM does it, by the entry point of the
package and its environment variable.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugins.vllm.tests.engine.lives import forked
from plugins.vllm.tests.engine.models import DTYPES, FAMILIES, write_model

__all__ = ["KVGRAFT", "MANAGERS", "NONE", "OWN", "POOLS", "Answers", "answer"]

NONE, OWN, KVGRAFT = MANAGERS = "none", "vLLM", "kvgraft"
SETTINGS = {"reserve": 16, "point_tokens": 256}
COUNTERS = (
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
    "vllm:spec_decode_num_accepted_tokens",
)
N_GRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 2,
}


@dataclass(frozen=True)
class Pool:
    """A model's engine.

    Attributes:
        wide: blocks that hold everything.
        tight: blocks of which some are evicted.
        chunk: most tokens of a step.
        stem: tokens that prompts have in common, at most.
        cut: the tokens in common are a multiple of it.
        is_batched: whether requests run at the same time, and go on behind answers. With states
            sums depend on the cuts of steps: these are the same, with and without a cache, if
            prompts run one by one and end behind a block. A wrong state shows in what follows it.
    """

    wide: int
    tight: int
    chunk: int
    stem: int
    cut: int
    is_batched: bool


POOLS = {
    "llama": Pool(wide=300, tight=40, chunk=256, stem=300, cut=1, is_batched=True),
    "gemma3_text": Pool(wide=300, tight=64, chunk=256, stem=300, cut=1, is_batched=True),
    "qwen3_next": Pool(wide=160, tight=28, chunk=544, stem=1700, cut=544, is_batched=False),
}


@dataclass(frozen=True)
class Answers:
    """The answers of one engine.

    Attributes:
        tokens: of each answer.
        cached: tokens that were not computed, as the answers say.
        counts: vLLM's metrics by name, without `vllm:`.
    """

    tokens: list[list[int]]
    cached: int
    counts: dict[str, int]

    def n_equal(self, other: Answers) -> int:
        """How many answers are the same."""
        return sum(mine == yours for mine, yours in zip(self.tokens, other.tokens, strict=True))


def answer(
    model: Path,
    family: str,
    manager: str,
    n_blocks: int,
    *,
    before: Callable[[Any], None] = lambda scheduler: None,
    drafts: bool = False,
) -> Answers:
    """Start an engine, ask it, and kill it.

    Args:
        model: its directory.
        family: of the model.
        manager: one of `MANAGERS`; none means that prefix caching is off.
        n_blocks: blocks of the engine's pool.
        before: called in the engine's process with the scheduler, before the first request.
        drafts: whether vLLM drafts tokens, by `N_GRAMS`.
    """
    found = forked(_answer, model, family, manager, n_blocks, before, N_GRAMS if drafts else None)
    assert isinstance(found, Answers)
    return found


def _answer(
    model: Path,
    family: str,
    manager: str,
    n_blocks: int,
    before: Callable[[Any], None],
    drafts: dict[str, Any] | None,
) -> Answers:
    os.environ["KVGRAFT_VLLM_MANAGER"] = json.dumps(SETTINGS) if manager == KVGRAFT else "0"
    from vllm import LLM

    pool = POOLS[family]
    llm = LLM(
        model=str(model),
        dtype=DTYPES[family],
        enforce_eager=True,
        enable_prefix_caching=manager != NONE,
        block_size=32,
        max_model_len=512 if pool.is_batched else 4096,
        max_num_seqs=8,
        max_num_batched_tokens=pool.chunk,
        num_gpu_blocks_override=n_blocks,
        speculative_config=drafts,
        disable_log_stats=False,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    made = type(scheduler.kv_cache_manager).__name__
    assert (made == "KvgraftCacheManager") is (manager == KVGRAFT), made
    before(scheduler)
    tokens, cached = _ask(llm, pool)
    counts = {each.name: int(each.value) for each in llm.get_metrics() if each.name in COUNTERS}
    return Answers(tokens, cached, {name[len("vllm:") :]: counts.get(name, 0) for name in COUNTERS})


def _ask(llm: Any, pool: Pool) -> tuple[list[list[int]], int]:
    """Three rounds of eight prompts, each of which begins as one of the round before."""
    from vllm import SamplingParams

    rng, n_cached = random.Random(0), 0
    stems = [[rng.randrange(4, 512) for _ in range(pool.stem)] for _ in range(6)]
    ends = [rng.randrange(pool.stem // 2, pool.stem) // pool.cut * pool.cut for _ in range(8)]
    texts = [stems[at % 6][:end] for at, end in enumerate(ends)]
    wanted = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    told: list[list[int]] = []
    for _ in range(3):
        asked = [[*text, *(rng.randrange(4, 512) for _ in range(5))] for text in texts]
        given = [{"prompt_token_ids": each} for each in asked]
        for some in [given] if pool.is_batched else [[each] for each in given]:
            for output in llm.generate(some, wanted, use_tqdm=False):
                told.append(list(output.outputs[0].token_ids))
                n_cached += output.num_cached_tokens or 0
        if pool.is_batched:
            texts = [text + new for text, new in zip(asked, told[-8:])]
    return told, n_cached


def main() -> None:
    print("| model | blocks | manager | equal answers | cached tokens | preemptions |")
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for family in sys.argv[1:] or FAMILIES:
            pool, model = POOLS[family], write_model(family, Path(directory))
            alone = answer(model, family, NONE, pool.wide)
            for n_blocks in (pool.wide, pool.tight):
                for manager in (OWN, KVGRAFT):
                    found = answer(model, family, manager, n_blocks)
                    print(
                        f"| {family} | {n_blocks} | {manager} | {found.n_equal(alone)} of "
                        f"{len(alone.tokens)} | {found.cached} "
                        f"| {found.counts['num_preemptions']} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
