"""Dynamo's requests and answers, in the engine's words.

Dynamo's frontend has applied the chat template and made tokens of the text. It looks for stop
strings in the answer itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from kvgraft import ConfigError
from kvgraft_transformers.engine import (
    FinishReason,
    Generation,
    GenerationRequest,
    NewToken,
    Sampling,
)

__all__ = ["chunk_of", "generation_request"]

SAMPLED = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Options of sampling that the engine has under the same names."""

WITHOUT_EFFECT = {"n": 1, "best_of": 1, "use_beam_search": False, "length_penalty": 1.0}
"""Options of sampling that the engine does not have, and the values that change nothing."""

REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "cancelled",
}


def generation_request(request: Mapping[str, Any], room_tokens: int) -> GenerationRequest:
    """The engine's request for one of Dynamo's.

    Args:
        request: as Dynamo's preprocessor makes it.
        room_tokens: the longest sequence that this worker takes.

    Raises:
        ConfigError: it asks for something that the engine does not have, or is too long.
    """
    tokens = [int(token) for token in request.get("token_ids") or ()]
    stops = _given(request, "stop_conditions")
    output = _given(request, "output_options")
    most = room_tokens - len(tokens)
    if most < 1:
        raise ConfigError(
            f"prompt of {len(tokens)} tokens: this worker takes {room_tokens - 1}; shorten it"
        )
    if request.get("multi_modal_data"):
        raise ConfigError("images and other media: this worker takes text alone")
    fewest = int(stops.get("min_tokens") or 0)
    stop_tokens = (
        *(stops.get("stop_token_ids") or ()),
        *(stops.get("stop_token_ids_hidden") or ()),
    )
    return GenerationRequest(
        tokens,
        max_new_tokens=min(int(stops.get("max_tokens") or most), most),
        min_new_tokens=min(fewest, most),
        sampling=_sampling(_given(request, "sampling_options"), output),
        stop_tokens=frozenset(map(int, stop_tokens)),
        ignore_end=bool(stops.get("ignore_eos")),
        namespace=_namespace(request),
        priority=int(_given(request, "routing").get("priority") or 0),
    )


def chunk_of(new: NewToken) -> dict[str, Any]:
    """Dynamo's chunk for a new token, or for the end.

    Raises:
        ConfigError: the request never fits the pools.
    """
    if new.finish is FinishReason.REJECTED:
        raise ConfigError(
            f"the request does not fit this worker's memory: {new.generation.decision}"
        )
    chunk: dict[str, Any] = {"token_ids": [] if new.token is None else [new.token], "index": 0}
    if new.choice is not None and new.choice.logprob is not None:
        chunk["log_probs"] = [new.choice.logprob]
        if new.choice.top:
            ranked = enumerate(new.choice.top, 1)
            chunk["top_logprobs"] = [
                [
                    {"rank": rank, "token_id": each.token, "logprob": each.logprob}
                    for rank, each in ranked
                ]
            ]
    if new.finish is not None:
        chunk["finish_reason"] = REASONS[new.finish]
        chunk["completion_usage"] = _usage(new.generation)
    return chunk


def _given(request: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in (request.get(name) or {}).items() if value is not None}


def _sampling(given: Mapping[str, Any], output: Mapping[str, Any]) -> Sampling:
    for name, value in WITHOUT_EFFECT.items():
        if given.get(name, value) not in (value, None):
            raise ConfigError(f"{name}={given[name]!r}: this worker has no such sampling")
    if given.get("guided_decoding"):
        raise ConfigError("guided decoding: this worker has none; ask for text")
    if output.get("prompt_logprobs") is not None:
        raise ConfigError("prompt_logprobs: this worker has none; leave it out")
    settings = {name: given[name] for name in SAMPLED if name in given}
    settings["top_k"] = max(0, settings.get("top_k", 0))  # -1 stands for all
    settings.setdefault("temperature", 1.0)
    try:
        return Sampling(**settings, logprobs=output.get("logprobs"))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{field}={first['input']!r:.40}: {first['msg']}") from error


def _namespace(request: Mapping[str, Any]) -> str | None:
    """Dynamo's `cache_salt`: hints of routing carry it, or else the extensions of the request."""
    extensions = _given(_given(request, "extra_args"), "nvext")
    salt = _given(request, "routing").get("cache_salt") or extensions.get("cache_salt")
    return str(salt) if salt else None


def _usage(generation: Generation) -> dict[str, Any]:
    prompt, new = generation.prompt_tokens, len(generation.tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }
