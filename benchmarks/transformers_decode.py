"""Decoded tokens and warm first tokens in transformers, beside its own dynamic cache.

Two tables per model, batch and prompt length. A decode step: the model over one token per row, with
a session per row (`session`), in the engine (`engine`, with sampling and scheduling), and with
transformers' dynamic cache and greedy choice. A first token behind a cached prompt: 41 new tokens
per row, for sessions and engine from the request on, for transformers with a kept cache of the same
rows (`kept`; the copy that keeps it whole is made beforehand) and with the copy counted (`copied`).

Each repetition runs all contestants, one after the other, the first one changing. Ratios of medians
of one run, and of the least times in brackets.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from _measure import arguments, heading
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvgraft_transformers import ModelMemory, read_architecture
from kvgraft_transformers.engine import Engine, EngineSettings, GenerationRequest
from kvgraft_transformers.probing import cache_argument, plain_cache
from kvgraft_transformers.session import Session
from kvgraft_transformers.tiny import build_tiny_model

CHUNK, PAGE, TAIL, WARM_UP = 512, 16, 41, 4
WIDE: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama: full attention": ("llama", {}),
    "mistral: window of 512": ("mistral", {"sliding_window": 512}),
    "gemma3: window of 512, full": (
        "gemma3_text",
        {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 4},
    ),
    "deepseek_v3: latent": (
        "deepseek_v3",
        {
            "num_key_value_heads": 8,
            "head_dim": None,
            "kv_lora_rank": 128,
            "q_lora_rank": 256,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "first_k_dense_replace": 8,
        },
    ),
    "bamba: full, Mamba-2": (
        "bamba",
        {
            "head_dim": None,
            "attn_layer_indices": [3, 7],
            "mamba_n_heads": 16,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "mamba_chunk_size": 64,
        },
    ),
    "lfm2: full, short convolution": (
        "lfm2",
        {"head_dim": None, "layer_types": ["conv", "full_attention"] * 4},
    ),
}
"""Eight layers, 512 wide."""


def drawn(n: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(3, 2000, (n,), generator=generator)]


def forward(model: PreTrainedModel, cache: object, tokens: torch.Tensor, start: int) -> list[int]:
    """One pass as `generate` makes it; the most likely next token of each row."""
    with torch.no_grad():
        output = model(
            input_ids=tokens,
            position_ids=torch.arange(start, start + tokens.shape[1])[None].expand(tokens.shape),
            use_cache=True,
            logits_to_keep=1,
            **{cache_argument(model): cache},
        )
    chosen: list[int] = output.logits[:, -1].argmax(-1).tolist()
    return chosen


def prefill(model: PreTrainedModel, cache: object, rows: list[list[int]], start: int) -> list[int]:
    """The rows from `start` on, in chunks; the next token of each."""
    tokens, chosen = torch.tensor(rows), [0] * len(rows)
    while start < tokens.shape[1]:
        end = min(tokens.shape[1], (start // CHUNK + 1) * CHUNK)
        chosen = forward(model, cache, tokens[:, start:end], start)
        start = end
    return chosen


class Times:
    """Seconds of each contestant, who run in turn."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def turn(self, number: int, contestants: dict[str, Callable[[], object]]) -> None:
        """All contestants once; the first few turns are not counted."""
        names = list(contestants)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = time.thread_time()
            contestants[name]()
            took = time.thread_time() - start
            if number >= WARM_UP:
                self.seconds.setdefault(name, []).append(took)

    def ms(self, name: str) -> str:
        return f"{1e3 * statistics.median(self.seconds[name]):.2f}"

    def ratio(self, name: str, to: str) -> str:
        median, least = (
            kind(self.seconds[name]) / kind(self.seconds[to]) for kind in (statistics.median, min)
        )
        return f"{median:.2f} [{least:.2f}]"


