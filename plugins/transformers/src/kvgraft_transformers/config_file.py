"""The components of a model that is not loaded, from its configuration file alone.

The model is built on torch's device `meta`, which has shapes and no memory, and runs there over two
tokens. So its layers are described like those of a loaded model, of any size. Operators that need
values get arbitrary ones: the routing of tokens does not change what attention keeps.

Nothing is computed, so this also describes models that transformers cannot resume and another
engine can.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from kvgraft import ConfigError
from kvgraft_transformers.architecture import describe_layers
from kvgraft_transformers.errors import UnsupportedModelError
from kvgraft_transformers.probing import (
    CACHE_ARGUMENTS,
    check_kind,
    describe_failure,
    probe_shapes,
)

__all__ = ["components_of_config"]

MOST_LAYERS = 2000
"""Most layers; the deepest published models have about two hundred."""

NEARLY = 0.85
"""Similarity above which another field was probably meant; `torch_dtype` is not `dtype`."""

CROSS_ATTENTION = ("cross_attention", "cross_attn", "crossattention", "encoder_attn")
"""Modules of transformers whose keys come from elsewhere than the prompt."""

logger = getLogger("kvgraft")

META = torch.device("meta")


def components_of_config(path: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Options by component, without sizes, of the model that a `config.json` describes.

    Args:
        path: the file, or a checkpoint's directory. Weights are not read.

    Raises:
        ConfigError: the file cannot be read, or it describes no model of transformers.
        UnsupportedModelError: a layer or the model keeps something that no component serves.

    Keys and values have the element type that the file names, bfloat16 where it names none. Cost:
    seconds for the largest models; no memory for their weights.
    """
    with _quiet():
        return _components(_read(Path(path)))


def _components(config: PretrainedConfig) -> dict[str, dict[str, Any]]:
    if config.is_encoder_decoder:
        raise ConfigError(
            f"model_type {config.model_type!r}: is an encoder-decoder, whose layers also attend to "
            "an encoder's output, which no component keeps; kvgraft serves decoders"
        )
    model = _build(config)
    _expect_decoder(model)
    _note_other_inputs(model)
    try:
        with torch.no_grad(), _WithoutValues():  # type: ignore[no-untyped-call]
            probe = probe_shapes(model)
    except Exception as error:
        _expect_even_heads(model.config)
        reason = describe_failure(model, error)
        raise UnsupportedModelError(
            model, f"its layers could not be found by a run without memory: {reason}"
        ) from error
    return describe_layers(model, probe, sparse_on_host=False, check=check_kind).components


def _expect_even_heads(config: PretrainedConfig) -> None:
    """Refuse numbers of attention heads that key-value heads do not divide.

    Raises:
        ConfigError: it is refused.
    """
    names = ("num_attention_heads", "num_key_value_heads")
    heads = [each for name in names if isinstance(each := getattr(config, name, None), int)]
    if len(heads) == len(names) and heads[1] > 0 and heads[0] % heads[1]:
        raise ConfigError(
            f"model_type {config.model_type!r}: num_attention_heads is {heads[0]}, no multiple of "
            f"num_key_value_heads, {heads[1]}; correct the fields"
        )


def _expect_decoder(model: PreTrainedModel) -> None:
    """Refuse a model whose tokens attend to later tokens, or that keeps nothing.

    Raises:
        UnsupportedModelError: it is refused.
    """
    attentions = [
        getattr(each, "is_causal", getattr(each, "is_decoder", None))
        for each in model.modules()
        if "attention" in type(each).__name__.lower()
    ]
    # `causal` is a field of the whole model (XLM, FlauBERT); its modules do not say it
    config = model.config
    told = [*attentions, getattr(config, "causal", None)]
    told = [each for each in told if isinstance(each, bool)]
    if told and not any(told):
        fields = [name for name in ("causal", "is_decoder") if getattr(config, name, None) is False]
        decoder = f"; with {fields[0]} set it is a decoder" if fields else ""
        raise UnsupportedModelError(
            model,
            "is an encoder: its tokens attend to later ones, so no prompt can reuse a prefix of "
            f"another{decoder}",
        )
    if not {*CACHE_ARGUMENTS} & set(inspect.signature(model.forward).parameters):
        raise UnsupportedModelError(
            model,
            "takes no cache (no argument cache or past_key_values): it is no decoder of text, or "
            "keeps what it read in an argument of its own",
        )


def _note_other_inputs(model: PreTrainedModel) -> None:
    """Say that layers attend to other things than the prompt too, which no component keeps."""
    names = [name.rpartition(".")[2].lower() for name, _ in model.named_modules()]
    n_layers = sum(each in CROSS_ATTENTION for each in names)
    if n_layers:
        logger.warning(
            "note: model_type %r: %d layers attend to other inputs as well (an image, an encoder's "
            "output), whose keys and values are not counted; add them to each request's memory",
            *(model.config.model_type, n_layers),
        )


