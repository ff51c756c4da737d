"""Describes an SGLang engine and its host pools, without importing SGLang."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvgraft import ConfigError
from kvgraft_sglang.identity import Engine, Plain, Pool
from kvgraft_sglang.settings import BackendSettings
from kvgraft_storage import model_files, weights_of

__all__ = ["describe_engine", "describe_pool", "memory_of", "page_parts", "tensor_memory"]

Sglang = Any
"""An object of SGLang or a tensor, which mypy does not see."""

PAGE_FIRST = frozenset({"page_first", "page_first_direct", "page_head"})
"""Layouts in which the buffers of a page, concatenated, are its flat page."""

SIZES = (
    "layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "num_mamba_layers",
    "conv_dtype",
    "conv_state_shapes",
    "temporal_dtype",
    "temporal_state_shape",
    "size_per_token",
    "item_bytes",
    "storage_format_tag",
)
"""Attributes of host pools that describe a page's layout; a pool may lack some."""

COMPUTES = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "context_length",
    "json_model_override_args",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
)
"""Arguments of the server that change computed values."""


def describe_engine(
    config: Sglang, server: Sglang | None, settings: BackendSettings, *, version: str
) -> Engine:
    """An engine's part of the fingerprint.

    Args:
        config: SGLang's `HiCacheStorageConfig`.
        server: SGLang's `ServerArgs`; None if they are not known.
        settings: the backend's settings.
        version: SGLang's version.

    Raises:
        ConfigError: the weights cannot be identified.
    """
    return Engine(
        version=version,
        model=config.model_name or "",
        weights=settings.weights or _weights(server),
        replicated=bool(config.is_mla_model),
        ranks={
            "tp": (config.tp_rank, config.tp_size),
            "pp": (config.pp_rank, config.pp_size),
            "cp": (config.attn_cp_rank, config.attn_cp_size),
            "dcp": (config.dcp_rank, config.dcp_size),
        },
        computes=None if server is None else _computes(server),
        salt=settings.salt,
    )


def describe_pool(name: str, pool: Sglang, *, parts: bool) -> Pool:
    """A host pool's part of the fingerprint.

    Args:
        name: the name under which SGLang registers it.
        pool: SGLang's `HostKVCache`, or an object with the same methods.
        parts: whether its pages are stored from its buffers, if its layout allows it.
    """
    page_nbytes = _page_nbytes(pool)
    return Pool(
        name=name,
        kind=type(pool).__name__,
        layout=str(pool.layout),
        page_size=int(pool.page_size),
        page_nbytes=page_nbytes,
        dtype=str(pool.dtype),
        parts=parts and page_nbytes > 0 and pool.layout in PAGE_FIRST,
        shape=tuple(
            (size, _plain(value))
            for size in SIZES
            if (value := getattr(pool, size, None)) is not None
        ),
    )


def _page_nbytes(pool: Sglang) -> int:
    """Bytes of a page; 0 for a pool without data, such as DeepSeek V4's of the KV cache."""
    page = pool.get_dummy_flat_data_page()
    return int(page.numel() * page.element_size())


def page_parts(pool: Sglang, indices: Sglang, n_pages: int) -> list[tuple[memoryview, ...]]:
    """The buffers of pages in a host pool, in their order.

    Args:
        pool: SGLang's host pool, of a page-first layout.
        indices: token indices of the pages.
        n_pages: how many pages.

    Raises:
        ConfigError: the pool reports another number of buffers.
    """
    addresses, sizes = pool.get_page_buffer_meta(indices)
    if isinstance(sizes, int):
        sizes = [sizes] * len(addresses)
    if not addresses or len(addresses) % n_pages or len(addresses) != len(sizes):
        raise ConfigError(
            f"kvgraft-sglang: {type(pool).__name__} gives {len(addresses)} buffers of "
            f'{n_pages} pages; leave "interface_v1" out of the settings and report it'
        )
    views = [memory_of(address, nbytes) for address, nbytes in zip(addresses, sizes)]
    each = len(views) // n_pages
    return [tuple(views[start : start + each]) for start in range(0, len(views), each)]


def memory_of(address: int, nbytes: int) -> memoryview:
    """A view of memory at an address; the owner must keep the memory."""
    return memoryview((ctypes.c_char * int(nbytes)).from_address(int(address))).cast("B")


def tensor_memory(tensor: Sglang) -> memoryview | None:
    """A view of a tensor's memory; None if it is not contiguous or not in CPU memory."""
    nbytes = tensor.numel() * tensor.element_size()
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        return None
    return memory_of(tensor.data_ptr(), nbytes) if nbytes else memoryview(b"")


def _weights(server: Sglang | None) -> str:
    if server is None:
        raise ConfigError(
            "kvgraft-sglang: SGLang's arguments are missing, so weights, quantization and "
            'overrides are unknown; set "weights" to a text that names all of them'
        )
    place = model_files(server.model_path, getattr(server, "revision", None))
    found = None if place is None else weights_of(place)
    if found is None:
        raise ConfigError(
            f"kvgraft-sglang: no weight files of {server.model_path!r:.80} are on this "
            'machine, so the weights are unknown; set "weights" to their revision'
        )
    return found


def _computes(server: Sglang) -> Plain:
    """Everything besides the weights that changes the values in a page."""
    told = tuple((name, _plain(getattr(server, name, None))) for name in COMPUTES)
    place = model_files(server.model_path, getattr(server, "revision", None))
    return told, None if place is None else _configuration(place)


def _configuration(model: Path) -> str | None:
    """A digest of the model's configuration, RoPE included."""
    path = model / "config.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _plain(value: object) -> Plain:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Sequence):
        return tuple(_plain(each) for each in value)
    return str(value)
