"""Small models of every verified family, with random weights.

They are for tests and demonstrations, and need no download. Weights have a wide spread, and
recurrences a long memory, so that a lost page or state changes the model's output. With ordinary
initialisation a state fades within a few tokens, and its loss would be invisible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from kvgraft import ConfigError

__all__ = ["FAMILIES", "TinyFamily", "build_tiny_model"]

VOCABULARY = 512

SPREAD = 0.1
"""Standard deviation of the weights; 0.02 is usual."""

MOST_PARAMETERS = 100_000_000
"""Most parameters of a tiny model."""

DECAY, STEP = -3.0, -1.0
"""`A_log` and `dt_bias` of recurrences: a state keeps half of itself over tens of tokens."""


@dataclass(frozen=True, slots=True)
class TinyFamily:
    """One architecture.

    Attributes:
        config: differences from the common small configuration; None drops a field.
        attention: the implementation of attention.
        recurrent: whether other chunk lengths change its result beyond rounding of sums.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"
    recurrent: bool = False


COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "initializer_range": SPREAD,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT: dict[str, Any] = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "mamba_expand": 2,
}
SLIDING_FULL = ["sliding_attention", "full_attention"] * 2
LINEAR_FULL = ["linear_attention", "full_attention"] * 2

FAMILIES: dict[str, TinyFamily] = {
    "llama": TinyFamily(),
    "qwen3": TinyFamily(),
    "gemma3_text": TinyFamily({"sliding_window": 48, "layer_types": SLIDING_FULL}),
    "gemma4_text": TinyFamily(
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "sliding_window": 40,
            "num_kv_shared_layers": 2,
            "global_head_dim": 32,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16,
        }
    ),
    "gpt_oss": TinyFamily(
        {
            "sliding_window": 40,
            "layer_types": SLIDING_FULL,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        attention="eager",
    ),
    "mimo_v2_flash": TinyFamily(
        EXPERTS
        | {
            "sliding_window": 40,
            "head_dim": 24,
            "v_head_dim": 16,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
        attention="eager",
    ),
    "llama4_text": TinyFamily(
        {
            "attention_chunk_size": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 128,
        }
    ),
    "deepseek_v3": TinyFamily(LATENT | EXPERTS | {"first_k_dense_replace": 1}),
    "deepseek_v32": TinyFamily(
        LATENT
        | EXPERTS
        | {"first_k_dense_replace": 1, "index_topk": 32, "index_head_dim": 16, "index_n_heads": 16}
    ),
    "bamba": TinyFamily(MAMBA2 | {"head_dim": None, "attn_layer_indices": [1, 3]}, recurrent=True),
    "falcon_h1": TinyFamily(MAMBA2 | {"mamba_d_ssm": 128}, recurrent=True),
    "nemotron_h": TinyFamily(
        {
            "num_hidden_layers": None,
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 16,
            "expand": 2,
        },
        recurrent=True,
    ),
    "mamba2": TinyFamily(
        {
            "num_key_value_heads": None,
            "num_hidden_layers": 2,
            "state_size": 16,
            "num_heads": 8,
            "n_groups": 2,
            "chunk_size": 16,
            "expand": 2,
        },
        attention="eager",
        recurrent=True,
    ),
    "qwen3_next": TinyFamily(
        {
            "layer_types": LINEAR_FULL,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "num_experts_per_tok": 2,
            "num_experts": 4,
        },
        recurrent=True,
    ),
    "kimi_linear": TinyFamily(
        LATENT
        | {
            "q_lora_rank": None,
            "layer_types": LINEAR_FULL,
            "moe_intermediate_size": 32,
            "num_experts_per_token": 2,
            "num_experts": 4,
            "num_shared_experts": 1,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "linear_conv_kernel_dim": 4,
        },
        recurrent=True,
    ),
    "minimax": TinyFamily(
        {
            "layer_types": LINEAR_FULL,
            "block_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        recurrent=True,
    ),
    "lfm2": TinyFamily(
        {"head_dim": None, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}
    ),
    "lfm3": TinyFamily(
        {
            "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
            "sliding_window": 40,
        }
    ),
}
"""The families whose results were compared, by transformers' `model_type`."""


def build_tiny_model(
    family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **config: Any
) -> PreTrainedModel:
    """Build a model of a family with random weights, in evaluation mode, on the CPU.

    Args:
        family: a name of `FAMILIES`, or any `model_type` of transformers with `config`.
        dtype: element type of weights and caches.
        seed: seed of the weights.
        config: fields that override the family's configuration.

    Raises:
        ConfigError: transformers does not have the family, or the model has more than
            `MOST_PARAMETERS`, which is checked without taking memory.

    Effects: seeds torch's generator and restores its state.
    """
    known = FAMILIES.get(family, TinyFamily())
    fields = {**COMMON, **known.config, **config}
    try:
        settings = AutoConfig.for_model(
            family, **{name: value for name, value in fields.items() if value is not None}
        )
    except ValueError as error:
        raise ConfigError(
            f"no family {family!r} in transformers; here are {', '.join(FAMILIES)}"
        ) from error
    if family in FAMILIES:
        settings._attn_implementation = known.attention
    if dtype == torch.float64:
        # grouped products of experts exist only for lower precisions
        settings._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        _check_size(family, settings, dtype)
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype).eval()
        _draw_padding(model)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith("A_log"):
                weights.fill_(DECAY)
            elif name.endswith("dt_bias"):
                weights.fill_(STEP)
    assert isinstance(model, PreTrainedModel)
    return model


def _check_size(family: str, settings: PretrainedConfig, dtype: torch.dtype) -> None:
    """Refuse a model that is not tiny, before it takes memory.

    A family with inner models, as for images, keeps the default fields of these.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    n_parameters = sum(weights.numel() for weights in model.parameters())
    if n_parameters > MOST_PARAMETERS:
        inner = [f"{name}={{...}}" for name in settings.sub_configs]
        close = get_close_matches(family, FAMILIES, n=1)
        raise ConfigError(
            f"family {family!r}: {n_parameters:,} parameters, "
            f"{n_parameters * dtype.itemsize / 1e9:.1f} GB; a tiny model has at most "
            f"{MOST_PARAMETERS:,}: give smaller {' or '.join(inner) or 'fields'}"
            + (f", or take {close[0]!r}" if close and close[0] != family else "")
        )


def _draw_padding(model: PreTrainedModel) -> None:
    """Give the padding token an embedding, since a random model produces it like any other.

    Its embedding is zero otherwise, and so is every score of an indexer. All selections would be
    ties, and no two computations would agree.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            with torch.no_grad():
                module.weight[module.padding_idx].normal_(0.0, SPREAD)
