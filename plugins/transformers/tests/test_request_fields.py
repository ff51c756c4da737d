"""Fields of requests beyond the prompt and its length, as clients send them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvgraft_transformers.engine import (
    Engine,
    EngineSettings,
    Generation,
    GenerationRequest,
)
from kvgraft_transformers.serving.protocol import ApiError, Message
from kvgraft_transformers.serving.text import Tokenizer
from kvgraft_transformers.tiny import build_tiny_model
from kvgraft_transformers.tiny_tokenizer import build_tiny_tokenizer

from .serving_inside import Inside, serve_inside

TEXT = "def parse(text):\n    größe = 大"


@pytest.fixture(scope="module")
def model() -> Any:
    return build_tiny_model("llama", dtype=torch.float64)


@pytest.fixture(scope="module")
def inside(model: Any) -> Iterator[Inside]:
    with serve_inside(model, guard="on") as served:
        yield served


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    ids: list[int] = build_tiny_tokenizer()(TEXT)["input_ids"]
    return ids


def logprobs_of(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Log-probabilities of every token behind the prompt, `[len(answer), vocabulary]`."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0]
    return torch.log_softmax(logits[len(prompt) - 1 : -1].float(), dim=-1)


def greedy(model: Any, prompt: list[int], n: int, **options: Any) -> list[int]:
    """The answer of transformers itself."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    answer = model.generate(
        ids, attention_mask=mask, max_new_tokens=n, do_sample=False, eos_token_id=None, **options
    )
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


def test_a_repeated_token_is_penalised_as_in_transformers(
    inside: Inside, model: Any, prompt: list[int]
) -> None:
    expected = greedy(model, prompt, 12, repetition_penalty=1.5)
    assert expected != greedy(model, prompt, 12)
    said = inside.complete(prompt, max_tokens=12, repetition_penalty=1.5, ignore_eos=True)
    assert said["text"] == build_tiny_tokenizer().decode(expected, skip_special_tokens=True)


def test_penalties_of_openai_reach_the_sampler(inside: Inside, prompt: list[int]) -> None:
    plain = inside.complete(prompt, max_tokens=24)["text"]
    for name in ("presence_penalty", "frequency_penalty"):
        assert inside.complete(prompt, max_tokens=24, **{name: 0})["text"] == plain
        assert inside.complete(prompt, max_tokens=24, **{name: 2})["text"] != plain


def test_min_p_of_one_is_greedy_at_any_temperature(inside: Inside, prompt: list[int]) -> None:
    hot = {"temperature": 2, "seed": 1}
    plain = inside.complete(prompt)["text"]
    assert inside.complete(prompt, **hot)["text"] != plain
    assert inside.complete(prompt, **hot, min_p=1)["text"] == plain


def test_an_answer_goes_on_behind_the_end_token_where_it_is_ignored(prompt: list[int]) -> None:
    model = build_tiny_model("llama", dtype=torch.float64)
    answer = greedy(model, prompt, 6)
    model.generation_config.eos_token_id = answer[2]
    n_tokens = answer.index(answer[2]) + 1
    assert n_tokens < 6
    with serve_inside(model) as inside:
        ended = inside.complete(prompt, max_tokens=6)
        whole = inside.complete(prompt, max_tokens=6, ignore_eos=True)
    assert (ended["finish_reason"], ended["usage"]["completion_tokens"]) == ("stop", n_tokens)
    assert (whole["finish_reason"], whole["usage"]["completion_tokens"]) == ("length", 6)
    assert whole["text"].startswith(ended["text"])


def test_prompts_share_cache_unless_their_salts_differ(inside: Inside) -> None:
    tokens = list(range(3, 203))

    def cached(**fields: Any) -> int:
        usage = inside.complete(tokens, max_tokens=1, **fields)["usage"]
        n_tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
        return n_tokens

    assert [cached(), cached()] == [0, 192]
    assert [cached(cache_salt="a"), cached(cache_salt="a"), cached(cache_salt="b")] == [0, 192, 0]
    # OpenAI's hint for routing says nothing of who may share
    assert [cached(prompt_cache_key="a"), cached(prompt_cache_key="b")] == [192, 192]


