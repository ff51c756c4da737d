"""The self-check when a model is opened: sessions against one pass of the plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig

from kvgraft import TokenKey
from kvgraft_transformers import ModelMemory, SessionError, UnsupportedModelError
from kvgraft_transformers.engine import Engine, EngineSettings, GenerationRequest
from kvgraft_transformers.tiny import FAMILIES, build_tiny_model

from .families import build_family


def refusal(model: torch.nn.Module, **settings: Any) -> str:
    with pytest.raises(UnsupportedModelError) as refused:
        ModelMemory.open(model, page_size=16, device_tokens=256, **settings)
    line = str(refused.value)
    assert "\n" not in line
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    return line


@pytest.mark.parametrize(("dtype", "spread"), [(torch.float32, 0.1), (torch.bfloat16, 0.02)])
def test_a_state_that_restarts_in_chunks_is_refused_with_its_layer(dtype: Any, spread: Any) -> None:
    model = build_family("zamba", dtype=dtype, initializer_range=spread)
    assert "layer 0: the state that a sequence in chunks leaves is 0." in refusal(model)


@pytest.mark.parametrize("window", [40, 3000])
def test_a_mask_that_ignores_its_window_is_refused_however_wide_that_is(window: Any) -> None:
    model = build_family("moshi", sliding_window=window)
    assert "differently" in refusal(model)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("inkling_text", "layer 0 (hybrid_sliding) keeps convolution states of shapes"),
        ("zaya", "layer 0 (hybrid) keeps a recurrent state of shape ["),
        ("cpmant", "is not causal"),
        pytest.param(
            "openai-gpt",
            "no argument cache or past_key_values): it returns no state",
            marks=pytest.mark.long,
        ),
        ("xlm", "no argument cache or past_key_values"),
        ("xlnet", "no argument cache or past_key_values): its forward pass returns mems"),
        ("reformer", "its forward pass returns past_buckets_states"),
        ("rwkv", "its forward pass returns state instead"),
    ],
)
def test_a_refusal_gives_the_models_own_reason(family: str, reason: Any) -> None:
    assert reason in refusal(build_family(family))


def test_a_model_that_sees_later_tokens_is_refused_as_not_causal() -> None:
    config = BertConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    line = refusal(AutoModelForCausalLM.from_config(config).eval())
    assert "is not causal" in line
    assert "set is_decoder=True" in line


def test_a_pass_that_fails_is_refused_with_the_module() -> None:
    model = build_tiny_model("llama")

    def fail(_: object, args: tuple[torch.Tensor, ...]) -> None:
        if args and args[0].shape[1] == 16:
            raise KeyError("a table of\nthe device")

    model.model.layers[2].mlp.register_forward_pre_hook(fail)
    line = refusal(model)
    assert "does not run in a session: model.layers.2" in line
    assert "KeyError: 'a table of\\nthe device'" in line


@pytest.mark.parametrize("family", ["bart", "marian", "trocr", "roformer"])
def test_a_model_without_positions_runs_without_padding(
    family: str, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    memory = open_memory(build_family(family), probe_tokens=256)
    first, second = memory.session(tokens(30)), memory.session(tokens(20, seed=2))
    with torch.no_grad():
        for session in (first, second):
            ids = torch.tensor([session.key.tokens(0, session.key.n_tokens - 1).tolist()])
            memory.model(input_ids=ids, **session.cache.arguments)
        both = memory.session_cache([first, second])
        ids = torch.tensor([tokens(30)[-1:], tokens(20, seed=2)[-1:]])
        with pytest.raises(SessionError, match=r"of 19 to 29 tokens in one pass: .* padded batch"):
            memory.model(input_ids=ids, **both.arguments)
    for session in (first, second):
        session.abort()


def test_an_engine_groups_by_length_where_padding_is_wrong(
    tokens: Callable[..., list[int]],
) -> None:
    model = build_family("bart", dtype=torch.float64)
    model.generation_config.forced_eos_token_id = None
    prompts = [tokens(30), tokens(20, seed=2), tokens(30, seed=3)]
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = [
        model.generate(torch.tensor([each]), **settings)[0, len(each) :].tolist()
        for each in prompts
    ]
    engine = Engine.open(model, EngineSettings(), page_size=16, device_tokens=512)
    asked = [GenerationRequest(each, 6, ignore_end=True) for each in prompts]
    assert [each.tokens for each in engine.generate(asked)] == expected
    assert engine.totals.rows > engine.totals.passes, "equal lengths still share passes"
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.long
def test_rounding_refuses_no_verified_family(family: str, dtype: Any) -> None:
    with ModelMemory.open(build_tiny_model(family, dtype=dtype), device_tokens=256) as memory:
        assert memory.self_check.n_tokens
        assert memory.self_check.padding is None


@pytest.mark.parametrize("family", ["gemma3_text", "minimax"])
def test_rounding_of_bfloat16_refuses_nothing(family: str) -> None:
    model = build_tiny_model(family, dtype=torch.bfloat16)
    with ModelMemory.open(model, device_tokens=256) as memory:
        assert memory.self_check.padding is None


def test_opening_leaves_the_model_as_it_was(tokens: Callable[..., list[int]]) -> None:
    model = build_tiny_model("bamba", dtype=torch.bfloat16).train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    weights = {name: (each, each.data_ptr(), each.dtype) for name, each in model.named_parameters()}
    attributes = [set(vars(module)) for module in model.modules()]
    settings = model.generation_config.to_dict()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    memory = ModelMemory.open(model, page_size=16, device_tokens=256, guard="on")
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert [set(vars(module)) for module in model.modules()][1:] == attributes[1:]
    for name, each in model.named_parameters():
        assert (each, each.data_ptr(), each.dtype) == weights[name]
    assert model.generation_config.to_dict() == settings
    assert torch.is_grad_enabled()
    assert not memory.cache.requests
    assert memory.cache.begin(TokenKey(tokens(40))).anchor_tokens == 0
    memory.close()
    assert not model._forward_hooks
    assert [set(vars(module)) for module in model.modules()] == attributes


def test_a_short_context_is_kept_to() -> None:
    model = build_family("gpt2", n_positions=32)
    with ModelMemory.open(model, page_size=16, device_tokens=256) as memory:
        assert 0 < memory.self_check.n_tokens <= 32


def test_nothing_is_tried_where_that_is_asked() -> None:
    model = build_family("zamba")
    with ModelMemory.open(model, page_size=16, device_tokens=256, probe_tokens=0) as memory:
        assert memory.self_check.n_tokens == 0
