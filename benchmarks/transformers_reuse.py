"""Reused prefixes in transformers' models: how exact, and the time they save.

Per family: whether logits behind a restored prefix (from the device, from the host) are bit for bit
those of an uninterrupted run with the same chunks; how far they are from computing everything at
once, in float64, float32 and bfloat16; the cost of a second request beside the first; and the cost
of a decoded token beside transformers' own dynamic cache. Ratios of medians, in one run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import transformers
from _measure import arguments, heading
from transformers import PreTrainedModel

from kvgraft_transformers import ModelMemory
from kvgraft_transformers.probing import cache_argument, plain_cache
from kvgraft_transformers.tiny import FAMILIES, build_tiny_model

PROMPT, CHUNK, PAGE = 1026, 64, 16
REPEATS = 5


def drawn(n: int) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return [int(token) for token in torch.randint(3, 500, (n,), generator=generator)]


def run(model: PreTrainedModel, tokens: list[int], cache: object, start: int = 0) -> torch.Tensor:
    """Logits from `start` on, chunk by chunk."""
    logits = []
    while start < len(tokens):
        end = min(len(tokens), (start // CHUNK + 1) * CHUNK)
        with torch.no_grad():
            output = model(
                input_ids=torch.tensor(tokens[start:end])[None],
                position_ids=torch.arange(start, end)[None],
                use_cache=True,
                **{cache_argument(model): cache},
            )
        logits.append(output.logits[0])
        start = end
    return torch.cat(logits)


def open_memory(model: PreTrainedModel, *, sparse: bool) -> ModelMemory:
    return ModelMemory.open(
        model,
        page_size=PAGE,
        chunk_tokens=CHUNK,
        device_tokens=4096,
        host_tokens=8192,
        sparse_on_host=sparse,
        load=None,
    )


def exactness(family: str, dtype: torch.dtype, *, sparse: bool) -> tuple[bool, bool, float]:
    """Equal bits from device and host, and the distance to computing it all at once."""
    model, prompt = build_tiny_model(family, dtype=dtype), drawn(258)
    expected = run(model, prompt, plain_cache(model))
    with torch.no_grad():
        whole = model(input_ids=torch.tensor(prompt)[None], use_cache=False).logits[0]
    same = []
    with open_memory(model, sparse=sparse) as memory:
        with memory.session(prompt, chunk_tokens=CHUNK) as session:
            run(model, prompt, session.cache)
        for tier in ("device", "host"):
            if tier == "host":
                memory.cache.drain()
                for each in memory.cache.mounted:
                    memory.cache.evict(each.name, 10_000)
            with memory.session(prompt, chunk_tokens=CHUNK) as session:
                start = session.cached_tokens
                restored = run(model, prompt, session.cache, start)
                same.append(start == 256 and torch.equal(restored, expected[start:]))
        with memory.session(prompt) as session:
            start = session.cached_tokens - CHUNK
    distance = (expected[start : start + CHUNK] - whole[start : start + CHUNK]).abs().max()
    return same[0], same[1], float(distance)


def timed(call: Callable[..., object], *arguments: object) -> float:
    start = time.thread_time()
    call(*arguments)
    return time.thread_time() - start


def savings(family: str, *, sparse: bool) -> tuple[float, float]:
    """Second request / first, and decode with a session / with a dynamic cache."""
    model = build_tiny_model(family)
    firsts: list[float] = []
    seconds: list[float] = []
    ours, theirs = [], []
    with open_memory(model, sparse=sparse) as memory:
        for repeat in range(REPEATS):
            prompt = drawn(PROMPT)
            prompt[0] = 3 + repeat
            for times in (firsts, seconds):
                with memory.session(prompt, chunk_tokens=CHUNK) as session:
                    start = session.cached_tokens
                    times.append(timed(run, model, prompt, session.cache, start))
        plain = plain_cache(model)
        run(model, prompt, plain)
        with memory.session(prompt, max_new_tokens=64, chunk_tokens=CHUNK) as session:
            run(model, prompt, session.cache, session.cached_tokens)
            for position in range(PROMPT, PROMPT + 60):
                ours.append(timed(step, model, position, session.cache))
                theirs.append(timed(step, model, position, plain))
    median = statistics.median
    return median(seconds) / median(firsts), median(ours) / median(theirs)


def step(model: PreTrainedModel, position: int, cache: object) -> None:
    with torch.no_grad():
        model(
            input_ids=torch.tensor([[7]]),
            position_ids=torch.tensor([[position]]),
            use_cache=True,
            **{cache_argument(model): cache},
        )


def main() -> None:
    quick = arguments(__doc__).parse_args().quick
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    heading(
        "reused prefixes in transformers",
        transformers=transformers.__version__,
        exactness=f"258 tokens in chunks of {CHUNK}",
        time=f"{PROMPT} tokens, float32, one thread",
    )
    print(
        "| family | same bits: device, host | float64 | float32 | bfloat16 | 2nd / 1st | decode |"
    )
    print("|---|---|---|---|---|---|---|")
    cases = [*FAMILIES, "deepseek_v32+hisparse"]
    for case in cases[-3:] if quick else cases:
        family, _, route = case.partition("+")
        sparse = bool(route)
        rows = [
            exactness(family, dtype, sparse=sparse)
            for dtype in (torch.float64, torch.float32, torch.bfloat16)
        ]
        device, host = all(row[0] for row in rows), all(row[1] for row in rows)
        distances = " | ".join("0" if row[2] == 0 else f"{row[2]:.0e}" for row in rows)
        second, decode = savings(family, sparse=sparse)
        print(
            f"| {case} | {'yes' if device else 'NO'}, {'yes' if host else 'NO'} | {distances} "
            f"| {second:.2f} | {decode:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
