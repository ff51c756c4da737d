"""Answers that follow a JSON schema; skipped where llguidance is not installed."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvgraft_transformers.serving.grammar import Grammars
from kvgraft_transformers.serving.protocol import ApiError
from kvgraft_transformers.tiny import build_tiny_model
from kvgraft_transformers.tiny_tokenizer import build_tiny_tokenizer

from .serving_inside import Inside, serve_inside

SCHEMA = {
    "type": "object",
    "properties": {"known": {"type": "boolean"}, "unit": {"enum": ["page", "slot"]}},
    "required": ["known", "unit"],
    "additionalProperties": False,
}


def expect_unit(text: str) -> None:
    """Check an answer against `SCHEMA`."""
    answer = json.loads(text)
    assert set(answer) == {"known", "unit"}
    assert isinstance(answer["known"], bool)
    assert answer["unit"] in {"page", "slot"}


FORMAT = {"type": "json_schema", "json_schema": {"name": "unit", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def inside() -> Iterator[Inside]:
    pytest.importorskip("llguidance")
    with serve_inside(build_tiny_model("llama", dtype=torch.float64), guard="on") as served:
        yield served


@pytest.mark.parametrize("seed", range(4))
def test_a_drawn_answer_follows_its_schema_and_ends_with_it(inside: Inside, seed: int) -> None:
    asked = {"response_format": FORMAT, "temperature": 1.5, "seed": seed, "max_tokens": 400}
    said = inside.chat("Which unit?", **asked)
    assert said["finish_reason"] == "stop"
    expect_unit(said["message"]["content"])


def test_a_stream_and_a_completion_follow_a_schema_too(inside: Inside) -> None:
    asked = {"response_format": FORMAT, "max_tokens": 400}
    expect_unit(inside.complete("unit =", **asked)["text"])
    chunks = inside.stream("/v1/completions", {"prompt": "unit =", **asked})
    text = "".join(chunk["text"] for chunk in chunks)
    expect_unit(text)
    assert chunks[-1]["finish_reason"] == "stop"


def test_each_of_several_answers_follows_the_schema_by_itself(inside: Inside) -> None:
    body = {"prompt": "unit =", "n": 3, "temperature": 1.5, "seed": 1, "max_tokens": 400}
    reply = inside.post("/v1/completions", {**body, "response_format": FORMAT}).json()
    texts = [choice["text"] for choice in reply["choices"]]
    assert len(set(texts)) > 1
    for text in texts:
        expect_unit(text)


def test_any_object_begins_with_a_brace_and_text_is_free(inside: Inside) -> None:
    said = inside.complete("x", response_format={"type": "json_object"}, max_tokens=30)
    assert said["text"].startswith("{")
    free = inside.complete("x", response_format={"type": "text"}, max_tokens=30)
    assert free["text"] == inside.complete("x", max_tokens=30)["text"]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"type": "xml"}, "response_format.type='xml'"),
        (
            {"type": "json_schema"},
            "give json_schema with type json_schema, and only then",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}},
            "response_format: no grammar for this schema: Invalid type: objekt",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}},
            'no grammar for this schema: Unimplemented keys: ["not"]',
        ),
    ],
)
def test_a_format_that_cannot_be_kept_is_refused(inside: Inside, form: Any, message: str) -> None:
    reply = inside.post("/v1/completions", {"prompt": "x", "response_format": form})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"].partition(".")[0] == "response_format"
    assert message in error["message"]
    assert "\n" not in error["message"]


def test_without_llguidance_a_format_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ApiError, match="needs llguidance, which this server does not have"):
        Grammars(build_tiny_tokenizer(), frozenset({2})).compile({"type": "object"})