def test_data_that_hints_retain_outlasts_that_of_later_requests(model: Any) -> None:
    """The envelope is vLLM's and SGLang's; without it the same data has left."""
    retain = {
        "action_id": "1",
        "action_type": "kv.retain",
        "action_version": "1.0",
        "payload": {"priority": 2, "ttl_seconds": 600},
    }
    hints = {"protocol_version": "0.1", "message_id": "1", "actions": [retain]}
    found = []
    for given in (hints, None):
        with serve_inside(model, device_tokens=1024, policy="lru") as inside:
            prompts = [[number, *range(100, 300)] for number in range(3, 13)]
            inside.complete(prompts[0], max_tokens=1, kv_hints=given)
            for prompt in prompts[1:]:
                inside.complete(prompt, max_tokens=1)
            usage = inside.complete(prompts[0], max_tokens=1)["usage"]
            found.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert found == [192, 0]


def test_log_probabilities_of_a_completion_are_the_models(
    inside: Inside, model: Any, prompt: list[int]
) -> None:
    answer = greedy(model, prompt, 8)
    expected = logprobs_of(model, prompt, answer)
    tokenizer = build_tiny_tokenizer()
    said = inside.complete(prompt, logprobs=3, ignore_eos=True)
    given = said["logprobs"]
    chosen = [float(row[token]) for row, token in zip(expected, answer)]
    assert given["token_logprobs"] == pytest.approx(chosen, abs=1e-5)
    for top, row in zip(given["top_logprobs"], expected):
        assert sorted(top.values()) == pytest.approx(sorted(row.topk(3).values.tolist()), abs=1e-5)
    assert given["text_offset"][0] == 0
    assert len(given["tokens"]) == len(given["text_offset"]) == 8
    # positions begin each token's own text, special ones aside
    for token, text, at in zip(answer, given["tokens"], given["text_offset"]):
        if not text.startswith("bytes:"):
            assert tokenizer.decode(answer, skip_special_tokens=False)[at:].startswith(text), token
    assert inside.complete(prompt)["logprobs"] is None
    zero = inside.complete(prompt, logprobs=0)["logprobs"]
    assert [len(top) for top in zero["top_logprobs"]] == [1] * 8


def test_log_probabilities_of_a_chat_have_bytes_that_join_to_its_text(inside: Inside) -> None:
    asked = {"logprobs": True, "top_logprobs": 2, "max_tokens": 16}
    said = inside.chat("大 größe", **asked)
    content = said["logprobs"]["content"]
    joined = b"".join(bytes(each["bytes"]) for each in content)
    special = build_tiny_tokenizer().all_special_tokens
    text = joined.decode(errors="replace")
    for mark in special:
        text = text.replace(mark, "")
    assert text == said["message"]["content"]
    assert len(content) == 16
    for each in content:
        assert [top["logprob"] for top in each["top_logprobs"]] == sorted(
            (top["logprob"] for top in each["top_logprobs"]), reverse=True
        )
        assert each["token"] == each["top_logprobs"][0]["token"]
    alone = inside.chat("x", logprobs=True)["logprobs"]["content"]
    assert all(each["top_logprobs"] == [] for each in alone)


@pytest.mark.parametrize(
    ("path", "fields", "lists"),
    [
        (
            "/v1/completions",
            {"prompt": TEXT, "logprobs": 1},
            ["tokens", "token_logprobs", "top_logprobs", "text_offset"],
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": TEXT}], "logprobs": True, "top_logprobs": 1},
            ["content"],
        ),
    ],
)
def test_a_stream_gives_each_tokens_log_probability_once(
    inside: Inside, path: str, fields: dict[str, Any], lists: list[str]
) -> None:
    whole = inside.post(path, {**fields, "max_tokens": 20}).json()["choices"][0]["logprobs"]
    parts = [each["logprobs"] for each in inside.stream(path, {**fields, "max_tokens": 20})]
    parts = [part for part in parts if part]
    assert len(parts) > 1
    for name in lists:
        assert [entry for part in parts for entry in part[name]] == whole[name]


def test_bytes_of_a_token_are_known_for_parts_of_characters_too() -> None:
    tokenizer = Tokenizer(build_tiny_tokenizer())
    tokens = tokenizer.encode("größe 大")
    assert b"".join(tokenizer.token_bytes(each) or b"?" for each in tokens) == "größe 大".encode()
    assert any("\ufffd" in tokenizer.token_text(each) for each in tokens)


TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if terse %}<|system|>{{ terse }}<|end|>{% endif %}<|assistant|>"
)


