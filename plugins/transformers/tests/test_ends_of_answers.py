"""Where an answer ends, and what a stream says of its usage, as clients ask for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvgraft import ConfigError
from kvgraft_transformers.engine import Engine, EngineSettings, GenerationRequest, Sampling
from kvgraft_transformers.tiny import build_tiny_model
from kvgraft_transformers.tiny_tokenizer import build_tiny_tokenizer

from .serving_inside import Inside, serve_inside

PROMPT: list[int] = build_tiny_tokenizer()("def parse(text):\n    return 5")["input_ids"]
N = 16


@pytest.fixture(scope="module")
def model() -> Any:
    return build_tiny_model("llama", dtype=torch.float64)


@pytest.fixture(scope="module")
def inside(model: Any) -> Iterator[Inside]:
    with serve_inside(model, guard="on") as served:
        yield served


@pytest.fixture(scope="module")
def answer(model: Any) -> list[int]:
    """The greedy tokens behind the prompt."""
    return without(model, set(), 0)


def without(model: Any, ends: set[int], n: int) -> list[int]:
    """The likeliest tokens behind the prompt, of which the first `n` are none of `ends`."""
    tokens = list(PROMPT)
    for at in range(N):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, -1]
        if at < n:
            logits[list(ends)] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tokens[len(PROMPT) :]


def text_of(tokens: list[int]) -> str:
    said: str = build_tiny_tokenizer().decode(tokens, skip_special_tokens=True)
    return said


def test_a_stop_token_ends_an_answer_and_is_no_part_of_its_text(
    inside: Inside, answer: list[int]
) -> None:
    stop = answer[5]
    n = answer.index(stop)
    said = inside.complete(PROMPT, max_tokens=N, stop_token_ids=[stop], ignore_eos=True)
    assert (said["finish_reason"], said["text"]) == ("stop", text_of(answer[:n]))
    assert said["usage"]["completion_tokens"] == n + 1


@pytest.mark.parametrize("max_drafts", [0, 4])
def test_no_stop_token_is_chosen_before_the_fewest_tokens(
    model: Any, answer: list[int], max_drafts: int
) -> None:
    ends = {answer[1], answer[4]}
    settings = EngineSettings(max_drafts=max_drafts, chunk_tokens=32)
    engine = Engine.open(model, settings, device_tokens=1024, probe_tokens=0)
    for fewest in (0, 1, 2, 7, N):
        expected = without(model, ends, fewest)
        stops = [at for at, token in enumerate(expected) if token in ends]
        expected = expected[: stops[0] + 1] if stops else expected
        assert not stops or stops[0] >= fewest
        asked = GenerationRequest(
            PROMPT, N, stop_tokens=frozenset(ends), ignore_end=True, min_new_tokens=fewest
        )
        (found,) = engine.generate([asked])
        assert found.tokens == expected
    engine.close()


def test_the_models_own_end_waits_for_the_fewest_tokens_unless_it_is_ignored(
    answer: list[int],
) -> None:
    model = build_tiny_model("llama", dtype=torch.float64)
    end = model.generation_config.eos_token_id = answer[2]
    with serve_inside(model) as inside:
        said = inside.complete(PROMPT, max_tokens=N, min_tokens=6)
        ignored = inside.complete(PROMPT, max_tokens=N, min_tokens=6, ignore_eos=True)
    assert said["text"].startswith(text_of(without(model, {end}, 6)[:6]))
    assert ignored["text"] == text_of(answer)


def test_a_sampled_answer_has_the_fewest_tokens(model: Any) -> None:
    engine = Engine.open(model, device_tokens=2048, probe_tokens=0)
    ends = frozenset(range(3, 400))  # nearly every token
    for seed in range(5):
        sampling = Sampling(temperature=1.5, seed=seed)
        (found,) = engine.generate([GenerationRequest(PROMPT, N, sampling, ends, True, None, ())])
        assert len(found.tokens) < N
        asked = GenerationRequest(PROMPT, N, sampling, ends, ignore_end=True, min_new_tokens=9)
        (found,) = engine.generate([asked])
        assert len(found.tokens) >= 10
        assert not ends & set(found.tokens[:9])
    engine.close()


def test_a_stop_string_counts_behind_the_fewest_tokens(inside: Inside, answer: list[int]) -> None:
    text = text_of(answer)
    early = next(text_of(answer[:n]) for n in range(1, N) if text_of(answer[:n]))[-1:]
    plain = inside.complete(PROMPT, max_tokens=N, ignore_eos=True, stop=early)
    assert plain["finish_reason"] == "stop"
    assert plain["text"] == text[: text.index(early)]
    late = inside.complete(PROMPT, max_tokens=N, ignore_eos=True, stop=early, min_tokens=N)
    assert (late["finish_reason"], late["text"]) == ("length", text)


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
def test_every_chunk_tells_the_usage_so_far_if_asked(
    inside: Inside, path: str, prompt: dict[str, Any]
) -> None:
    told = {"include_usage": True, "continuous_usage_stats": True}
    body = {**prompt, "stream": True, "max_tokens": N, "ignore_eos": True}

    def chunks(options: dict[str, bool]) -> list[dict[str, Any]]:
        reply = inside.post(path, {**body, "stream_options": options})
        lines = reply.text.removesuffix("\n\n").split("\n\n")
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    found = [chunk["usage"] for chunk in chunks(told)]
    counts = [usage["completion_tokens"] for usage in found]
    assert counts == sorted(counts)
    assert len(set(counts)) > 3
    assert found[-1]["completion_tokens"] == N
    assert found[-1]["total_tokens"] == found[-1]["prompt_tokens"] + N
    for options in ({"include_usage": True}, {"continuous_usage_stats": True}):
        n_told = sum("usage" in chunk for chunk in chunks(options))
        assert n_told == options.get("include_usage", 0)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"min_tokens": -1}, "min_tokens=-1: give 0 or more"),
        ({"min_tokens": 9}, "at least 9 new tokens and at most 8; give 0 to as many as are allow"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0=-1: give 0 or more"),
        ({"stop_token_ids": "5"}, "stop_token_ids='5': give a list"),
        (
            {"min_tokens": 1, "response_format": {"type": "json_object"}},
            "min_tokens with response_format: the schema says where an answer ends; leave one",
        ),
    ],
)
def test_an_impossible_end_is_refused_in_one_line(
    inside: Inside, body: dict[str, Any], said: str
) -> None:
    reply = inside.post("/v1/completions", {"prompt": "x", **body})
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize("fewest", [-1, 3])
def test_an_engine_refuses_more_tokens_than_it_may_produce(model: Any, fewest: int) -> None:
    engine = Engine.open(model, device_tokens=256, probe_tokens=0)
    with pytest.raises(ConfigError, match=f"at least {fewest} new tokens and at most 2; give 0 to"):
        engine.submit(GenerationRequest(PROMPT, 2, min_new_tokens=fewest))
    engine.close()
