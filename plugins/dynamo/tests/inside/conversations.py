"""Conversations with a model, over HTTP and with one engine in this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Alone", "Reply", "conversation", "talk"]

NEW_TOKENS = 6
WORDS = ("page", "slot", "tree", "node", "cache", "block", "window", "state", "prefix", "token")

Messages = list[dict[str, str]]


class Reply(NamedTuple):
    text: str
    prompt_tokens: int
    cached_tokens: int = 0
    worker: int | None = None
    prefill_worker: int | None = None


def _text(numbers: random.Random, n_words: int) -> str:
    return " ".join(numbers.choice(WORDS) + str(numbers.randrange(100)) for _ in range(n_words))


def conversation(seed: int, n_turns: int) -> list[str]:
    """A system prompt and the user's turns."""
    numbers = random.Random(seed)
    return [_text(numbers, 30), *(_text(numbers, 10) for _ in range(n_turns))]


def talk(lines: list[str], answer: Callable[[Messages], Reply]) -> Iterator[Reply]:
    """A conversation turn by turn, with what can be read of the answers."""
    messages = [{"role": "system", "content": lines[0]}]
    for line in lines[1:]:
        messages.append({"role": "user", "content": line})
        reply = answer(messages)
        readable = "".join(each for each in reply.text if each.isascii() and each.isalnum())
        messages.append({"role": "assistant", "content": readable or "-"})
        yield reply


class Alone:
    """One engine without any fleet, which computes every prompt whole."""

    def __init__(self, directory: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from kvgraft_transformers.engine import Engine, EngineSettings

        torch.set_num_threads(1)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
        sizes: dict[str, Any] = {"device_tokens": 4096, "host_tokens": 0}
        self.engine = Engine.open(model, EngineSettings(chunk_tokens=64), **sizes)

    def answer(self, messages: Messages) -> Reply:
        from kvgraft_transformers.engine import GenerationRequest

        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        self.engine.memory.cache.clear()
        (done,) = self.engine.generate([GenerationRequest(tokens, NEW_TOKENS)])
        assert done.cached_tokens == 0
        return Reply(self.tokenizer.decode(done.tokens, skip_special_tokens=True), len(tokens))

    def close(self) -> None:
        self.engine.close()
