"""Dynamo's requests in the engine's words."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

pytest.importorskip("kvgraft_dynamo", reason="needs Python 3.11")

from kvgraft import ConfigError
from kvgraft_dynamo.requests import chunk_of, generation_request
from kvgraft_transformers.engine import (
    Choice,
    FinishReason,
    Generation,
    GenerationRequest,
    NewToken,
    TokenLogprob,
)

PROMPT = {"token_ids": [5, 6, 7]}


def asked(**more: Any) -> GenerationRequest:
    return generation_request({**PROMPT, **more}, 100)


def test_a_bare_request_is_sampled_and_fills_the_room() -> None:
    request = asked()
    assert [*request.tokens] == [5, 6, 7]
    assert request.max_new_tokens == 97
    assert request.sampling.temperature == 1.0
    assert request.namespace is None


def test_options_reach_the_engine_under_its_names() -> None:
    request = asked(
        sampling_options={"temperature": 0.5, "top_k": -1, "top_p": 0.9, "seed": 3, "n": 1},
        stop_conditions={
            "max_tokens": 9,
            "min_tokens": 2,
            "stop": ["end"],
            "stop_token_ids": [8],
            "stop_token_ids_hidden": [9],
            "ignore_eos": True,
        },
        output_options={"logprobs": 2},
        routing={"cache_salt": "chat", "priority": 4},
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 0, 0.9)
    assert (sampling.seed, sampling.logprobs) == (3, 2)
    assert (request.max_new_tokens, request.min_new_tokens) == (9, 2)
    assert request.stop_tokens == {8, 9}
    assert request.ignore_end
    assert request.namespace == "chat"
    assert request.priority == 4


@pytest.mark.parametrize(
    ("more", "namespace"),
    [
        ({"routing": {"cache_salt": "a"}}, "a"),
        ({"extra_args": {"nvext": {"cache_salt": "b"}}}, "b"),
        ({"routing": {"cache_salt": "a"}, "extra_args": {"nvext": {"cache_salt": "b"}}}, "a"),
        ({"routing": {"cache_salt": None}, "extra_args": None}, None),
        ({"routing": {"cache_salt": ""}}, None),
    ],
)
def test_a_salt_keeps_requests_apart_in_the_cache(
    more: dict[str, Any], namespace: str | None
) -> None:
    assert asked(**more).namespace == namespace


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"sampling_options": {"n": 2}}, "n=2"),
        ({"sampling_options": {"guided_decoding": {"json": {}}}}, "guided decoding"),
        ({"sampling_options": {"top_p": 3.0}}, "top_p=3.0"),
        ({"output_options": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"multi_modal_data": {"image_url": []}}, "text alone"),
        ({"token_ids": [*range(100)]}, "prompt of 100 tokens: this worker takes 99"),
    ],
)
def test_requests_for_what_the_engine_lacks_are_refused_by_name(
    more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        asked(**more)


def test_chunks_carry_tokens_and_the_last_one_the_usage() -> None:
    generation = Generation(asked(), "cpu")
    choice = Choice(4, -0.5, (TokenLogprob(4, -0.5), TokenLogprob(3, -2.0)))
    assert chunk_of(NewToken(generation, 4, None, choice)) == {
        "token_ids": [4],
        "index": 0,
        "log_probs": [-0.5],
        "top_logprobs": [
            [
                {"rank": 1, "token_id": 4, "logprob": -0.5},
                {"rank": 2, "token_id": 3, "logprob": -2.0},
            ]
        ],
    }
    generation.cached_tokens = 2
    last = chunk_of(NewToken(generation, 4, FinishReason.LENGTH, Choice(4)))
    assert last["finish_reason"] == "length"
    assert last["completion_usage"]["prompt_tokens"] == 3
    assert last["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.skipif(
    importlib.util.find_spec("dynamo") is not None, reason="is about a machine without Dynamo"
)
def test_without_dynamo_the_command_says_how_to_install_it(tmp_path: Any) -> None:
    from kvgraft_dynamo.command import dynamo_worker

    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="pip install --no-deps 'ai-dynamo=="):
        dynamo_worker.main([str(tmp_path)], "kvgraft", standalone_mode=False)


def test_a_worker_has_the_options_of_serve_but_for_its_http(capsys: Any) -> None:
    from kvgraft_dynamo.command import OF_EVENTS, OF_THE_SERVER, dynamo_worker
    from kvgraft_transformers.serving.command import serve

    own = {"host", "namespace", "component", "discovery_backend", "role"}
    names = {each.name for each in dynamo_worker.params}
    assert names == {each.name for each in serve.params} - OF_THE_SERVER - OF_EVENTS | own