class _WithoutValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets operators that need values run on tensors without values.

    If tokens are routed, one index is chosen, and all rows are in the first group.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor) or not first.is_meta:
            return func(*args, **kwargs)
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default:
            return torch.ones((), dtype=first.dtype).item()
        if func is aten.nonzero.default:
            return first.new_empty((min(first.numel(), 1), first.dim()), dtype=torch.int64)
        if func is aten.index.Tensor:
            return func(first, [place for index in args[1] for place in _places(index)])
        if func is aten._to_copy.default and torch.device(kwargs.get("device") or "meta") != META:
            return torch.ones(first.shape, dtype=kwargs.get("dtype") or first.dtype)
        if func is aten.split_with_sizes.default:
            sizes, dim = args[1], args[2] if len(args) > 2 else 0
            if sum(sizes) != first.shape[dim]:
                sizes = [first.shape[dim], *(0 for _ in sizes[1:])]
            return func(first, sizes, dim)
        return func(*args, **kwargs)


def _places(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    """An index as numbers; for a mask, one position."""
    if index is None or index.dtype not in (torch.bool, torch.uint8) or not index.is_meta:
        return [index]
    return [index.new_empty(min(index.numel(), 1), dtype=torch.int64) for _ in index.shape]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences transformers' warnings, which are about computing."""
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
        # transformers writes infinite numbers in its own form
        fields, _ = PretrainedConfig.get_config_dict(path, local_files_only=True)
        # the storage of weights does not change what a layer keeps
        fields.pop("quantization_config", None)
        config = CONFIG_MAPPING[kind].from_dict(fields)
    except Exception as error:
        raise ConfigError(
            f"{path}: {kind}: {' '.join(str(error).split()):.200}; correct the field"
        ) from error
    _note_misspelt(path, fields, type(config))
    return config


def _note_misspelt(path: Path, fields: Mapping[str, Any], read: type[PretrainedConfig]) -> None:
    """Log each unknown field that resembles a known one that the file lacks."""
    own = set(inspect.signature(read).parameters)
    known = own | set(inspect.signature(PretrainedConfig).parameters) | set(read.attribute_map)
    for name in sorted(set(fields) - known - set(dir(read))):
        near = get_close_matches(name, own - set(fields), n=1, cutoff=NEARLY)
        if near:
            logger.warning(
                "note: %s: %s has no field %r, so its default counts; did you mean %r?",
                *(path, read.model_type, name, near[0]),
            )


def _build(config: PretrainedConfig) -> PreTrainedModel:
    """The decoder of a configuration, without memory; the text decoder if it has several."""
    text = config.get_text_config(decoder=True)
    built, chosen = _class_for(text, config)
    _expect_layers(chosen)
    chosen._attn_implementation = "eager"
    # the default for experts requires one element type
    chosen._experts_implementation = "batched_mm"
    dtype = getattr(chosen, "dtype", None) or getattr(config, "dtype", None) or torch.bfloat16
    try:
        with torch.device("meta"):
            return built._from_config(chosen, dtype=dtype).eval()
    except Exception as error:
        raise ConfigError(
            f"model_type {config.model_type!r}: {' '.join(str(error).split()):.200}; check the "
            "configuration's fields"
        ) from error


def _class_for(
    text: PretrainedConfig, config: PretrainedConfig
) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """The class of the smallest model with the text's decoder, and its configuration.

    Raises:
        ConfigError: transformers has none.
    """
    for each in (text, config):
        found = _mapped(MODEL_FOR_CAUSAL_LM_MAPPING, each)
        if found is not None:
            return found, each
    for each in (text, config):
        found = _mapped(MODEL_MAPPING, each) or _own_class(each)
        if found is not None:
            return found, each
    raise ConfigError(
        f"model_type {config.model_type!r}: transformers has no model of this configuration alone, "
        "it is a part of others; give the whole model's config.json"
    )


def _mapped(mapping: Any, config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class that transformers maps a configuration to; some that it names do not exist."""
    try:
        classes = mapping[type(config)]
    except (KeyError, ValueError):
        return None
    found: type[PreTrainedModel] = classes[0] if isinstance(classes, tuple) else classes
    return found


def _own_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """A model class beside its configuration that no mapping names; one that predicts tokens."""
    try:
        beside = importlib.import_module(
            type(config).__module__.replace("configuration_", "modeling_")
        )
    except ImportError:
        return None
    found = [
        each
        for each in vars(beside).values()
        if isinstance(each, type)
        and issubclass(each, PreTrainedModel)
        and getattr(each, "config_class", None) is type(config)
        and each.__name__.endswith(("ForCausalLM", "Model"))
        and not each.__name__.endswith("PreTrainedModel")
    ]
    return min(found, key=lambda each: not each.__name__.endswith("ForCausalLM"), default=None)


def _expect_layers(config: PretrainedConfig) -> None:
    """Refuse more layers than a model can have.

    Raises:
        ConfigError: it is refused.
    """
    n_layers = getattr(config, "num_hidden_layers", None)
    if isinstance(n_layers, int) and not 1 <= n_layers <= MOST_LAYERS:
        raise ConfigError(
            f"model_type {config.model_type!r}: num_hidden_layers is {n_layers:,}, expected 1 to "
            f"{MOST_LAYERS:,}; correct the field"
        )