class Bench:
    """Prompts of one model that are cached in an engine, in a memory and in a kept cache.

    Args:
        model: whose.
        batch: prompts.
        length: tokens of each, a multiple of the chunk.
        turns: repetitions that will be measured.
    """

    def __init__(self, model: PreTrainedModel, batch: int, length: int, turns: int) -> None:
        self.model, self.batch, self.length, self.turns = model, batch, length, turns
        self.rows = [drawn(length, 100 + row) for row in range(batch)]
        pages = 2 * (turns + WARM_UP + 2) * (TAIL + 2 * PAGE)
        options: dict[str, Any] = {
            "page_size": PAGE,
            "device_tokens": batch * (length + pages),
            "probe_tokens": 0,
        }
        if "mamba" in read_architecture(model, sparse_on_host=False).components:
            options["components"] = {"mamba": {"states": 8 * batch + 2 * turns}}
        # in memories of their own, so that neither reuses the other's data
        settings = EngineSettings(chunk_tokens=CHUNK, max_running=batch, step_tokens=8 * CHUNK)
        self.engine = Engine.open(model, settings, **options)
        self.engine.generate(GenerationRequest(row, 1) for row in self.prompts(0))
        self.memory = ModelMemory.open(model, chunk_tokens=CHUNK, **options)
        sessions = self.sessions(0)
        prefill(model, self.memory.session_cache(sessions), self.prompts(0), 0)
        for session in sessions:
            session.finish()
        self.kept = plain_cache(model)
        prefill(model, self.kept, self.rows, 0)

    def prompts(self, number: int) -> list[list[int]]:
        """The rows, with new tokens behind each."""
        return [row + drawn(TAIL, 1000 + number) for row in self.rows]

    def sessions(self, number: int, n_new: int = 0) -> list[Session]:
        """Of the prompts, behind what is cached."""
        return [
            self.memory.session(each, max_new_tokens=n_new, chunk_tokens=CHUNK)
            for each in self.prompts(number)
        ]

    def first_token(self) -> tuple[Times, bool]:
        """First tokens behind cached prompts, and whether all contestants said the same."""
        times, said, same = Times(), dict[str, list[int]](), True

        def with_engine(prompts: list[list[int]]) -> None:
            generations = self.engine.generate(GenerationRequest(each, 1) for each in prompts)
            assert {each.cached_tokens for each in generations} == {self.length}
            said["engine"] = [each.tokens[0] for each in generations]

        def with_sessions(prompts: list[list[int]], number: int) -> None:
            sessions = self.sessions(number)
            assert {each.cached_tokens for each in sessions} == {self.length}
            cache = self.memory.session_cache(sessions)
            said["session"] = prefill(self.model, cache, prompts, self.length)
            for each in sessions:
                each.finish()

        def with_copy(prompts: list[list[int]]) -> None:
            said["copied"] = prefill(self.model, copy.deepcopy(self.kept), prompts, self.length)

        def with_kept(prompts: list[list[int]], cache: Cache) -> None:
            said["kept"] = prefill(self.model, cache, prompts, self.length)

        for number in range(1, 1 + self.turns + WARM_UP):
            prompts = self.prompts(number)
            contestants: dict[str, Callable[[], object]] = {
                "session": partial(with_sessions, prompts, number),
                "engine": partial(with_engine, prompts),
                "kept": partial(with_kept, prompts, copy.deepcopy(self.kept)),
                "copied": partial(with_copy, prompts),
            }
            times.turn(number - 1, contestants)
            same &= len({tuple(each) for each in said.values()}) == 1
        return times, same

    def decode(self) -> tuple[Times, bool]:
        """Steps of one token per row, and whether all contestants said the same."""
        prompts, n_new = self.prompts(1000), self.turns + WARM_UP + 2
        generations = [
            self.engine.submit(GenerationRequest(each, n_new, ignore_end=True)) for each in prompts
        ]
        while not all(each.tokens for each in generations):
            self.engine.step()
        cache = self.memory.session_cache(self.sessions(1000, n_new))
        caches = {"session": cache, "plain": copy.deepcopy(self.kept)}
        last = {
            name: prefill(self.model, each, prompts, self.length) for name, each in caches.items()
        }
        said = {name: [[token] for token in each] for name, each in last.items()}

        def step(name: str, at: int) -> None:
            last[name] = forward(self.model, caches[name], torch.tensor(last[name])[:, None], at)
            for row, token in zip(said[name], last[name]):
                row.append(token)

        times = Times()
        for number in range(self.turns + WARM_UP):
            at = self.length + TAIL + number
            contestants: dict[str, Callable[[], object]] = {
                "session": partial(step, "session", at),
                "engine": self.engine.step,
                "plain": partial(step, "plain", at),
            }
            times.turn(number, contestants)
        return times, said["session"] == said["plain"] == [each.tokens for each in generations]

    def close(self) -> None:
        """Give its memory back."""
        self.engine.close()
        self.memory.close()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="", help="only models whose name begins so")
    parser.add_argument("--size", default="", help="only this batch and length, such as 8x512")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    turns = 12 if options.quick else 30
    sizes = [
        (batch, length)
        for batch in (1, 8)
        for length in (512, 2048)
        if options.size in ("", f"{batch}x{length}")
    ]
    heading(
        "decode and warm first tokens in transformers",
        transformers=transformers.__version__,
        models="8 layers, 512 wide, 8 heads of 64, float32, random weights, one thread",
        turns=f"{turns} counted, {WARM_UP} before",
        pages=f"of {PAGE} tokens, chunks of {CHUNK}",
        clock="CPU time of the thread that runs the model",
    )
    print(
        "| model | batch x prompt | decode, ms: own cache | session / own | engine / own "
        "| first token, ms: kept | session / kept | engine / kept | engine / copied | same |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, (family, config) in MODELS.items():
        if not name.startswith(options.model):
            continue
        model = build_tiny_model(family, **{**WIDE, **config})
        for batch, length in sizes:
            bench = Bench(model, batch, length, turns)
            firsts, alike = bench.first_token()
            steps, same = bench.decode()
            bench.close()
            print(
                f"| {name} | {batch} x {length} | {steps.ms('plain')} "
                f"| {steps.ratio('session', 'plain')} | {steps.ratio('engine', 'plain')} "
                f"| {firsts.ms('kept')} | {firsts.ratio('session', 'kept')} "
                f"| {firsts.ratio('engine', 'kept')} | {firsts.ratio('engine', 'copied')} "
                f"| {'yes' if same and alike else 'no'} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
