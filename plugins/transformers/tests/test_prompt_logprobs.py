"""Log-probabilities of prompts, from an engine and over HTTP, and prompts that answers echo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from kvgraft import ConfigError
from kvgraft_testing.stepped import SteppedTransferEngine
from kvgraft_transformers.engine import (
    Engine,
    EngineSettings,
    Generation,
    GenerationRequest,
    PromptToken,
)
from kvgraft_transformers.tiny import build_tiny_model
from kvgraft_transformers.tiny_tokenizer import build_tiny_tokenizer

from .cases import one_of_each_kind
from .greedy import best_tokens
from .serving_inside import Inside, serve_inside

SMALL = EngineSettings(chunk_tokens=32, max_running=4, reserve_tokens=8, step_tokens=96)
POOLS: dict[str, Any] = {
    "page_size": 16,
    "device_tokens": 512,
    "host_tokens": 1024,
    "guard": "on",
    "load": None,
    "probe_tokens": 0,
}
TEXT = "def parse(text):\n    größe = 大"


def rows_of(model: Any, prompt: Sequence[int]) -> torch.Tensor:
    """Log-probabilities at each position of a prompt, `[n, vocabulary]`, by the model alone."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def expect_scores(model: Any, prompt: Sequence[int], told: Sequence[PromptToken], n: int) -> None:
    """They are those of the model in one pass without a cache."""
    assert [each.token for each in told] == list(prompt)
    assert told[0] == PromptToken(prompt[0])
    for row, each in zip(rows_of(model, prompt), told[1:]):
        assert each.logprob == pytest.approx(float(row[each.token]), abs=1e-4)
        assert each.rank == 1 + int((row > row[each.token]).sum())
        values = [value for _, value in each.top]
        assert values == pytest.approx(row.topk(n).values.tolist(), abs=1e-4)


def scored(generation: Generation) -> list[PromptToken]:
    assert generation.score is not None
    assert generation.score.ended
    return generation.score.tokens


@pytest.mark.one_in(9)
@pytest.mark.parametrize("case", one_of_each_kind())
def test_prompts_are_scored_without_hits_and_are_hit_afterwards(
    case: str, tiny: Any, tokens: Callable[..., list[int]]
) -> None:
    """Others run beside them, the pools are short, and requests are retracted."""
    family, _, sparse = case.partition("+")
    model = tiny(family, torch.float64)
    options: dict[str, Any] = {"components": {"hisparse": {"max_running": 4}}} if sparse else {}
    options |= {**POOLS, "device_tokens": 368, "sparse_on_host": bool(sparse)}
    engine = Engine.open(model, SMALL, **options)
    shared = tokens(48)
    prompts = [shared + tokens(8 + 25 * i, seed=10 + i) for i in range(4)]
    try:
        engine.generate([GenerationRequest(prompts[0], 4, ignore_end=True)])
        asked = [
            GenerationRequest(
                prompt, 20, ignore_end=True, prompt_logprobs=2 if number % 2 == 0 else None
            )
            for number, prompt in enumerate(prompts)
        ]
        generations = engine.generate(asked)
        for prompt, generation in zip(prompts, generations):
            assert generation.tokens == best_tokens(model, prompt, generation.tokens)
            assert len(generation.tokens) == 20
            if generation.request.prompt_logprobs is not None:
                assert generation.cached_tokens == 0
                expect_scores(model, prompt, scored(generation), 2)
        again = engine.generate(
            GenerationRequest([*prompt, *done.tokens, 7], 2)
            for prompt, done in zip(prompts, generations)
        )
        assert all(each.cached_tokens for each in again[::2])
        engine.memory.cache.drain()
        engine.memory.cache.check_integrity()
        assert not engine.memory.cache.requests
    finally:
        engine.close()


