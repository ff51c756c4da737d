"""The identity of stored data: everything that must be equal to read another process's data (S8).

Three values go into the cache's fingerprint beside page size, geometry and the tokens themselves:

    model      the model's class and its whole configuration
    weights    every parameter and buffer: name, element type, shape, bytes
    salt       the code that computes with them: versions, processor, attention, precision

A checkpoint's name or commit is not part of it: that stays the same when an adapter is merged or a
weight is changed, and differs between two copies of one model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import importlib_metadata
import torch
import xxhash
from transformers import PreTrainedModel

from kvgraft import ConfigError
from kvgraft_storage import StorageSettings

__all__ = ["digest_weights", "name_model", "name_numerics", "storage_options"]

LAYOUT = 1
"""Version of this package's layout of a model's data in pools; versions share nothing."""

PIECE_NBYTES = 64 << 20
"""Bytes of a weight that are copied to the host and hashed at a time."""

NO_NUMERICS = ("_name_or_path", "architectures", "dtype", "transformers_version")
"""Fields of a configuration that change nothing, or are part of weights or salt."""

KERNELS = (
    "causal-conv1d",
    "flash-attn",
    "flash-linear-attention",
    "kernels",
    "mamba-ssm",
    "torch",
    "transformers",
    "triton",
)
"""Distributions whose version or presence decides the code that a layer runs."""

PRECISIONS = ("cuda.matmul", "cudnn.conv", "mkldnn.matmul", "mkldnn.conv")
"""Torch's settings for the precision of float32 products."""


def storage_options(
    model: PreTrainedModel, given: str | Mapping[str, Any] | StorageSettings
) -> dict[str, Any]:
    """Settings of the storage tier for a model, with its identity except the weights.

    Args:
        model: decides `model` if that is not given, and the first part of the `salt`.
        given: a store's URL or settings.

    Raises:
        ConfigError: neither of them.
    """
    if isinstance(given, StorageSettings):
        options = given.model_dump()
    elif isinstance(given, str):
        options = {"url": given}
    elif isinstance(given, Mapping):
        options = dict(given)
    else:
        raise ConfigError(
            f"storage={given!r:.60}: give a URL such as 'file:/var/cache/kvgraft', or settings"
        )
    options.setdefault("model", name_model(model))
    salts = (name_numerics(model), options.get("salt"))
    return {**options, "salt": "; ".join(str(salt) for salt in salts if salt is not None)}


def name_model(model: PreTrainedModel) -> str:
    """A model's class and a digest of its configuration, with rotary scaling and quantisation."""
    config = model.config.to_dict()
    for field in NO_NUMERICS:
        config.pop(field, None)
    encoded = json.dumps(config, sort_keys=True, default=str).encode()
    kind = type(model)
    return f"{kind.__module__}.{kind.__qualname__} {hashlib.sha256(encoded).hexdigest()[:32]}"


def installed_version(distribution: str) -> str | None:
    """A distribution's version; None if it is not installed."""
    try:
        return importlib_metadata.version(distribution)
    except importlib_metadata.PackageNotFoundError:
        return None


def name_numerics(
    model: PreTrainedModel, version: Callable[[str], str | None] = installed_version
) -> str:
    """The settings that decide how weights compute, except the order of sums.

    Threads, batches and chunks change only that order, so they are not included.

    Args:
        model: the model with its weights.
        version: gives the version of a distribution.
    """
    config = model.config.get_text_config(decoder=True)
    device = torch.device(model.device)
    processor = device.type
    if processor == "cpu":
        processor = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    elif processor == "cuda":
        processor = torch.cuda.get_device_name(device)
    parts = {
        "layout": LAYOUT,
        "processor": processor,
        "attention": getattr(config, "_attn_implementation", None),
        "experts": getattr(config, "_experts_implementation", None),
        "dtypes": "+".join(sorted({str(each.dtype) for each in model.parameters()})),
        "float32": "+".join(_precisions()),
        **{name: found for name in KERNELS if (found := version(name)) is not None},
    }
    return ", ".join(f"{name} {value}" for name, value in parts.items())


def digest_weights(model: PreTrainedModel, piece_nbytes: int = PIECE_NBYTES) -> str:
    """XXH3-128 over all weights and buffers; 10 GB/s per CPU core, without a copy of the model.

    Args:
        model: the model; weights on another device are copied to the host piece by piece.
        piece_nbytes: bytes of a piece; the digest does not depend on it.

    Raises:
        ConfigError: a weight has no bytes here, and is named: on the meta device, spread over
            processes, or quantised by a package that hides them.
    """
    hashed = xxhash.xxh3_128()
    # states of quantised layers are no parameters; rotary frequencies are in no state dict
    tensors = {**dict(model.named_buffers()), **model.state_dict()}
    for name in sorted(tensors):
        tensor = tensors[name]
        try:
            hashed.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
            for piece in _pieces(tensor, piece_nbytes):
                hashed.update(piece)
        except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"storage: weight {name!r} cannot be hashed ({reason:.120}); give storage a "
                "'weights' of your own that no other model uses"
            ) from error
    return f"xxh3-128 {hashed.hexdigest()}"


def _pieces(tensor: torch.Tensor, nbytes: int) -> Iterator[memoryview]:
    """A tensor's bytes, `nbytes` at a time."""
    if tensor.is_meta:
        raise TypeError("it is on the meta device")
    if not tensor.numel():
        return
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, len(flat), nbytes):
        yield flat[start : start + nbytes].cpu().numpy().data


def _precisions() -> Iterator[str]:
    try:
        yield torch.get_float32_matmul_precision()
    except RuntimeError:
        yield "mixed"  # it was set per backend, as below
    for path in PRECISIONS:
        backend, operation = path.split(".")
        place = getattr(getattr(torch.backends, backend), operation, None)
        yield f"{path}={getattr(place, 'fp32_precision', None)}"
