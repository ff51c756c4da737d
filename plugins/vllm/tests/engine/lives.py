"""Lives of an engine, each in a process of its own that ends by `kill -9`.

They are forked from this process, which has imported vLLM and run nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["Life", "forked", "live", "prompts", "transfer_config"]

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.update(ENVIRONMENT)

BLOCK = 32
N_NEW = 8


@dataclass(frozen=True)
class Life:
    """The answers of an engine between its start and its end.

    Attributes:
        answers: per prompt, its new tokens and their log-probabilities.
        hit_tokens: per prompt, tokens that were not computed.
        counts: the store's counters.
        lines: what the tier logged.
        seconds: from the first prompt to the last answer.
    """

    answers: list[tuple[list[int], list[float]]]
    hit_tokens: list[int]
    counts: dict[str, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def says_as(self, other: Life) -> bool:
        """Whether tokens are equal, and log-probabilities to 4 digits."""
        return all(
            mine[0] == yours[0] and all(abs(a - b) < 1e-4 for a, b in zip(mine[1], yours[1]))
            for mine, yours in zip(self.answers, other.answers, strict=True)
        )


def prompts(n_prompts: int = 3, n_tokens: int = 300, seed: int = 0) -> list[list[int]]:
    """Prompts that have nothing in common."""
    drawn = random.Random(seed)
    return [[drawn.randrange(4, 512) for _ in range(n_tokens)] for _ in range(n_prompts)]


def transfer_config(tier: dict[str, Any] | None) -> dict[str, Any] | None:
    """vLLM's `kv_transfer_config` with one tier below CPU memory."""
    if tier is None:
        return None
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "HostSpec",
            "spec_module_path": "plugins.vllm.tests.engine.host_copies",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": [tier],
        },
    }


def live(
    model: Path,
    dtype: str,
    tier: dict[str, Any] | None,
    asked: Sequence[Sequence[int]],
    *,
    before: Callable[[Any], None] | None = None,
) -> Life:
    """Start an engine, ask it, and kill it.

    Args:
        model: its directory.
        dtype: element type.
        tier: the entry of `secondary_tiers`; None for an engine without offloading.
        asked: prompts, asked one after the other.
        before: called in the engine's process with the tier, before the first prompt.
    """
    life = forked(_life, model, dtype, tier, asked, before)
    assert isinstance(life, Life)
    return life


def forked(work: Callable[..., Any], *given: Any, timeout_s: float = 240) -> Any:
    """The result of a function in a process of its own, which is killed then."""
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe()
    process = context.Process(target=_run, args=(its, work, *given))
    process.start()
    its.close()
    try:
        if not mine.poll(timeout_s):
            raise AssertionError(f"no answer within {timeout_s:g} s")
        told = mine.recv()
    except EOFError:
        process.join(10)
        raise AssertionError(f"the engine ended with {process.exitcode}") from None
    finally:
        if process.is_alive() and process.pid:
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        for left in Path("/dev/shm").glob("vllm_offload_*"):
            if re.search(f"life{os.getpid()}x{process.pid}$", left.stem):
                left.unlink()
    assert not isinstance(told, str), told
    return told


def _run(told: Connection, work: Callable[..., Any], *given: Any) -> None:
    try:
        told.send(work(*given))
    except Exception:  # noqa: BLE001 - told to the test
        told.send(traceback.format_exc())
    time.sleep(600)  # until it is killed


def _life(
    model: Path,
    dtype: str,
    tier: dict[str, Any] | None,
    asked: Sequence[Sequence[int]],
    before: Callable[[Any], None] | None,
) -> Life:
    import logging

    from vllm import LLM, SamplingParams

    lines: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("kvgraft").addHandler(Keeper())
    logging.getLogger("kvgraft").setLevel(logging.INFO)
    config = transfer_config(tier)
    if config is not None:
        config["engine_id"] = f"life{os.getppid()}x{os.getpid()}"
    llm = LLM(
        model=str(model),
        dtype=dtype,
        enforce_eager=True,
        enable_prefix_caching=True,
        block_size=BLOCK,
        # with 2,048 and 192, Qwen3-Next gave no answer in 240 s, without any tier
        max_model_len=2048 if dtype == "float32" else 4096,
        max_num_seqs=4,
        num_gpu_blocks_override=192 if dtype == "float32" else 160,
        kv_transfer_config=config,
        disable_log_stats=True,
    )
    below = None
    if config is not None:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        manager = scheduler.connector.connector_scheduler.manager
        below = manager.secondary_tiers[0]
        if before is not None:
            before(below)
    wanted = SamplingParams(max_tokens=N_NEW, temperature=0, logprobs=1, ignore_eos=True)
    answers, hits = [], []
    begun = time.monotonic()
    for prompt in asked:
        (output,) = llm.generate({"prompt_token_ids": list(prompt)}, wanted, use_tqdm=False)
        tokens = list(output.outputs[0].token_ids)
        chances = [each[token].logprob for each, token in zip(output.outputs[0].logprobs, tokens)]
        answers.append((tokens, chances))
        hits.append(output.num_cached_tokens or 0)
    seconds = time.monotonic() - begun
    counts: dict[str, int] = {}
    if below is not None:
        llm.generate({"prompt_token_ids": [5, 6, 7]}, wanted, use_tqdm=False)  # more steps
        below.drain_jobs()
        if hasattr(below, "_tier"):
            counts = dict(below._tier.storage.counters.snapshot())
    return Life(answers, hits, counts, lines, seconds)
