"""Requests that arrive together compute what they share once, and answer as each alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvgraft_transformers.engine import Engine, EngineSettings, FinishReason, GenerationRequest

from .greedy import best_tokens

PAGE = 16
LIMITS = EngineSettings(chunk_tokens=64, max_running=8, reserve_tokens=8, step_tokens=64)

FAMILIES = ("llama", "gemma3_text", "bamba")
"""Full attention, with a window, with states."""


@pytest.fixture
def open_engine() -> Iterator[Callable[..., Engine]]:
    opened: list[Engine] = []

    def build(model: PreTrainedModel, limits: EngineSettings = LIMITS, **memory: Any) -> Engine:
        pools = {"page_size": PAGE, "device_tokens": 4096, "guard": "on", "probe_tokens": 0}
        opened.append(Engine.open(model, limits, **{**pools, **memory}))
        return opened[-1]

    yield build
    for engine in opened:
        engine.close()
        assert not engine.memory.cache.requests
        engine.memory.cache.check_integrity()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wave_about_one_document_computes_it_once(
    family: str, tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny(family, torch.float64)
    document = tokens(12 * PAGE)  # whole chunks, so that the states are there without a cut
    prompts = [document + tokens(5, seed=10 + n) for n in range(6)]
    engine = open_engine(model)
    asked = [GenerationRequest(prompt, 4, ignore_end=True) for prompt in prompts]
    generations = engine.generate(asked)
    for prompt, generation in zip(prompts, generations):
        assert len(generation.tokens) == 4
        assert generation.tokens == best_tokens(model, prompt, generation.tokens)
    assert [each.cached_tokens for each in generations] == [0, *[len(document)] * 5]
    # the document once, its questions, and an answer's tokens but the last
    assert engine.totals.computed_tokens == len(document) + 6 * (5 + 3)
    assert engine.totals.followers == 5
    assert engine.totals.deferrals == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_several_answers_to_one_prompt_compute_it_once(
    family: str, tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny(family, torch.float64)
    prompt = tokens(10 * PAGE)
    engine = open_engine(model)
    generations = engine.generate(GenerationRequest(prompt, 2, ignore_end=True) for _ in range(6))
    answer = generations[0].tokens
    assert len(answer) == 2
    assert answer == best_tokens(model, prompt, answer)
    assert all(each.tokens == answer for each in generations)
    # a token is left to compute: those that repeat the prompt compute its last page
    assert engine.totals.computed_tokens == len(prompt) + 5 * PAGE + 6


def test_without_deferrals_each_computes_its_own(
    tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    prompt = tokens(10 * PAGE)
    engine = open_engine(tiny("llama"), LIMITS.model_copy(update={"max_deferrals": 0}))
    engine.generate(GenerationRequest(prompt, 1) for _ in range(4))
    assert engine.totals.computed_tokens == 4 * len(prompt)
    assert engine.totals.followers == 0


def test_a_waiting_request_goes_on_when_either_is_aborted(
    tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("llama", torch.float64)
    prompt = tokens(10 * PAGE)
    engine = open_engine(model)
    first, second, third = [
        engine.submit(GenerationRequest(prompt, 3, ignore_end=True)) for _ in range(3)
    ]
    engine.step()
    assert engine.schedule.following == [second, third]
    engine.abort(third)
    assert engine.schedule.following == [second]
    engine.abort(first)
    for _ in engine.run():
        pass
    assert second.finish is FinishReason.LENGTH
    assert second.tokens == best_tokens(model, prompt, second.tokens)
    assert second.cached_tokens == 4 * PAGE  # the chunk that the first one shared


def test_one_that_follows_holds_up_nobody_behind_it(
    tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    engine = open_engine(tiny("llama"))
    for _ in range(6):
        engine.submit(GenerationRequest(tokens(20 * PAGE), 2))
    other = engine.submit(GenerationRequest(tokens(8, seed=9), 2))
    for _ in range(2):
        engine.step()
    assert len(engine.schedule.following) == 5
    assert other in engine.schedule.running or other.finish is not None
