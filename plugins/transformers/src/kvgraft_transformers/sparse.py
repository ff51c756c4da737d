"""Attention over rows that are fetched when they are selected.

In a layer with an indexer (DeepSeek-V3.2 and similar models) every query attends to `index_topk`
tokens. Keys and values stay on the host. This attention function, which is registered with
transformers under the name below, copies selected rows into the request's hot buffer and from there
into a staging tensor of the sequence's length. Other rows are zero there. Their weight is exactly
0, so the result is bit for bit that of attention over all rows with the same mask.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvgraft_transformers.errors import UnsupportedModelError

if TYPE_CHECKING:
    from kvgraft_transformers.memory import ModelMemory
    from kvgraft_transformers.session_cache import SessionCache

__all__ = ["route_sparse_attention"]

NAMES = {"eager": "kvgraft_hisparse_eager", "sdpa": "kvgraft_hisparse_sdpa"}
"""Registered names of this attention, by the implementation that it computes with."""

ROUTE = "kvgraft_route"
"""Attribute of an attention module: the memory that it reads and its former attention."""

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def route_sparse_attention(memory: ModelMemory) -> Callable[[], None]:
    """Make a model's indexed layers fetch the rows that they select.

    Returns: A function that restores the model's former attention.

    Raises:
        UnsupportedModelError: an implementation other than eager or SDPA, or attention modules
            that keep no latent rows beside an indexer.
    """
    model = memory.model
    former = str(model.config._attn_implementation)
    if former not in NAMES:
        raise UnsupportedModelError(
            model, f"sparse_on_host computes with eager or sdpa attention, not {former!r}"
        )
    modules = [each for each in model.modules() if hasattr(each, "indexer")]
    if not modules or not all(hasattr(each, "expand_kv") for each in modules):
        raise UnsupportedModelError(
            model, "its attention keeps no latent rows beside an indexer; leave sparse_on_host off"
        )
    own_eager = sys.modules[type(modules[0]).__module__].eager_attention_forward
    base: Attention = ALL_ATTENTION_FUNCTIONS.get_interface(former, own_eager)
    AttentionInterface.register(NAMES[former], attend)
    AttentionMaskInterface.register(NAMES[former], ALL_MASK_ATTENTION_FUNCTIONS[former])
    for module in modules:
        vars(module)[ROUTE] = (memory, base)
    model.set_attn_implementation(NAMES[former])

    def undo() -> None:
        model.set_attn_implementation(former)
        for module in modules:
            del vars(module)[ROUTE]

    return undo


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    indices: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention to the tokens that an indexer selected.

    Args:
        module: the attention module, which expands latent rows and knows its layer.
        query: `[batch, heads, n_new, dim]`.
        key: keys of new tokens, or of all tokens if no session is running.
        value: values, likewise.
        attention_mask: `[batch, 1, n_new, n_tokens]`, boolean or additive.
        indices: selected positions, integer `[batch, n_new, index_topk]`.
        kwargs: arguments for the attention that it computes with.
    """
    memory: ModelMemory
    base: Attention
    memory, base = vars(module)[ROUTE]
    selected = indices.long()
    hidden = torch.ones_like(attention_mask[:, 0], dtype=torch.bool).scatter(
        -1, selected, value=False
    )
    if attention_mask.dtype == torch.bool:
        allowed = attention_mask[:, 0]
        mask = attention_mask & ~hidden[:, None]
    else:
        allowed = attention_mask[:, 0] == 0
        mask = attention_mask.masked_fill(hidden[:, None], torch.finfo(query.dtype).min)
    if memory.running is not None:
        wanted = selected.masked_fill(~allowed.gather(-1, selected), -1)
        latent, rotary = _stage(memory.running, module.layer_idx, wanted, mask.shape[-1])  # type: ignore[arg-type]
        key, value = module.expand_kv(latent, rotary)  # type: ignore[operator]
    return base(module, query, key, value, mask, **kwargs)


def _stage(
    cache: SessionCache, layer: int, wanted: torch.Tensor, n_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The selected rows at their tokens' positions, zero elsewhere.

    Args:
        cache: the running pass's cache.
        layer: the model's layer.
        wanted: columns `[batch, n_new, k]`; -1 for none.
        n_tokens: columns of the padded batch.

    Returns:
        Latent `[batch, 1, n_tokens, rank]` and rotary keys `[batch, 1, n_tokens, rope_dim]`.
    """
    memory = cache.memory
    component = memory.sparse_component
    plan = memory.layers[layer]
    hot = component.hot.layers[layer][0].hot
    staged = hot.new_zeros((len(wanted), n_tokens, hot.shape[-1]))
    at_once = max(1, component.hot_tokens // wanted.shape[-1])
    for row, session in enumerate(cache.sessions):
        padding = cache.past - session.computed
        positions = torch.where(wanted[row] < 0, -1, wanted[row] - padding)
        for some in torch.split(positions, at_once):
            rows = session.hot_buffer.swap_in(layer, some)
            held = some >= 0
            staged[row, some[held] + padding] = hot[rows[held].long()]
    staged = staged.unsqueeze(1)
    return (
        staged[..., : plan.key_dim].contiguous(),
        staged[..., plan.key_dim :].contiguous(),
    )
