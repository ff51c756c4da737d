"""The components of a model that is not loaded, from its configuration file alone.

The model is built on torch's device `meta`, which has shapes and no memory, and runs there over two
tokens. So its layers are described as those of a loaded model are, whatever its size.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from kvgraft import ConfigError
from kvgraft_transformers.architecture import describe_layers
from kvgraft_transformers.errors import UnsupportedModelError
from kvgraft_transformers.probing import describe_failure, probe_shapes

__all__ = ["components_of_config"]


def components_of_config(path: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Options by component, without sizes, of the model that a `config.json` describes.

    Args:
        path: the file, or a checkpoint's directory. Weights are not read.

    Raises:
        ConfigError: a file that cannot be read, or that describes no model of transformers.
        UnsupportedModelError: a layer, or a model, that keeps something no component serves.

    Keys and values have the element type that the file names, bfloat16 where it names none. Cost:
    seconds for the largest models; no memory for their weights.
    """
    with _quiet():
        return _components(_build(_read(Path(path))))


def _components(model: PreTrainedModel) -> dict[str, dict[str, Any]]:
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(model, "is an encoder-decoder; kvgraft serves decoders")
    try:
        with torch.no_grad():
            probe = probe_shapes(model)
    except Exception as error:
        reason = describe_failure(model, error)
        raise UnsupportedModelError(
            model, f"does not run with a dynamic cache: {reason}"
        ) from error
    return describe_layers(model, probe, sparse_on_host=False).components


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' warnings, which are about computing."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _read(path: Path) -> PretrainedConfig:
    if path.is_dir():
        path /= "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; give a model's config.json, or its directory"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error}); give a model's config.json") from error
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if not isinstance(kind, str):
        raise ConfigError(f"{path}: no 'model_type'; give a model's config.json")
    if kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"{path}: model_type {kind!r} is none that the installed transformers has; give the "
            "components instead"
        )
    try:
        # transformers has a form of its own for infinite numbers
        fields, _ = PretrainedConfig.get_config_dict(path, local_files_only=True)
        # how weights are stored has no part in what a layer keeps
        fields.pop("quantization_config", None)
        config = CONFIG_MAPPING[kind].from_dict(fields)
    except Exception as error:
        raise ConfigError(
            f"{path}: {kind}: {' '.join(str(error).split()):.200}; correct the field"
        ) from error
    return config


def _build(config: PretrainedConfig) -> PreTrainedModel:
    """The decoder of a configuration, without memory; that of the text where it has others."""
    text = config.get_text_config(decoder=True)
    chosen = next(
        (each for each in (text, config) if type(each) in MODEL_FOR_CAUSAL_LM_MAPPING), text
    )
    kind = AutoModelForCausalLM if type(chosen) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
    chosen._attn_implementation = "eager"
    # the default for experts asks for one element type, and runs on no other
    chosen._experts_implementation = "batched_mm"
    dtype = getattr(chosen, "dtype", None) or getattr(config, "dtype", None) or torch.bfloat16
    try:
        with torch.device("meta"):
            model: PreTrainedModel = kind.from_config(chosen, dtype=dtype).eval()
    except Exception as error:
        raise ConfigError(
            f"model_type {config.model_type!r}: {' '.join(str(error).split()):.200}; look at the "
            "configuration's fields"
        ) from error
    return model
