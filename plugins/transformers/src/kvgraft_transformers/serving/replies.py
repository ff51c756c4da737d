"""Replies to clients: whole answers and chunks."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvgraft_transformers.engine import Choice, PromptToken
from kvgraft_transformers.serving.logprobs import (
    chat_logprobs,
    completion_logprobs,
    count_characters,
    prompt_logprobs,
)
from kvgraft_transformers.serving.text import Tokenizer

__all__ = ["Reply", "Usage", "WholeAnswer"]


@dataclass(slots=True)
class Usage:
    """Token counts of one request, over all its answers.

    Attributes:
        prompt_tokens: tokens of its prompts, each prompt once.
        cached_tokens: prompt tokens that were not computed.
        completion_tokens: output tokens.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        """The API's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class WholeAnswer:
    """One complete answer.

    Attributes:
        text: its whole text.
        reason: its finish reason.
        choices: its tokens if log-probabilities were requested.
        prompt: those of its prompt, likewise.
    """

    text: str = ""
    reason: str | None = None
    choices: list[Choice] = field(default_factory=list)
    prompt: Sequence[PromptToken] = ()


@dataclass(slots=True)
class Reply:
    """Builds the responses of one request.

    Attributes:
        model: the model's name in the request.
        chat: whether it is a chat.
        tokenizer: decodes single tokens.
        logprobs: whether log-probabilities were requested.
        tells_usage: whether every chunk of a stream holds the usage so far.
    """

    model: str
    chat: bool
    tokenizer: Tokenizer
    logprobs: bool
    _offsets: Counter[int] = field(default_factory=Counter)
    usage: Usage = field(default_factory=Usage)
    ident: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    tells_usage: bool = False

    @property
    def name(self) -> str:
        """The response's id."""
        return f"{'chatcmpl' if self.chat else 'cmpl'}-{self.ident}"

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def whole(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
        """The whole response."""
        choices = []
        for index, answer in enumerate(answers):
            said: dict[str, Any] = (
                {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
                if self.chat
                else {"text": answer.text}
            )
            logprobs = self._logprobs(index, answer.choices) if self.logprobs else None
            choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": answer.reason}
            if answer.prompt and not self.chat:
                choice["prompt_logprobs"] = prompt_logprobs(self.tokenizer, answer.prompt)
            choices.append(choice)
        kind = "chat.completion" if self.chat else "text_completion"
        whole = {**self._frame(kind, choices), "usage": self.usage.as_json()}
        if self.chat and answers and answers[0].prompt:
            whole["prompt_logprobs"] = prompt_logprobs(self.tokenizer, answers[0].prompt)
        return whole

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk with the role; None for plain completions."""
        if not self.chat:
            return None
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def piece(self, index: int, text: str, choices: Sequence[Choice]) -> dict[str, Any]:
        """A chunk of text, with the log-probabilities of its tokens if there are any."""
        return self._chunk(index, {"content": text}, None, choices)

    def ending(self, index: int, reason: str, choices: Sequence[Choice]) -> dict[str, Any]:
        """The chunk with the finish reason, and with log-probabilities of tokens without text."""
        return self._chunk(index, {}, reason, choices)

    def totals(self) -> dict[str, Any]:
        """The last chunk of a stream whose usage was requested."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._frame(kind, []), "usage": self.usage.as_json()}

    def _chunk(
        self,
        index: int,
        delta: dict[str, str],
        reason: str | None,
        choices: Sequence[Choice] = (),
    ) -> dict[str, Any]:
        if self.chat:
            said: dict[str, Any] = {"delta": delta}
            kind = "chat.completion.chunk"
        else:
            said = {"text": delta.get("content", "")}
            kind = "text_completion"
        logprobs = self._logprobs(index, choices) if choices else None
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": self.usage.as_json()} if self.tells_usage else {}
        return {**self._frame(kind, [choice]), **usage}

    def _logprobs(self, index: int, choices: Sequence[Choice]) -> dict[str, Any]:
        if self.chat:
            return chat_logprobs(self.tokenizer, choices)
        before = self._offsets[index]
        self._offsets[index] += count_characters(self.tokenizer, choices)
        return completion_logprobs(self.tokenizer, choices, before)
