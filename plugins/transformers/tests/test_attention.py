"""Passes of an engine: without masks where a prefix allows it, and without cuDNN's plans."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from kvgraft_transformers.attention import EndAligned, end_aligned, without_plans
from kvgraft_transformers.engine import Engine, EngineSettings, GenerationRequest

from .reads import Reads

CPU = torch.device("cpu")
FAMILIES = ["llama", "gemma3_text", "llama4_text", "deepseek_v32", "falcon_h1", "lfm3", "gpt_oss"]


def test_the_last_query_stands_at_the_last_key() -> None:
    mask = EndAligned(3, 5, CPU)
    dense = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    assert mask.shape == (1, 1, 3, 5)
    assert mask.dtype is torch.bool
    assert torch.equal(mask | False, dense[None, None])
    assert torch.equal(mask[:, :, 1:], dense[None, None, 1:])
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, n, 8) for n in (3, 5, 5))
    found = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=dense, scale=0.3)
    assert torch.equal(found, expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_behind_a_prefix_answer_the_same_without_masks(
    family: str,
    tiny: Any,
    open_memory: Any,
    tokens: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny(family, torch.float64)
    made: list[tuple[int, int]] = []
    init = EndAligned.__init__

    def noted(self: EndAligned, n_queries: int, n_keys: int, home: torch.device) -> None:
        made.append((n_queries, n_keys))
        init(self, n_queries, n_keys, home)

    monkeypatch.setattr(EndAligned, "__init__", noted)
    prompt = tokens(100)
    memory = open_memory(model, probe_tokens=0)
    found = []
    for routed in (False, True):
        with memory.session(prompt, chunk_tokens=32) as session, torch.no_grad():
            ids, logits = torch.tensor([prompt]), []
            with end_aligned if routed else nullcontext():
                for at in range(session.computed, len(prompt), 32):
                    chunk = ids[:, at : at + 32]
                    output = model(chunk, **session.cache.arguments, use_cache=True)
                    logits.append(output.logits)
        found.append(torch.cat(logits, dim=1))
        memory.cache.clear()
    assert torch.equal(*found)
    # these compute with masks of their own
    assert made[:2] == ([] if family in ("gpt_oss", "deepseek_v32") else [(32, 64), (32, 96)])


def test_padding_keeps_its_mask(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("llama", torch.float64)
    memory = open_memory(model, probe_tokens=0)
    longer, shorter = tokens(60), tokens(50, seed=1)
    found = []
    for routed in (False, True):
        with memory.session(longer) as one, memory.session(shorter) as other, torch.no_grad():
            for session, prompt in ((one, longer), (other, shorter)):
                model(torch.tensor([prompt[:-10]]), **session.cache.arguments, use_cache=True)
            cache = memory.session_cache([one, other])
            with end_aligned if routed else nullcontext():
                found.append(model(**cache.inputs(10), **cache.arguments, use_cache=True).logits)
        memory.cache.clear()
    assert torch.equal(*found)


@pytest.mark.parametrize("setting", [True, False])
def test_an_engine_runs_without_cudnn_and_leaves_the_setting(
    setting: Any, tiny: Any, tokens: Callable[..., list[int]]
) -> None:
    cuda: Any = torch.backends.cuda
    model = tiny("llama", torch.float64)
    seen: list[bool] = []
    hook = model.register_forward_hook(lambda *_: seen.append(cuda.cudnn_sdp_enabled()))
    before = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(setting)
    try:
        limits = EngineSettings(chunk_tokens=32, step_tokens=32)
        engine = Engine.open(model, limits, device_tokens=256, probe_tokens=64)
        assert seen
        assert not any(seen)
        assert cuda.cudnn_sdp_enabled() is setting
        seen.clear()
        engine.generate([GenerationRequest(tokens(60), 1, ignore_end=True)])
        assert cuda.cudnn_sdp_enabled() is setting
        assert seen == [False] * 2  # the last step of the prompt gives the first token
        with pytest.raises(RuntimeError, match="fell over"), without_plans:
            raise RuntimeError("the device fell over")
        assert cuda.cudnn_sdp_enabled() is setting
        engine.close()
    finally:
        cuda.enable_cudnn_sdp(before)
        hook.remove()


@pytest.mark.parametrize("n_requests", [1, 3])
@pytest.mark.parametrize("family", ["llama", "lfm3"])
def test_a_step_reads_no_value_by_itself(
    family: str, n_requests: int, tiny: Any, tokens: Callable[..., list[int]]
) -> None:
    engine = Engine.open(tiny(family), device_tokens=512, probe_tokens=0)
    for at in range(n_requests):
        engine.submit(GenerationRequest(tokens(40 + at, seed=at), 8, ignore_end=True))
    while len(engine.step()) < n_requests:
        pass
    with end_aligned, Reads() as reads:  # type: ignore[no-untyped-call]
        assert len(engine.step()) == n_requests
    engine.close()
    assert reads.n == 0


@pytest.mark.parametrize("replaced", [False, True])
def test_settings_come_back_when_the_last_of_overlapping_passes_is_over(*, replaced: bool) -> None:
    functions: Any = ALL_MASK_ATTENTION_FUNCTIONS
    cuda: Any = torch.backends.cuda
    own = functions["sdpa"]
    if replaced:
        functions["sdpa"] = own
    before = cuda.cudnn_sdp_enabled()
    for entered in (without_plans, end_aligned):
        entered.__enter__()
        entered.__enter__()
        entered.__exit__(None, None, None)
        assert not cuda.cudnn_sdp_enabled()
    assert functions["sdpa"] is not own
    end_aligned.__exit__(None, None, None)
    without_plans.__exit__(None, None, None)
    assert functions["sdpa"] is own
    assert cuda.cudnn_sdp_enabled() is before
    assert ("sdpa" in functions._local_mapping) is replaced
    if replaced:
        del functions["sdpa"]
