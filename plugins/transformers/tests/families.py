"""Tiny configurations of every decoder family of transformers, by shrinking the defaults.

Fields that a configuration has are made small; `DIFFERENT` has a family's further settings.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvgraft_transformers.tiny import COMMON, EXPERTS, FAMILIES, LATENT, MAMBA2, build_tiny_model

__all__ = ["SURVEYED", "build_family"]

LAYERS, HEADS, WIDTH, WINDOW, CONTEXT = 4, 4, 64, 48, 8192

SMALL: dict[str, Any] = {
    **COMMON,
    **LATENT,
    **EXPERTS,
    **MAMBA2,
    **dict.fromkeys(["n_layer", "n_layers", "num_layers", "decoder_layers"], LAYERS),
    **dict.fromkeys(["n_head", "n_heads", "num_heads", "decoder_attention_heads"], HEADS),
    **dict.fromkeys(["n_embd", "d_model", "embedding_size", "hidden_dim", "lru_width"], WIDTH),
    **dict.fromkeys(["ffn_dim", "decoder_ffn_dim", "n_inner", "d_ff", "ffn_hidden_size"], 128),
    **dict.fromkeys(["dff", "dim_ff", "dim_feedforward"], 128),
    **dict.fromkeys(["n_positions", "n_ctx", "max_target_positions"], CONTEXT),
    **dict.fromkeys(["sliding_window", "attention_chunk_size", "attention_window_size"], WINDOW),
    **dict.fromkeys(["window_size"], WINDOW),
    **dict.fromkeys(["num_experts", "num_local_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_token", "moe_k", "moe_topk", "n_mamba_heads"], 2),
    **dict.fromkeys(["n_shared_experts", "num_shared_experts", "moe_num_shared_experts"], 1),
    **dict.fromkeys(["shared_expert_intermediate_size", "index_topk"], 32),
    **dict.fromkeys(["state_size", "ssm_state_size", "chunk_size", "index_head_dim"], 16),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"], 16),
    **dict.fromkeys(["dim_head", "d_kv", "hidden_size_per_layer_input"], 16),
    **dict.fromkeys(["rotary_dim", "mamba_dt_rank", "time_step_rank"], 8),
    **dict.fromkeys(["encoder_attention_heads", "linear_num_value_heads", "index_n_heads"], 4),
    **dict.fromkeys(["linear_conv_kernel_dim", "linear_num_heads"], 4),
    **dict.fromkeys(["num_kv_heads", "n_groups", "linear_num_key_heads"], 2),
    **dict.fromkeys(["encoder_layers", "mamba_n_groups", "moe_layer_start_index"], 1),
    **dict.fromkeys(["attention_dropout", "hidden_dropout", "dropout", "decoder_layerdrop"], 0.0),
    "encoder_ffn_dim": 64,
    "vocab_size_per_layer_input": COMMON["vocab_size"],
    "attention_types": [[["global", "local"], 2]],
    "conv_L_cache": 3,
    "use_mamba_kernels": False,
}
"""Small values of the fields that configurations have."""

_LATENT = {"head_dim": None, "num_key_value_heads": 4}
_NARROW = {**_LATENT, "head_dim": 8}
_CAUSAL = {"is_decoder": True}
_DECODER = {"num_hidden_layers": LAYERS, "encoder_layers": LAYERS}
_SCAN = {"head_dim": None, "num_key_value_heads": None, "layer_types": None}
_HEADS = {"head_dim": WIDTH // HEADS}

DIFFERENT: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["deepseek_v2", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "axk2"], _LATENT),
    **dict.fromkeys(["bailing_hybrid", "youtu", "dots3_note_text"], _LATENT),
    **dict.fromkeys(["axk1", "longcat_flash"], _NARROW),
    **dict.fromkeys(["bart", "bigbird_pegasus", "blenderbot", "blenderbot-small"], _DECODER),
    **dict.fromkeys(["marian", "mbart", "mvp", "pegasus", "plbart", "whisper"], _DECODER),
    **dict.fromkeys(["hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"], _HEADS),
    **dict.fromkeys(["mamba", "falcon_mamba"], _SCAN),
    **dict.fromkeys(["bert", "bert-generation", "big_bird", "camembert"], _CAUSAL),
    **dict.fromkeys(["data2vec-text", "electra", "ernie", "megatron-bert", "rembert"], _CAUSAL),
    **dict.fromkeys(["roberta", "roberta-prelayernorm", "roc_bert", "roformer"], _CAUSAL),
    **dict.fromkeys(["xlm-roberta", "xlm-roberta-xl"], _CAUSAL),
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "jamba": {
        "head_dim": None,
        "layer_types": None,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "head_dim": None},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "falcon": {"head_dim": None},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "altup_num_inputs": 2,
        "laurel_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"] * 2,
        "num_buckets": 4,
        "lsh_attn_chunk_length": 16,
        "local_attn_chunk_length": 16,
    },
}

NOT_SMALL = frozenset(
    [
        # of images or sound as well; their text models are families of their own
        *["emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "got_ocr2", "llama4"],
        *["mllama", "moss_transcribe_diarize", "phi4_multimodal", "qwen3_5", "qwen3_5_moe"],
        *["qwen4_exp", "dots3_note", "musicgen", "musicgen_melody", "git"],
        # which draft for another model, or read bytes in patches
        *["gemma4_assistant", "gemma4_unified_assistant", "blt"],
        # whose configurations want more than small numbers
        *["cohere_compass_text", "dbrx", "prophetnet", "qwen4_exp_text", "recurrent_gemma"],
    ]
)
"""Families that this cannot make small."""

SURVEYED = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in NOT_SMALL]


def build_family(
    family: str, *, dtype: torch.dtype = torch.float32, **config: Any
) -> PreTrainedModel:
    """A tiny model of a family with random weights; see `build_tiny_model`."""
    if family in FAMILIES:
        return build_tiny_model(family, dtype=dtype, **config)
    kind = CONFIG_MAPPING[family]
    defaults = kind()
    aliases = getattr(kind, "attribute_map", {})
    known = set(defaults.to_dict()) | set(aliases)
    # `build_tiny_model` sets these; None leaves them out again
    fields: dict[str, Any] = dict.fromkeys(COMMON)
    for name, value in SMALL.items():
        prop = getattr(kind, name, None)
        settable = not isinstance(prop, property) or prop.fset is not None
        if name in known and settable and aliases.get(name) not in SMALL:
            fields[name] = value
    types = getattr(defaults, "layer_types", None)
    if types and "layer_types" not in DIFFERENT.get(family, {}):
        kinds = list(dict.fromkeys(types))
        fields["layer_types"] = [kinds[index % len(kinds)] for index in range(LAYERS)]
    return build_tiny_model(
        family, dtype=dtype, **{**fields, **DIFFERENT.get(family, {}), **config}
    )