def test_variables_reach_the_chat_template(model: Any) -> None:
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    longer = len(tokenizer("<|system|>yes<|end|>")["input_ids"])
    with serve_inside(model, tokenizer=tokenizer) as inside:
        plain = inside.chat("Hi")["usage"]["prompt_tokens"]
        terse = inside.chat("Hi", chat_template_kwargs={"terse": "yes"})["usage"]["prompt_tokens"]
        null = inside.chat("Hi", chat_template_kwargs=None)["usage"]["prompt_tokens"]
    assert (terse - plain, null) == (longer, plain)


def message(*parts: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(parts), **more}]}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
WORDS = {"type": "text", "text": "see"}
NOT_SERVED: list[tuple[str, dict[str, Any], str, str]] = [
    ("completions", {"prompt": [True]}, "prompt", "item 0 is true; give a text, a list of texts"),
    ("completions", {"prompt": ["a", 1]}, "prompt", "item 1 is of another kind than item 0"),
    ("completions", {"prompt": [[1, 1.5]]}, "prompt", "item 0 is [1, 1.5]; give a text"),
    ("completions", {"prompt": {"text": "a"}}, "prompt", "give a text, a list of texts, token ids"),
    ("completions", {"prompt": [IMAGE]}, "prompt", "images and audio are not served here"),
    ("completions", {"messages": []}, "messages", "send them to /v1/chat/completions"),
    ("completions", {"guided_json": {}}, "guided_json", "give the schema as response_format"),
    ("completions", {"tempreature": 1}, "tempreature", "did you mean temperature?"),
    (
        "chat/completions",
        message(WORDS, IMAGE),
        "messages.0.content",
        "part 1 is of type 'image_url': images are not served here",
    ),
    (
        "chat/completions",
        message({"type": "input_audio", "input_audio": {}}),
        "messages.0.content",
        "audio clips are not served here",
    ),
    ("chat/completions", message("hi"), "messages.0.content", "part 0 is no text; give parts"),
    ("chat/completions", message({"type": ["text"]}), "messages.0.content", "part 0 is no text"),
    (
        "chat/completions",
        message(WORDS, role="assistant", tool_calls=[{}]),
        "messages.0.tool_calls",
        "tool_calls is not served here; say it in the content",
    ),
    ("chat/completions", {"messages": ["hi"]}, "messages.0", "messages.0='hi': give an object"),
    ("chat/completions", {"tools": [{}]}, "tools", "not served here; describe them in a message"),
    ("chat/completions", {"audio": {"voice": "a"}}, "audio", "answers are text"),
    ("chat/completions", {"modalities": ["audio"]}, "modalities", "answers are text"),
]


@pytest.mark.parametrize(("path", "change", "param", "told"), NOT_SERVED)
def test_a_field_that_is_not_served_is_named_with_advice(
    inside: Inside, path: str, change: dict[str, Any], param: str, told: str
) -> None:
    good = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    reply = inside.post(f"/v1/{path}", {**good, **change})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert told in error["message"]


def test_a_route_that_is_not_there_is_answered_with_those_that_are(inside: Inside) -> None:
    error = inside.post("/v1/embeddings", {}).json()["error"]
    assert error["message"].startswith("POST /v1/embeddings: not found; served here are /v1/compl")
    assert {"/v1/models", "/health", "/metrics", "/explain"} <= set(error["message"].split(", "))


def test_answers_of_neighbouring_seeds_are_all_drawn_differently(inside: Inside) -> None:
    def drawn(seed: int, n: int) -> list[str]:
        body = {"prompt": [7, 8, 9], "seed": seed, "n": n, "temperature": 2, "max_tokens": 16}
        choices = inside.post("/v1/completions", body).json()["choices"]
        return [choice["text"] for choice in choices]

    first, second = drawn(7, 4), drawn(8, 4)
    assert len({*first, *second}) == 8
    assert drawn(7, 1) == first[:1]
    assert drawn(7, 4) == first


@pytest.mark.parametrize("name", ["tokenize", "conversation", "tools", "messages"])
def test_arguments_of_the_tokenizer_are_no_variables_of_a_template(name: str) -> None:
    hi = [Message(role="user", content="Hi")]
    with pytest.raises(ApiError, match=f"chat_template_kwargs.{name} is an argument of the token"):
        Tokenizer(build_tiny_tokenizer()).encode_chat(hi, {name: "x"})


