"""Chooses torch's attention for the passes of an engine.

Shapes differ at every pass of an engine: longer keys at every step, prefixes of any length. Two
defaults are slow then:

- cuDNN's attention builds a plan for every new shape, 64 ms each on an H200, so a decode step of 16
  ms took 105 ms. Passes run without it, and so with flash attention.
- Behind a prefix, transformers makes a mask of queries times keys, because torch's `is_causal`
  aligns the first query with the first key, and no fast attention takes masks. If a mask only
  aligns the last query with the last key, `EndAligned` replaces it.

Padding and windows keep transformers' masks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.utils._pytree import tree_map
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

if TYPE_CHECKING:
    from kvgraft_transformers.memory import ModelMemory

__all__ = ["EndAligned", "attention_of_pass", "end_aligned", "without_plans"]

BASE = "sdpa"
"""The implementation of attention whose masks are replaced."""


class _WhileAnyRuns:
    """A setting of the process: the first pass inside changes it, the last one restores it.

    Engines may run in several threads.

    Args:
        change: changes it, and returns a function that restores it.
    """

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
        self._change = change
        self._lock = threading.Lock()
        self._n_inside = 0
        self._put_back: Callable[[], None] = _nothing

    def __enter__(self) -> None:
        with self._lock:
            if not self._n_inside:
                self._put_back = self._change()
            self._n_inside += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._n_inside -= 1
            if not self._n_inside:
                self._put_back()


def _nothing() -> None:
    pass


def _leave_cudnn_out() -> Callable[[], None]:
    cuda: Any = torch.backends.cuda
    before = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(False)
    return partial(cuda.enable_cudnn_sdp, before)


def _align_at_end() -> Callable[[], None]:
    functions = ALL_MASK_ATTENTION_FUNCTIONS
    before = functions[BASE]
    try:
        del functions[BASE]  # only in this registry: entries of others stay in effect
    except KeyError:
        put_back = partial(functions.__delitem__, BASE)
    else:
        put_back = partial(functions.__setitem__, BASE, before)
    # under the same name, because models decide other things by it
    functions[BASE] = partial(_mask, before)
    return put_back


without_plans = _WhileAnyRuns(_leave_cudnn_out)
"""Disables cuDNN's attention."""

end_aligned = _WhileAnyRuns(_align_at_end)
"""Gives models with SDPA `EndAligned` instead of equivalent masks.

Whether a mask hides something is known without reading it back from the device.
"""


@contextmanager
def attention_of_pass(memory: ModelMemory) -> Iterator[None]:
    """The attention of an engine's pass."""
    with ExitStack() as entered:
        entered.enter_context(without_plans)
        if memory.device.type == "cuda":  # no other attention is faster without masks
            entered.enter_context(end_aligned)
        yield


class EndAligned(CausalBias):
    """A causal mask that aligns the last query with the last key, without a tensor for attention.

    In all other operations it is the mask `bool [1, 1, n_queries, n_keys]`.

    Args:
        n_queries: the new tokens.
        n_keys: the computed ones and the new ones.
        home: the device of the mask.
    """

    def __new__(cls, n_queries: int, n_keys: int, home: torch.device) -> EndAligned:
        del n_queries, n_keys, home
        made: EndAligned = torch.Tensor._make_subclass(cls, torch.empty(0))
        return made

    def __init__(self, n_queries: int, n_keys: int, home: torch.device) -> None:
        super().__init__(CausalVariant.LOWER_RIGHT, n_queries, n_keys)
        self.home = home

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        """Attention as `CausalBias` does it; other operations with the mask itself."""
        if func is torch.nn.functional.scaled_dot_product_attention:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-any-return, no-untyped-call]
        args, kwargs = tree_map(_dense, (args, kwargs or {}))
        return func(*args, **kwargs)  # type: ignore[no-any-return]


def _dense(value: object) -> object:
    if not isinstance(value, EndAligned):
        return value
    return value._lower_right(value.home)[None, None]


def _mask(
    base: Callable[..., Any], *, mask_function: Any, attention_mask: Any, **asked: Any
) -> Any:
    """The mask of `base`, unless that only aligns the last query with the last key."""
    n_queries, n_keys = asked["q_length"], asked["kv_length"]
    at_end = asked["q_offset"] + n_queries == asked.get("kv_offset", 0) + n_keys
    causal = mask_function is causal_mask_function and asked.get("allow_is_causal_skip")
    if causal and attention_mask is None and at_end and 1 < n_queries < n_keys:
        return EndAligned(n_queries, n_keys, asked["device"])
    if attention_mask is not None:
        asked["allow_is_causal_skip"] = False
    return base(mask_function=mask_function, attention_mask=attention_mask, **asked)