def test_a_prompt_that_is_retracted_in_the_middle_is_scored_on(
    tiny: Any, tokens: Callable[..., list[int]]
) -> None:
    """Its own computed part is hit then, since its log-probabilities are known."""
    model = tiny("gemma3_text", torch.float64)
    engine = Engine.open(model, SMALL, **POOLS)
    prompt = tokens(150)
    try:
        engine.generate([GenerationRequest(prompt, 2)])  # another has computed all of it
        before = engine.totals.computed_tokens
        generation = engine.submit(GenerationRequest(prompt, 3, ignore_end=True, prompt_logprobs=1))
        engine.step()
        engine.schedule.retract(generation)
        for _ in engine.run():
            pass
        expect_scores(model, prompt, scored(generation), 1)
        assert engine.totals.computed_tokens - before == 150 + 2
        assert generation.retractions == 1
        assert generation.cached_tokens == 0
    finally:
        engine.close()


def test_a_prompt_whose_own_data_does_not_come_back_is_computed_again(
    tiny: Any, tokens: Callable[..., list[int]]
) -> None:
    model, transfers = tiny("llama", torch.float64), SteppedTransferEngine()
    options = {**POOLS, "write_policy": "write-through", "transfers": transfers}
    engine = Engine.open(model, SMALL, **options)
    prompt = tokens(150)
    try:
        generation = engine.submit(GenerationRequest(prompt, 3, ignore_end=True, prompt_logprobs=1))
        for _ in range(3):
            engine.step()
        engine.schedule.retract(generation)
        transfers.run_all()
        engine.memory.cache.poll()
        engine.memory.cache.evict("full", 100)
        n_failed = 0
        while generation.finish is None:
            engine.step()
            while transfers.pending:  # of the host mirror's 64 slots: a load-back
                if transfers.pending[0].copies[0].source.shape[0] == 64:
                    transfers.fail()
                    n_failed += 1
                else:
                    transfers.step()
        assert n_failed == 1
        expect_scores(model, prompt, scored(generation), 1)
        assert generation.tokens == best_tokens(model, prompt, generation.tokens)
    finally:
        transfers.run_all()
        engine.close()


def test_a_negative_number_of_likeliest_tokens_is_refused(tiny: Any) -> None:
    engine = Engine.open(tiny("llama"), SMALL, **POOLS)
    with pytest.raises(ConfigError, match="prompt_logprobs=-1; give 0 or more, or None"):
        engine.submit(GenerationRequest([3, 4], prompt_logprobs=-1))
    engine.close()


# -- over HTTP


@pytest.fixture(scope="module")
def model() -> Any:
    return build_tiny_model("llama", dtype=torch.float64)


@pytest.fixture(scope="module")
def inside(model: Any) -> Iterator[Inside]:
    with serve_inside(model, guard="on", limits=SMALL) as served:
        yield served


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    ids: list[int] = build_tiny_tokenizer()(TEXT * 4)["input_ids"]
    return ids


def own(model: Any, prompt: Sequence[int]) -> list[float]:
    """Log-probabilities of the tokens of a prompt but the first."""
    return [float(row[token]) for row, token in zip(rows_of(model, prompt), prompt[1:])]


