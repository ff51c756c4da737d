"""Hooks around a model's forward pass, which do a session's bookkeeping for every caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from kvgraft_transformers.errors import PassError, SessionError
from kvgraft_transformers.probing import CACHE_ARGUMENTS, takes_positions
from kvgraft_transformers.session import Session
from kvgraft_transformers.session_cache import SessionCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvgraft_transformers.memory import ModelMemory

__all__ = ["watch_forward", "watch_generate"]

HARMLESS = frozenset(
    {"input_ids", "attention_mask", "position_ids", "cache_position", "logits_to_keep", "labels"}
)
"""Tensors that a model accepts with a session: checked, or without effect on cached data."""

OF_EVERY_TOKEN = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Outputs per token, besides the logits, that a caller may ask for."""


def watch_forward(memory: ModelMemory) -> Callable[[], None]:
    """Run `SessionCache.begin` before and `end` after every pass with such a cache.

    If only the last token's logits of a pass are needed, as for a prompt in `generate`, it is
    divided where a recurrent state is worth keeping. Passes with another memory's cache, or none,
    are not touched. After a failed pass, the session can only be aborted.

    Returns: A function that removes the hooks.
    """
    whole_prompts = not takes_positions(memory.model)

    def mine(kwargs: dict[str, Any]) -> SessionCache | None:
        cache = _session_cache(kwargs)
        return cache if cache is not None and cache.memory is memory else None

    def before(
        model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        cache = mine(kwargs)
        memory.running = None
        if cache is None:
            return None
        for session in cache.sessions:
            session.expect_open()
        if whole_prompts:
            kwargs = _without_cached(cache, kwargs)
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(tokens, torch.Tensor):
            raise SessionError("a session finds shared data by its tokens: pass input_ids")
        if torch.is_grad_enabled():
            raise SessionError("pools keep no gradients; run the model under torch.no_grad()")
        if kwargs.get("use_cache") is False:
            raise SessionError("use_cache=False with a session; leave one of them out")
        _check_arguments(cache, tokens.shape[-1], kwargs)
        if "input_ids" in kwargs and _wants_last_only(model, kwargs):
            while (n_first := cache.before_cut(tokens.shape[-1])) < tokens.shape[-1]:
                first, kwargs = _split(kwargs, cache.past, n_first)
                model(**first)
                tokens = kwargs["input_ids"]
        memory.running = cache
        with _kept():
            cache.begin(tokens)
        return args, kwargs

    def after(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache, memory.running = mine(kwargs), None
        if cache is None:
            return
        with _kept():
            cache.end()
        errors = [each.error for each in cache.sessions if each.error is not None]
        if errors and len(cache.sessions) == 1:
            raise errors[0]
        if errors:
            raise PassError(errors, len(cache.sessions), output)

    handles = [
        memory.model.register_forward_pre_hook(before, with_kwargs=True),
        memory.model.register_forward_hook(after, with_kwargs=True),
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


@contextmanager
def _kept() -> Iterator[None]:
    """Tensors made here can be written to later, inside and outside of inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def watch_generate(model: PreTrainedModel) -> Callable[[], None]:
    """Check the arguments of `generate` with a session, before anything is computed.

    The model itself sees only the new tokens, because `generate` leaves out the cached ones.

    Returns: A function that removes the check.
    """
    known = vars(model).get("generate")  # another memory's
    if known is None and not hasattr(model, "generate"):
        return lambda: None

    @wraps(model.generate)
    def generate(self: PreTrainedModel, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        cache = _session_cache(kwargs)
        if cache is not None and cache.memory.model is self:
            _check_prompt(cache, kwargs.get("input_ids") if inputs is None else inputs, kwargs)
        call = type(self).generate if known is None else known.__func__
        return call(self, inputs, *args, **kwargs)

    # a method, so that a copy of the model is not bound to the original
    watched = vars(model)["generate"] = MethodType(generate, model)

    def undo() -> None:
        if vars(model).get("generate") is not watched:
            return  # a later wrapper calls this one: it checks twice and keeps no memory alive
        if known is None:
            del vars(model)["generate"]
        else:
            vars(model)["generate"] = known

    return undo


def _check_prompt(cache: SessionCache, prompt: object, arguments: dict[str, Any]) -> None:
    """Refuse a prompt that is not the sessions', or more new tokens than they can hold.

    Raises:
        SessionError: it names the token or the lengths.
    """
    for session in cache.sessions:
        session.expect_open()
    if not isinstance(prompt, torch.Tensor) or prompt.dim() != 2:
        return  # `generate` or the pass refuses it
    mask = arguments.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape[-1] != prompt.shape[1]:
        return  # only new tokens are given, and the model sees all of them
    new = arguments.get("max_new_tokens")
    for session, row in zip(cache.sessions, prompt.tolist()):
        tokens = row[cache.past - session.computed :]  # without the padding
        session.expect_tokens(tokens, 0)
        needed = max(session.key.n_tokens, session.computed + 1)
        if len(tokens) < needed:
            raise SessionError(
                f"generate was given {len(tokens)} tokens, the session has {session.key.n_tokens} "
                f"and has computed {session.computed}: give at least its first {needed}"
            )
        if isinstance(new, int):
            session.expect_length(len(tokens) + new)


def _wants_last_only(model: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether the output needs only the pass's last tokens."""
    keep = kwargs.get("logits_to_keep")
    more = any(kwargs.get(name, getattr(model.config, name, None)) for name in OF_EVERY_TOKEN)
    return isinstance(keep, int) and keep == 1 and kwargs.get("labels") is None and not more


def _without_cached(cache: SessionCache, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a session's first pass without the tokens that are cached.

    `generate` gives purely recurrent models, which have no positions, the whole prompt, even if
    part of it is cached.
    """
    tokens, past = kwargs.get("input_ids"), cache.past
    if not past or not isinstance(tokens, torch.Tensor):
        return kwargs
    for session, row in zip(cache.sessions, tokens.tolist()):
        prompt = session.key.tokens(0, session.request.prompt).tolist()
        if not past == session.computed == session.cached_tokens or row != prompt:
            return kwargs
    return {**kwargs, "input_ids": tokens[:, past:]}


def _split(
    kwargs: dict[str, Any], past: int, n_first: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a pass over the first `n_first` tokens, and of one over the rest.

    Args:
        kwargs: arguments of the whole pass.
        past: computed columns of the batch.
        n_first: fewer than all.
    """
    first, others = dict(kwargs), dict(kwargs)
    for name in ("input_ids", "position_ids", "cache_position"):
        if kwargs.get(name) is not None:
            first[name], others[name] = kwargs[name][..., :n_first], kwargs[name][..., n_first:]
    if kwargs.get("attention_mask") is not None:
        first["attention_mask"] = kwargs["attention_mask"][..., : past + n_first]
    return first, others


def _session_cache(kwargs: dict[str, Any]) -> SessionCache | None:
    for name in CACHE_ARGUMENTS:
        cache = kwargs.get(name)
        if isinstance(cache, SessionCache):
            return cache
        if isinstance(cache, Session):
            raise SessionError(f"{name} is a Session; give its cache, **session.cache.arguments")
    return None


def _check_arguments(cache: SessionCache, n_new: int, arguments: dict[str, Any]) -> None:
    """Refuse arguments that make a token's data depend on more than the tokens before it.

    A request that reuses the data later has only the tokens.

    Raises:
        SessionError: hidden tokens, other positions, or tensors that are no tokens.
    """
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and name not in HARMLESS:
            raise SessionError(
                f"{name}: a prefix is found by its tokens alone, so other input cannot be "
                "shared; run this input without a session"
            )
    starts = torch.tensor([session.computed for session in cache.sessions])[:, None]
    mask = arguments.get("attention_mask")
    if mask is not None and not cache.made("attention_mask", mask):
        columns = torch.arange(cache.past + n_new)
        expected = columns >= cache.past - starts
        if not isinstance(mask, torch.Tensor) or mask.shape != expected.shape:
            raise SessionError("attention_mask: leave it out, or give one of ones, one per token")
        hidden = (mask.to("cpu").bool() != expected).nonzero()
        if len(hidden):
            raise SessionError(
                f"attention_mask hides token {int(hidden[0, 1])}, and data computed behind it "
                "would be shared; give ones (generate hides padding tokens of a prompt by itself)"
            )
    positions = arguments.get("position_ids")
    if positions is not None and not cache.made("position_ids", positions):
        expected = starts + torch.arange(n_new)
        given = positions.to("cpu")
        if given.dim() == 1:
            given = given[None]
        if given.shape[-1] != n_new or not bool((given == expected).all()):
            raise SessionError(
                f"position_ids: a session's tokens stand at {int(expected[0, 0])}..."
                f"{int(expected[0, -1])}; leave them out"
            )
