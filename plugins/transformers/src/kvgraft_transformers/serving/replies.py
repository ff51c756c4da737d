"""Replies to clients: whole answers, and chunks of them."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Reply", "Usage"]


@dataclass(slots=True)
class Usage:
    """Tokens of one request, over all its answers.

    Attributes:
        prompt_tokens: of its prompts, each once.
        cached_tokens: those that were not computed.
        completion_tokens: produced.
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
class Reply:
    """The frame of one request's answers.

    Attributes:
        model: as the client named it.
        chat: whether messages were asked for.
    """

    model: str
    chat: bool
    usage: Usage = field(default_factory=Usage)
    ident: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.ident}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def whole(self, answers: list[tuple[str, str]]) -> dict[str, Any]:
        """Everything at once; answers are texts with the reason why each ended."""
        choices = []
        for index, (text, reason) in enumerate(answers):
            said: dict[str, Any] = (
                {"message": {"role": "assistant", "content": text, "refusal": None}}
                if self.chat
                else {"text": text}
            )
            choices.append({"index": index, **said, "logprobs": None, "finish_reason": reason})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._frame(kind, choices), "usage": self.usage.as_json()}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk that says who speaks; None for plain completions."""
        if not self.chat:
            return None
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """A chunk of text."""
        return self._chunk(index, {"content": text}, None)

    def ending(self, index: int, reason: str) -> dict[str, Any]:
        """The chunk that says why an answer ended."""
        return self._chunk(index, {}, reason)

    def totals(self) -> dict[str, Any]:
        """The last chunk of a stream whose usage was asked for."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._frame(kind, []), "usage": self.usage.as_json()}

    def _chunk(self, index: int, delta: dict[str, str], reason: str | None) -> dict[str, Any]:
        if self.chat:
            said: dict[str, Any] = {"delta": delta}
            kind = "chat.completion.chunk"
        else:
            said = {"text": delta.get("content", "")}
            kind = "text_completion"
        choice = {"index": index, **said, "logprobs": None, "finish_reason": reason}
        return self._frame(kind, [choice])
