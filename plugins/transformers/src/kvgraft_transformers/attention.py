"""Which of torch's attentions the passes of an engine run with.

An engine's passes have other shapes each time: longer keys at every step, prefixes of any length.
Two defaults are slow with that:

- cuDNN's attention builds a plan for every new shape, 64 ms each on an H200, so a decode step of
  16 ms took 105. Passes run without it, and so with flash attention; whoever runs few shapes and
  wants cuDNN's has it outside of the engine.
- Behind a prefix, transformers makes a mask of queries times keys, because torch's `is_causal` sees
  the first query at the first key; and no fast attention takes masks. Where all that a mask says is
  that the last query stands at the last key, `EndAligned` says so instead.

Everything else, such as padding and windows, keeps transformers' masks.
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
"""The implementation of attention whose masks these are."""


class _WhileAnyRuns:
    """A setting of the process that the first pass inside changes, and the last one puts back.

    Engines may run in several threads.

    Args:
        change: changes it; what puts it back.
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
        del functions[BASE]  # of this registry alone: what others register goes on to count
    except KeyError:
        put_back = partial(functions.__delitem__, BASE)
    else:
        put_back = partial(functions.__setitem__, BASE, before)
    # under the same name, by which models decide what else they do
    functions[BASE] = partial(_mask, before)
    return put_back


without_plans = _WhileAnyRuns(_leave_cudnn_out)
"""Without cuDNN's attention; as it was set before, afterwards."""

end_aligned = _WhileAnyRuns(_align_at_end)
"""Models that compute with SDPA have `EndAligned` for the masks that say the same.

A mask is given where it hides something: none is read back to see whether it does.
"""


@contextmanager
def attention_of_pass(memory: ModelMemory) -> Iterator[None]:
    """The attention of an engine's pass."""
    with ExitStack() as entered:
        entered.enter_context(without_plans)
        if memory.device.type == "cuda":  # others have no attention that is faster without masks
            entered.enter_context(end_aligned)
        yield


class EndAligned(CausalBias):
    """A causal mask whose last query stands at the last key; torch's attention computes with none.

    For everything else that a model does with it, it is the mask `bool [1, 1, n_queries, n_keys]`.

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
        """Attention as `CausalBias` does it; anything else with the mask itself."""
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
    """The mask of `base`, but for one that only places the last query at the last key."""
    n_queries, n_keys = asked["q_length"], asked["kv_length"]
    at_end = asked["q_offset"] + n_queries == asked.get("kv_offset", 0) + n_keys
    causal = mask_function is causal_mask_function and asked.get("allow_is_causal_skip")
    if causal and attention_mask is None and at_end and 1 < n_queries < n_keys:
        return EndAligned(n_queries, n_keys, asked["device"])
    if attention_mask is not None:
        asked["allow_is_causal_skip"] = False
    return base(mask_function=mask_function, attention_mask=attention_mask, **asked)