@pytest.mark.parametrize(
    ("path", "change", "param", "message"),
    [
        ("completions", {"min_p": 1.5}, "min_p", "give 1 or less"),
        ("completions", {"presence_penalty": 3}, "presence_penalty", "give 2 or less"),
        ("completions", {"frequency_penalty": -3}, "frequency_penalty", "give -2 or more"),
        ("completions", {"repetition_penalty": 0}, "repetition_penalty", "give 0.01 or more"),
        ("completions", {"ignore_eos": "perhaps"}, "ignore_eos", "give true or false"),
        ("completions", {"cache_salt": ""}, "cache_salt", "give text of 1 or more characters"),
        ("completions", {"cache_salt": 5}, "cache_salt", "give text"),
        ("completions", {"priority": 0.5}, "priority", "give a whole number"),
        ("completions", {"kv_hints": "retain"}, "kv_hints", "give an object"),
        ("completions", {"kv_hints": {"actions": [{}]}}, "kv_hints", "without 'action_type'"),
        ("completions", {"priority": 1e99}, "priority", "priority=1e+99: give a smaller number"),
        ("chat/completions", {"messages": []}, "messages", "messages=[]: give 1 or more"),
        ("completions", {"logprobs": 21}, "logprobs", "give 20 or less"),
        ("completions", {"logprobs": True}, "logprobs", "logprobs=True: give a whole number"),
        ("completions", {"top_logprobs": 2}, "top_logprobs", "unrecognized request argument"),
        ("completions", {"chat_template_kwargs": {}}, "chat_template_kwargs", "unrecognized"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs", "2: only with logprobs=true"),
        ("chat/completions", {"logprobs": 2}, "logprobs", "give true or false"),
        (
            "chat/completions",
            {"chat_template_kwargs": "x"},
            "chat_template_kwargs",
            "give an object",
        ),
        (
            "chat/completions",
            {"chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs",
            "chat_template_kwargs.tokenize is an argument of the tokenizer",
        ),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(
    inside: Inside, path: str, change: Any, param: str, message: str
) -> None:
    body = {"prompt": "x"} if path == "completions" else {"messages": [{"role": "user"}]}
    reply = inside.post(f"/v1/{path}", {**body, **change})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert "\n" not in error["message"]


def run(engine: Engine, generations: list[Generation]) -> list[Generation]:
    """The order in which they end."""
    ended = [new.generation for new in engine.run() if new.finish is not None]
    assert set(ended) == set(generations)
    return ended


def test_lower_numbers_of_priority_are_admitted_first(model: Any, prompt: list[int]) -> None:
    engine = Engine.open(
        model, EngineSettings(max_running=1), device_tokens=512, page_size=16, probe_tokens=0
    )
    asked = [
        engine.submit(GenerationRequest(prompt, 3, ignore_end=True, priority=priority))
        for priority in (1, 0, -1, 0)
    ]
    assert run(engine, asked) == [asked[2], asked[1], asked[3], asked[0]]
    engine.close()


def test_nobody_passes_a_request_of_a_lower_number(model: Any) -> None:
    limits = EngineSettings(chunk_tokens=64, reserve_tokens=64)
    engine = Engine.open(model, limits, device_tokens=256, page_size=16, probe_tokens=0)
    running = engine.submit(GenerationRequest([5] * 60, 60, ignore_end=True))
    engine.step()
    large = engine.submit(GenerationRequest([6] * 140, 2, ignore_end=True))
    small = engine.submit(GenerationRequest([7] * 20, 2, ignore_end=True, priority=1))
    assert run(engine, [running, large, small]) == [running, large, small]
    assert large.decision is not None
    assert engine.totals.deferrals > 0, "the large one had to wait"
    engine.close()


@pytest.mark.parametrize("important", [0, 2])
def test_a_more_important_request_never_makes_room_for_others(model: Any, important: int) -> None:
    limits = EngineSettings(chunk_tokens=32, max_running=3, reserve_tokens=1)
    engine = Engine.open(model, limits, device_tokens=160, page_size=16, probe_tokens=0)
    asked = []
    for index in range(3):  # each runs before the next one comes: the last is the youngest
        priority = 0 if index == important else 1
        request = GenerationRequest([5 + index] * 20, 90, ignore_end=True, priority=priority)
        asked.append(engine.submit(request))
        engine.step()
    assert engine.schedule.running == asked
    run(engine, asked)
    assert asked[important].retractions == 0
    assert engine.totals.retractions > 0
    engine.close()
