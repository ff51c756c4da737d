"""`kvgraft serve --draft-model`, over HTTP, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from kvgraft import ConfigError
from kvgraft_transformers.serving.command import serve
from kvgraft_transformers.tiny import build_tiny_model

from .serving_process import Server

DRAFTS = ("--max-drafts", "4", "--draft-model")


def answer(server: Any) -> str:
    body = {"model": "tiny-gemma", "prompt": "def parse(text):", "max_tokens": 40, "temperature": 0}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


@pytest.mark.long
def test_a_server_answers_with_a_draft_model_as_without(checkpoint: Path, tmp_path: Path) -> None:
    with Server(checkpoint, log=tmp_path / "plain") as plain:
        expected = answer(plain)
        plain.stop()
    with Server(checkpoint, *DRAFTS, str(checkpoint), log=tmp_path / "drafted") as drafted:
        assert answer(drafted) == expected
        counts = drafted.metrics()
        assert counts["kvgraft_accepted_tokens_total"] == counts["kvgraft_draft_tokens_total"] > 20
        assert drafted.stop() == 0


def refused(*arguments: str | Path) -> str:
    with pytest.raises(ConfigError) as refusal:
        serve.main([*map(str, arguments), "--port", "0"], standalone_mode=False)
    line = str(refusal.value)
    assert "\n" not in line
    return line


def test_a_draft_model_without_drafts_is_refused(checkpoint: Path) -> None:
    assert refused(checkpoint, "--draft-model", checkpoint) == (
        "--draft-model makes no drafts with --max-drafts 0; give --max-drafts 4"
    )


def test_a_draft_model_that_is_not_there_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    assert refused(checkpoint, *DRAFTS, tmp_path / "nothing") == (
        f"model '{tmp_path / 'nothing'}': no config.json there; give a checkpoint's directory"
    )


def test_a_draft_model_with_another_tokenizer_is_refused_before_anything_is_loaded(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_tiny_model("llama").save_pretrained(tmp_path)
    PreTrainedTokenizerFast.from_pretrained(checkpoint).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    described = json.loads(path.read_text(encoding="utf-8"))
    numbers = described["model"]["vocab"]
    (first, one), (second, other) = list(numbers.items())[-2:]
    numbers |= {first: other, second: one}
    path.write_text(json.dumps(described), encoding="utf-8")
    assert refused(checkpoint, *DRAFTS, tmp_path) == (
        f"--draft-model '{tmp_path}': token {min(first, second)!r} has the number "
        f"{numbers[min(first, second)]}, and {one + other - numbers[min(first, second)]} in "
        f"'{checkpoint}'; give a model with the same tokenizer, or leave it out for prompt lookup"
    )
    assert "loading" not in capsys.readouterr().err
