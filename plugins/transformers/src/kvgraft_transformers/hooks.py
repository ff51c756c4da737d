"""Hooks around a model's forward pass, so that a session's books follow whoever calls the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kvgraft_transformers.errors import SessionError
from kvgraft_transformers.session_cache import SessionCache

if TYPE_CHECKING:
    from kvgraft_transformers.memory import ModelMemory

__all__ = ["watch_forward"]

HARMLESS = frozenset(
    {"input_ids", "attention_mask", "position_ids", "cache_position", "logits_to_keep", "labels"}
)
"""Tensors a model may be given with a session: checked, or without effect on what it caches."""


def watch_forward(memory: ModelMemory) -> Callable[[], None]:
    """Run `SessionCache.begin` before and `end` after every pass that is given such a cache.

    Passes with another memory's cache, or none, are left alone. After a pass that failed, the
    session is good for nothing but `abort`.

    Returns:
        What removes the hooks.
    """

    def mine(kwargs: dict[str, Any]) -> SessionCache | None:
        cache = _session_cache(kwargs)
        return cache if cache is not None and cache.memory is memory else None

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = memory.running = mine(kwargs)
        if cache is None:
            return
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(tokens, torch.Tensor):
            raise SessionError("a session's tokens decide what can be shared: pass input_ids")
        if torch.is_grad_enabled():
            raise SessionError("pools keep no gradients; run the model under torch.no_grad()")
        if kwargs.get("use_cache") is False:
            raise SessionError("use_cache=False with a session; leave one of them out")
        _check_arguments(cache, tokens.shape[-1], kwargs)
        cache.begin(tokens)

    def after(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache, memory.running = mine(kwargs), None
        if cache is not None:
            cache.end()

    handles = [
        memory.model.register_forward_pre_hook(before, with_kwargs=True),
        memory.model.register_forward_hook(after, with_kwargs=True),
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _session_cache(kwargs: dict[str, Any]) -> SessionCache | None:
    for name in ("past_key_values", "cache_params"):
        cache = kwargs.get(name)
        if isinstance(cache, SessionCache):
            return cache
    return None


def _check_arguments(cache: SessionCache, n_new: int, arguments: dict[str, Any]) -> None:
    """Refuse what would make a token's data depend on more than the tokens before it.

    Whoever shares that data later knows the tokens alone.

    Raises:
        SessionError: hidden tokens, other positions, or tensors that are no tokens.
    """
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and name not in HARMLESS:
            raise SessionError(
                f"{name}: a prefix is found by its tokens alone, what else goes into it cannot be "
                "shared; run this input without a session"
            )
    starts = torch.tensor([session.computed for session in cache.sessions])[:, None]
    mask = arguments.get("attention_mask")
    if mask is not None:
        columns = torch.arange(cache.past + n_new)
        expected = columns >= cache.past - starts
        if not isinstance(mask, torch.Tensor) or mask.shape != expected.shape:
            raise SessionError("attention_mask: leave it out, or give one of ones, one per token")
        hidden = (mask.to("cpu").bool() != expected).nonzero()
        if len(hidden):
            raise SessionError(
                f"attention_mask hides token {int(hidden[0, 1])}, and what is computed behind it "
                "would be shared; give ones (generate hides padding tokens of a prompt by itself)"
            )
    positions = arguments.get("position_ids")
    if positions is not None:
        expected = starts + torch.arange(n_new)
        given = positions.to("cpu")
        if given.dim() == 1:
            given = given[None]
        if given.shape[-1] != n_new or not bool((given == expected).all()):
            raise SessionError(
                f"position_ids: a session's tokens stand at {int(expected[0, 0])}..."
                f"{int(expected[0, -1])}; leave them out"
            )
