"""Answers on an accelerator: those of the CPU, whatever goes to HOST and comes back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from kvgraft_transformers.attention import EndAligned
from kvgraft_transformers.engine import Engine, EngineSettings, GenerationRequest

from .cases import one_of_each_kind

pytestmark = pytest.mark.gpu

LIMITS = EngineSettings(chunk_tokens=32, max_running=4, reserve_tokens=8, step_tokens=96)


def answers(model: PreTrainedModel, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    """Greedy answers to prompts, then to the same ones longer; pools are too small for all."""
    engine = Engine.open(
        model,
        LIMITS,
        page_size=16,
        device_tokens=368,
        host_tokens=2048,
        load=None,
        probe_tokens=0,
        **settings,
    )
    found = []
    for _ in range(2):
        generations = engine.generate(
            GenerationRequest(prompt, 12, ignore_end=True) for prompt in prompts
        )
        found += [generation.tokens for generation in generations]
        for each in engine.memory.cache.mounted:
            engine.memory.cache.evict(each.name, each.component.device.capacity)
        prompts = [prompt + answer for prompt, answer in zip(prompts, found)]
    engine.memory.cache.drain()
    assert engine.memory.cache.stats().load_backs.completed, "nothing came back"
    engine.memory.cache.check_integrity()
    engine.memory.close()
    return found


@pytest.mark.parametrize("case", one_of_each_kind())
def test_answers_on_a_device_are_those_of_the_cpu(
    case: Any, tiny: Any, tokens: Callable[..., list[int]]
) -> None:
    family, _, sparse = case.partition("+")
    model = tiny(family, torch.float64)  # so that rounding changes no answer
    options = {"components": {"hisparse": {"max_running": 4}}} if sparse else {}
    prompts = [tokens(40 + 9 * i, seed=i) for i in range(4)]
    wanted = answers(model, prompts, sparse_on_host=bool(sparse), **options)
    device = torch.accelerator.current_accelerator()
    there = deepcopy(model).to(device)
    assert answers(there, prompts, sparse_on_host=bool(sparse), **options) == wanted


@pytest.mark.gpu("cuda")  # which tells where the host waits
@contextmanager
def counted_waits(found: list[str]) -> Iterator[None]:
    """Note where the host waits for the device."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines = [f"{each.filename}:{each.lineno}: {each.message}" for each in seen]
    found += [each for each in lines if "a synchronizing CUDA operation" in each]


@pytest.mark.gpu("cuda")  # others do not tell where the host waits
def test_a_step_waits_for_the_device_once(tiny: Any, tokens: Callable[..., list[int]]) -> None:
    model = deepcopy(tiny("llama", torch.float32)).to("cuda")
    engine = Engine.open(model, LIMITS, page_size=16, device_tokens=368, probe_tokens=0)
    for seed in range(3):
        engine.submit(GenerationRequest(tokens(40 + seed, seed=seed), 12, ignore_end=True))
    while len(engine.step()) < 3:
        pass
    engine.step()
    waits: list[str] = []
    with counted_waits(waits):
        assert len(engine.step()) == 3
    engine.close()
    assert len(waits) == 1, waits


@pytest.mark.gpu("cuda")  # others do not tell where the host waits
def test_the_first_step_behind_a_prefix_waits_once(
    tiny: Any, tokens: Callable[..., list[int]]
) -> None:
    model = deepcopy(tiny("llama", torch.float32)).to("cuda")
    engine = Engine.open(model, LIMITS, page_size=16, device_tokens=368, probe_tokens=0)
    request = GenerationRequest(tokens(90), 1, ignore_end=True)
    for _ in range(2):
        engine.generate([request])
    generation = engine.submit(request)
    waits: list[str] = []
    with counted_waits(waits):
        assert len(engine.step()) == 1
    assert generation.cached_tokens == 80
    engine.close()
    assert len(waits) == 1, waits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_mask_that_is_none_computes_as_the_mask_itself(dtype: torch.dtype) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, 4, n, 64, device=device, dtype=dtype) for n in (96, 300, 300)
    )
    dense = torch.ones(96, 300, dtype=torch.bool, device=device).tril(300 - 96)
    mask = EndAligned(96, 300, device)
    found = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=dense)
    atol = 0.02 if dtype is torch.bfloat16 else 1e-3
    torch.testing.assert_close(found, expected, atol=atol, rtol=0.0)
