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
