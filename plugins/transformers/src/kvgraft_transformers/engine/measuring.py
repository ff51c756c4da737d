"""Measures the costs for load-or-recompute on the model that will run (R8).

A pass of few tokens takes the time of its kernel launches, until the computation takes longer. So
short prefixes are free to compute, which a single rate cannot express: both times are measured.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvgraft import KvgraftError, LoadModel
from kvgraft_transformers.engine.generation import GenerationRequest
from kvgraft_transformers.self_check import draw_tokens

if TYPE_CHECKING:
    from kvgraft_transformers.engine.engine import Engine

__all__ = ["measured_load"]

REPEATS = 3
"""Each time is the minimum of so many runs, after one warm-up."""

SHORT_PAGES = 4
"""Pages of a prefix whose computation and load cost nothing beside their fixed costs."""

MOST_BYTES_S = 1e13
"""The rate if few and many bytes take the same time."""


def measured_load(
    engine: Engine, clock: Callable[[], float] = time.perf_counter
) -> LoadModel | None:
    """The costs of passes and of loads, measured on an idle engine.

    Args:
        engine: an engine with pools for two passes on DEVICE and one on HOST, which always loads.
        clock: seconds.

    Returns:
        None if the model's context is too short to measure.

    Raises:
        KvgraftError: a prompt does not run.
    """
    cache, page, full = engine.memory.cache, engine.memory.page_size, engine.settings.step_tokens
    context = getattr(
        engine.model.config.get_text_config(decoder=True), "max_position_embeddings", None
    )
    most = (context or 1 << 20) - page - 1
    short = SHORT_PAGES * page
    if most < 2 * short:
        return None
    full = min(full, most)
    drawn = draw_tokens(engine.model, random.Random(0), max(full, 2 * short) + page)

    def ask(n_tokens: int) -> None:
        (asked,) = engine.generate([GenerationRequest(drawn[:n_tokens], 1, ignore_end=True)])
        if not asked.tokens:
            raise asked.error or KvgraftError(f"a prompt of {n_tokens} tokens: {asked.decision}")

    def to_host() -> None:
        cache.drain()
        for each in cache.mounted:
            cache.evict(each.name, each.component.device.capacity)
        cache.drain()

    def least(n_tokens: int, before: Callable[[], object]) -> float:
        found = []
        for _ in range(1 + REPEATS):
            before()
            began = clock()
            ask(n_tokens)
            found.append(clock() - began)
        return min(found[1:])

    def loaded(n_tokens: int) -> int:
        n = cache.stats().load_backs.slots
        ask(n_tokens)
        after = cache.stats().load_backs.slots
        return sum(
            (after[each.name] - n[each.name]) * each.component.device.slot_nbytes
            for each in cache.mounted
        )

    pass_s, full_s = least(short, cache.clear), least(full, cache.clear)
    times, nbytes = [], []
    for n_tokens in (short, max(full, 2 * short)):
        cache.clear()
        ask(n_tokens)
        to_host()
        nbytes.append(loaded(n_tokens + page))
        times.append(least(n_tokens + page, to_host))
    cache.clear()
    more = nbytes[1] - nbytes[0]
    byte_s = 1 / LoadModel().bandwidth_bytes_s  # windows: as long behind any prefix
    if more > 0:
        byte_s = max((times[1] - times[0]) / more, 1 / MOST_BYTES_S)
    return LoadModel(
        bandwidth_bytes_s=1 / byte_s,
        latency_s=max(0.0, times[0] - pass_s - nbytes[0] * byte_s),
        prefill_tokens_s=full / full_s,
        pass_s=pass_s,
        pass_tokens=engine.settings.step_tokens,
    )
