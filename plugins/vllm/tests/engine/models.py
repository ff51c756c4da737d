"""Models with random weights, small enough for a CPU, written to a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

__all__ = ["DTYPES", "FAMILIES", "write_model"]

VOCABULARY = 512

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,  # wide, so that a lost chunk changes the output
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {
        "sliding_window": 48,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3_next": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
}
DTYPES = {"llama": "float32", "gemma3_text": "float32", "qwen3_next": "bfloat16"}


def write_model(family: str, directory: Path, seed: int = 1) -> Path:
    """Write a model and a tokenizer of words `t0` to `t511`; returns its directory."""
    place = directory / f"{family}-{seed}"
    if (place / "config.json").exists():
        return place
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config)
    model.to(getattr(torch, DTYPES[family])).save_pretrained(place)
    words = Tokenizer(
        models.WordLevel({f"t{number}": number for number in range(VOCABULARY)}, unk_token="t3")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", bos_token="t1", eos_token="t2", unk_token="t3"
    ).save_pretrained(place)
    return place
