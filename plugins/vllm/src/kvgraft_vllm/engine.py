"""Describes a vLLM engine from its configuration, without importing vLLM."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvgraft import ConfigError
from kvgraft_storage import model_files, weights_of
from kvgraft_vllm.identity import Engine, Group, Plain
from kvgraft_vllm.settings import TierSettings

__all__ = ["describe_engine", "log_as_vllm"]

logger = logging.getLogger("kvgraft.vllm")

Vllm = Any
"""An object of vLLM, which mypy does not see."""

VOLATILE = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})
"""Fields of a model's configuration that change no value."""

RANDOM_SEED = frozenset({"xxhash", "xxhash_cbor"})
"""Hash algorithms that vLLM seeds at random where PYTHONHASHSEED is not set."""


def log_as_vllm() -> None:
    """Send the log of `kvgraft` to vLLM's handlers, unless it has its own."""
    mine, its = logging.getLogger("kvgraft"), logging.getLogger("vllm")
    if not mine.hasHandlers() and mine.level == logging.NOTSET:
        mine.setLevel(its.getEffectiveLevel())
        for handler in its.handlers:
            mine.addHandler(handler)


def describe_engine(
    config: Vllm,
    whole: Vllm | None,
    settings: TierSettings,
    *,
    chunk_nbytes: int,
    version: str,
) -> Engine:
    """An engine's part of the fingerprint.

    Args:
        config: vLLM's `OffloadingConfig`.
        whole: vLLM's `VllmConfig`; None if it is not known.
        settings: the tier's settings.
        chunk_nbytes: bytes of a chunk in CPU memory.
        version: vLLM's version.

    Raises:
        ConfigError: the weights cannot be identified.
    """
    weights = settings.weights
    if whole is not None and weights is None:
        weights = _weights(whole.model_config, "model")
    if weights is None:
        raise ConfigError(
            "kvgraft-vllm: vLLM's configuration is missing, so weights, quantization and overrides "
            'are unknown; set "weights" to a text that names all of them'
        )
    parallel = config.parallel
    return Engine(
        version=".".join(version.split(".")[:2]),
        model=Path(config.model.name).name,
        weights=weights,
        dtype=str(config.model.dtype),
        tokens_per_hash=config.cache.tokens_per_hash,
        blocks_per_chunk=config.cache.blocks_per_chunk,
        chunk_nbytes=chunk_nbytes,
        groups=tuple(
            Group(
                tuple(group.layer_names),
                group.tokens_per_block,
                getattr(group, "sliding_window_size_in_chunks", None),
            )
            for group in config.groups
        ),
        layout=(
            config.kv_cache_layout,
            config.canonical_layout,
            config.replicated_layout,
            config.worker_kv_bytes_per_block,
            None if whole is None else str(whole.device_config.device_type),
        ),
        parallel={
            name: getattr(parallel, name)
            for name in ("rank", "world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
        },
        computes=None if whole is None else _computes(whole),
        hashing=None if whole is None else _hashing(whole.cache_config),
        salt=settings.salt,
    )


def _hashing(cache: Vllm) -> Plain:
    algorithm, seed = str(cache.prefix_caching_hash_algo), os.environ.get("PYTHONHASHSEED")
    if algorithm in RANDOM_SEED and seed is None:
        logger.warning(
            "kvgraft-vllm: block hashes of %s differ in every process, so nothing will be found "
            "after a restart; set PYTHONHASHSEED, or --prefix-caching-hash-algo sha256",
            algorithm,
        )
    return algorithm, seed


def _computes(whole: Vllm) -> Plain:
    """Everything besides the weights that changes the values in a chunk."""
    model, cache = whole.model_config, whole.cache_config
    drafts = whole.speculative_config
    return (
        str(model.dtype),
        _text(model.quantization),
        model.max_model_len,  # some RoPE scalings depend on it
        _digest(model.hf_text_config.to_dict()),
        (_text(cache.cache_dtype), _text(getattr(cache, "calculate_kv_scales", None))),
        _text(getattr(getattr(whole, "attention_config", None), "backend", None)),
        None if drafts is None else _drafts(drafts),
    )


def _drafts(drafts: Vllm) -> Plain:
    """The draft model, which has layers and data of its own."""
    model = drafts.draft_model_config
    own = model is not None and model.model is not None and drafts.method != "ngram"
    return _text(drafts.method), _weights(model, "drafting model") if own else None


def _weights(model: Vllm, what: str) -> str:
    place = model_files(model.model, model.revision)
    found = None if place is None else weights_of(place)
    if found is None:
        raise ConfigError(
            f"kvgraft-vllm: no weight files of {what} {model.model!r:.80} are on this machine, "
            'so the weights are unknown; set "weights" to their revision'
        )
    return found


def _digest(fields: Mapping[str, object]) -> str:
    """A digest of a model's configuration, RoPE and overrides included."""
    kept = {name: value for name, value in fields.items() if name not in VOLATILE}
    text = json.dumps(kept, sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()


def _text(value: object) -> str | None:
    return None if value is None else str(getattr(value, "name", value))
