"""Lightning attention: states of a model that accepts no cache but one of its own class.

The family's layers are those of the released checkpoint, a state first. transformers' own cache is
right only where the first layer has keys and values, so it is the reference for that order, and
computing everything at once for the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from kvgraft_transformers import SessionCache
from kvgraft_transformers.probing import cache_argument
from kvgraft_transformers.tiny import build_tiny_model

STATE_FIRST = ["linear_attention", "full_attention"] * 2
KEYS_FIRST = ["full_attention", "linear_attention"] * 2
ENDS = (32, 64, 96, 100, 101, 102)
"""Where passes end: inside a block of 16, at its end, several tokens and one."""


def with_own_cache(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    return continued(model, prompt, MiniMaxCache())


def continued(model: PreTrainedModel, prompt: list[int], cache: Cache) -> torch.Tensor:
    """Logits of one pass per end, as transformers finds the positions."""
    logits, given = [], {cache_argument(model): cache}
    with torch.no_grad():
        for start, end in zip((0, *ENDS), ENDS):
            ids = torch.tensor(prompt[start:end])[None]
            logits.append(model(input_ids=ids, **given, use_cache=True).logits[0])
    return torch.cat(logits)


def all_at_once(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.tensor(prompt)[None], use_cache=False).logits[0]
    return found


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def test_a_sessions_cache_passes_for_the_models_own(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    memory = open_memory(tiny("minimax"))
    session = memory.session(tokens(20))
    assert isinstance(session.cache, MiniMaxCache)
    assert isinstance(session.cache, SessionCache)
    assert len(session.cache) == 4
    session.abort()
    assert memory.architecture.components["mamba"] == {
        "conv_dim": 0,
        "n_heads": 4,
        "head_dim": 16,
        "state_dim": 16,
        "state_dtype": "float32",
        "layers": [0, 2],
        "n_layers": 2,
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_behind_keys_and_values_the_bits_are_those_of_the_models_own_cache(
    open_memory: Any, tokens: Callable[..., list[int]], to_host: Any, dtype: Any
) -> None:
    model = build_tiny_model("minimax", dtype=dtype, layer_types=KEYS_FIRST)
    prompt = tokens(ENDS[-1])
    memory = open_memory(model)
    expected = with_own_cache(model, prompt)
    with memory.session(prompt, chunk_tokens=32) as session:
        assert torch.equal(continued(model, prompt, session.cache), expected)
    to_host(memory)
    with memory.session(prompt, chunk_tokens=32) as session:
        assert session.cached_tokens == 96
        rest = torch.tensor(prompt[96:100])[None]
        with torch.no_grad():
            reused = model(input_ids=rest, **session.cache.arguments, use_cache=True).logits[0]
        assert torch.equal(reused, expected[96:100])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layer_types", [STATE_FIRST, KEYS_FIRST])
def test_in_double_precision_passes_of_any_length_continue_a_state_rightly(
    open_memory: Any, tokens: Callable[..., list[int]], attention: Any, layer_types: Any
) -> None:
    model = build_tiny_model("minimax", dtype=torch.float64, layer_types=layer_types)
    model.set_attn_implementation(attention)
    prompt = tokens(ENDS[-1])
    with open_memory(model).session(prompt, chunk_tokens=32) as session:
        said = continued(model, prompt, session.cache)
    assert distance(said, all_at_once(model, prompt)) <= 1e-14


def test_the_models_own_cache_is_wrong_behind_a_state(
    tiny: Any, tokens: Callable[..., list[int]]
) -> None:
    """Known in transformers 5.23 and 5.24; the README says so, and must not once this fails."""
    model, prompt = tiny("minimax", torch.float64), tokens(ENDS[-1])
    assert distance(with_own_cache(model, prompt), all_at_once(model, prompt)) > 0.1


def test_prefill_in_chunks_answers_as_prefill_at_once(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    model, ids = tiny("minimax"), torch.tensor(tokens(100))[None]
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **settings)
    memory = open_memory(model)
    for cached in (0, 96):
        with memory.session(ids, max_new_tokens=24, chunk_tokens=32) as session:
            assert session.cached_tokens == cached
            said = model.generate(ids, **session.cache.arguments, prefill_chunk_size=32, **settings)
        assert torch.equal(said, expected)
