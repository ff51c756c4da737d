"""The cost of cutting a prefill for its states: the time of an extra pass, in tokens.

A prompt of 1,000 tokens is computed in one pass, cut at 960 (where an identical prompt resumes,
with pages of 64), and cut at 576 as well (where it departs from another one's prompt). The cost of
an extra pass is the extra time of the cut prefill, divided by the time of one token of the whole
one. Then passes of n tokens behind 960 others: the cost of a pass of few tokens beside one of many.
The first turn warms up and is not counted; medians over the others.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from _measure import arguments, heading
from transformers import PreTrainedModel

from kvgraft_transformers import ModelMemory
from kvgraft_transformers.tiny import build_tiny_model

PROMPT, PAGE = 1000, 64
CUTS = {"one pass": (1000,), "960 + 40": (960, 1000), "576 + 384 + 40": (576, 960, 1000)}
PASSES = (1, 8, 40, 128, 512)
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "head_dim": 64,
}
"""Layers that are 64 times as large."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next, tiny": ("qwen3_next", {}),
    "bamba, tiny": ("bamba", {}),
    "lfm2, tiny": ("lfm2", {}),
    "lfm2, 512 wide": ("lfm2", WIDE | {"head_dim": None}),
    "bamba, 512 wide": (
        "bamba",
        WIDE | {"mamba_n_heads": 16, "mamba_d_head": 64, "head_dim": None},
    ),
}


def drawn(n: int, generator: torch.Generator) -> list[int]:
    return [int(token) for token in torch.randint(3, 500, (n,), generator=generator)]


def passes_s(memory: ModelMemory, tokens: list[int], ends: Sequence[int]) -> list[float]:
    """Seconds of each pass of a new prompt, by where it ends; the cache's work included."""
    ids = torch.tensor(tokens)[None]
    with torch.no_grad(), memory.session(tokens) as session:
        start, times = 0, []
        for end in ends:
            began = time.thread_time()
            # two tokens' logits: or the pass would be cut as `generate`'s are
            memory.model(input_ids=ids[:, start:end], **session.cache.arguments, logits_to_keep=2)
            times.append(time.thread_time() - began)
            start = end
        session.abort()
    return times


def measure(model: PreTrainedModel, turns: int) -> tuple[dict[str, float], dict[int, float]]:
    """Medians: seconds by cuts of a prompt, and by tokens of one pass behind 960 others."""
    generator = torch.Generator().manual_seed(1)
    by_cuts: dict[str, list[float]] = {name: [] for name in CUTS}
    by_tokens: dict[int, list[float]] = {n: [] for n in PASSES}
    with ModelMemory.open(
        model, page_size=PAGE, chunk_tokens=4096, device_tokens=8192, probe_tokens=0
    ) as memory:
        for turn in range(turns + 1):
            for name, ends in CUTS.items():
                took = sum(passes_s(memory, drawn(PROMPT, generator), ends))
                if turn:
                    by_cuts[name].append(took)
            for n in PASSES:
                took = passes_s(memory, drawn(960 + n, generator), (960, 960 + n))[-1]
                if turn:
                    by_tokens[n].append(took)
    median = statistics.median
    return (
        {name: median(each) for name, each in by_cuts.items()},
        {n: median(each) for n, each in by_tokens.items()},
    )


def main() -> None:
    quick = arguments(__doc__).parse_args().quick
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    turns = 5 if quick else 15
    heading(
        "cuts of a prefill",
        transformers=transformers.__version__,
        prompt=f"{PROMPT} tokens, pages of {PAGE}, float32, one thread",
        turns=turns,
        clock="CPU time of the thread that runs the model",
    )
    passes = " | ".join(f"{n} tokens" for n in PASSES)
    print(
        f"| model | ms: {' | '.join(CUTS)} | extra pass in tokens, 1 cut, 2 cuts | ms: {passes} |"
    )
    print("|" + "---|" * (3 + len(CUTS) + len(PASSES) - 1))
    for name, (family, config) in MODELS.items():
        by_cuts, by_tokens = measure(build_tiny_model(family, **config), turns)
        whole, once, twice = by_cuts.values()
        token = whole / PROMPT
        extra = f"{(once - whole) / token:.0f}, {(twice - whole) / token / 2:.0f}"
        times = " | ".join(f"{1e3 * each:.1f}" for each in (whole, once, twice))
        few = " | ".join(f"{1e3 * each:.1f}" for each in by_tokens.values())
        print(f"| {name} | {times} | {extra} | {few} |", flush=True)


if __name__ == "__main__":
    main()
