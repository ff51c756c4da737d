"""Between text and tokens: prompts, chat templates, streams of text, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream

from kvgraft_transformers.serving.protocol import ApiError, Message

__all__ = ["TextStream", "Tokenizer"]


class Tokenizer:
    """A model's tokenizer, as the server uses it.

    Args:
        tokenizer: a transformers tokenizer with a `tokenizers` backend.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def backend(self) -> Any:
        """The `tokenizers` object behind it."""
        return self._tokenizer.backend_tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the model's own special tokens."""
        return self._ids(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the model's turn begins.

        Raises:
            ApiError: the model has no chat template, or it refuses the messages.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise ApiError("this model has no chat template; use /v1/completions", param="messages")
        turns = [
            {"role": "system" if each.role == "developer" else each.role, "content": each.text()}
            for each in messages
        ]
        try:
            text = self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, ValueError) as error:
            raise ApiError(
                f"the model's chat template refuses the messages: {error}", param="messages"
            ) from error
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ApiError(
                f"character {error.start} is half a surrogate pair, not text; send valid Unicode"
            ) from error
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


class TextStream:
    """The text of a growing list of tokens, piece by piece, up to a stop string.

    Text that could be the beginning of a stop string is held back until it is known not to be.

    Args:
        tokenizer: whose tokens.
        stops: strings that end the text; they are not part of it.

    Attributes:
        stopped: whether a stop string came.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        self._decoded = 0
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text one more token adds; empty where characters or stop strings are incomplete."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        piece = self._stream.step(self._tokenizer.backend, token) or ""
        self._decoded += len(piece)
        return self._release(piece)

    def finish(self) -> str:
        """The rest: what was held back, and characters that were never completed."""
        if self.stopped:
            return ""
        tail = self._tokenizer.decode(self._tokens)[self._decoded :]
        text = self._release(tail)
        rest, self._held = self._held, ""
        return text + rest

    def _release(self, piece: str) -> str:
        text = self._held + piece
        ends = [text.index(stop) for stop in self._stops if stop in text]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