def test_prompt_logprobs_are_vllms(inside: Inside, model: Any, prompt: list[int]) -> None:
    for _ in range(2):
        said = inside.complete(prompt, max_tokens=2, prompt_logprobs=2)
        assert said["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    first, *rest = said["prompt_logprobs"]
    assert first is None
    told = [entry[str(token)] for entry, token in zip(rest, prompt[1:])]
    assert [each["logprob"] for each in told] == pytest.approx(own(model, prompt), abs=1e-4)
    for entry, row, token in zip(rest, rows_of(model, prompt), prompt[1:]):
        best = {str(each) for each in row.topk(2).indices.tolist()}
        assert entry.keys() == best | {str(token)}
        assert entry[str(token)]["rank"] == 1 + int((row > row[token]).sum())
        assert isinstance(entry[str(token)]["decoded_token"], str)
    assert "logprobs" in said
    assert said["logprobs"] is None
    zero = inside.complete(prompt, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
    assert {len(entry) for entry in zero[1:]} == {1}
    assert "prompt_logprobs" not in inside.complete(prompt, max_tokens=1)


def test_a_chat_has_them_beside_its_choices(inside: Inside) -> None:
    body = {"messages": [{"role": "user", "content": TEXT}], "prompt_logprobs": 1, "n": 2}
    whole = inside.post("/v1/chat/completions", body).json()
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    assert whole["prompt_logprobs"][0] is None
    assert all("prompt_logprobs" not in choice for choice in whole["choices"])


def test_an_echo_is_the_prompt_with_its_log_probabilities(
    inside: Inside, model: Any, prompt: list[int]
) -> None:
    plain = inside.complete(TEXT * 4)["text"]
    assert inside.complete(TEXT * 4, echo=True)["text"] == TEXT * 4 + plain
    assert (
        inside.complete(prompt, echo=True)["text"] == build_tiny_tokenizer().decode(prompt) + plain
    )
    said = inside.complete(prompt, echo=True, logprobs=1, max_tokens=3)
    answer = inside.complete(prompt, logprobs=1, max_tokens=3)["logprobs"]
    told = said["logprobs"]
    n = len(prompt)
    assert {len(each) for each in told.values()} == {n + 3}
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert told["token_logprobs"][1:n] == pytest.approx(own(model, prompt), abs=1e-4)
    assert told["tokens"][n:] == answer["tokens"]
    assert told["token_logprobs"][n:] == pytest.approx(answer["token_logprobs"], abs=1e-4)
    assert told["text_offset"] == sorted(told["text_offset"])
    assert told["text_offset"][0] == 0
    assert "prompt_logprobs" not in said


def test_an_echo_alone_produces_nothing(inside: Inside, model: Any, prompt: list[int]) -> None:
    said = inside.complete(prompt, echo=True, logprobs=0, max_tokens=0)
    assert (said["text"], said["finish_reason"]) == (
        build_tiny_tokenizer().decode(prompt),
        "length",
    )
    assert said["logprobs"]["token_logprobs"][1:] == pytest.approx(own(model, prompt), abs=1e-4)
    assert len(said["logprobs"]["tokens"]) == len(prompt)
    assert said["usage"]["completion_tokens"] == 0


def test_each_of_several_answers_has_its_prompt(inside: Inside, prompt: list[int]) -> None:
    prompts = [prompt, prompt[:40]]
    body = {"prompt": prompts, "n": 2, "echo": True, "logprobs": 0, "max_tokens": 2}
    choices = inside.post("/v1/completions", body | {"prompt_logprobs": 1}).json()["choices"]
    assert [len(each["prompt_logprobs"]) for each in choices] == [len(prompt)] * 2 + [40] * 2
    assert [len(each["logprobs"]["tokens"]) for each in choices] == [len(prompt) + 2] * 2 + [42] * 2
    assert choices[0]["prompt_logprobs"] == choices[1]["prompt_logprobs"]


def test_a_stream_begins_with_the_prompt(inside: Inside, prompt: list[int]) -> None:
    asked = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 12}
    whole = inside.complete(**asked)
    chunks = inside.stream("/v1/completions", asked)
    assert chunks[0]["text"] == build_tiny_tokenizer().decode(prompt)
    assert "".join(each["text"] for each in chunks) == whole["text"]
    parts = [each["logprobs"] for each in chunks if each["logprobs"]]
    for name, entries in whole["logprobs"].items():
        assert [entry for part in parts for entry in part[name]] == entries


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("completions", {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "with stream=true"),
        ("completions", {"prompt": "x", "prompt_logprobs": 21}, "give 20 or less"),
        ("completions", {"prompt": "x", "prompt_logprobs": -1}, "give 0 or more"),
        ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens=0 without echo"),
        (
            "completions",
            {"prompt": "x", "max_tokens": 0, "echo": True, "min_tokens": 1},
            "or with min_tokens",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "echo": True},
            "echo=True is not served here",
        ),
    ],
)
def test_combinations_that_cannot_be_are_one_line(
    inside: Inside, path: str, fields: dict[str, Any], said: str
) -> None:
    reply = inside.post(f"/v1/{path}", fields)
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert said in message
    assert "\n" not in message
