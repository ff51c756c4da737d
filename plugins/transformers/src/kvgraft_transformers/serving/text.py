"""Converts between text and tokens: prompts, chat templates, text streams, stop strings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from tokenizers.pre_tokenizers import ByteLevel

from kvgraft_transformers.serving.protocol import ApiError, Message

__all__ = ["TextStream", "Tokenizer"]

BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
"""The form of byte tokens, in vocabularies that fall back to bytes."""

PARTIAL = "\ufffd"
"""The replacement character, for incomplete or invalid bytes."""

WINDOW_TOKENS = 32
"""Length of a stream's window, in tokens, at which its start moves."""

CLEANED_CHARS = 32
"""Characters at the end that a tokenizer may still change if it cleans up spaces."""


class Tokenizer:
    """A model's tokenizer, for the server.

    Args:
        tokenizer: a transformers tokenizer with a `tokenizers` backend.

    Attributes:
        backend: its `tokenizers` backend.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.backend = tokenizer
        self._tokenizer = tokenizer
        self._added = dict(getattr(tokenizer, "added_tokens_decoder", {}))

    @property
    def unsettled_chars(self) -> int:
        """Characters at the end of a text that later tokens can change, besides partial ones."""
        cleans = getattr(self._tokenizer, "clean_up_tokenization_spaces", False)
        return CLEANED_CHARS if cleans else 0

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the model's own special tokens."""
        return self._ids(text, add_special_tokens=True)

    def encode_chat(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a conversation, up to the start of the model's turn.

        Args:
            messages: the conversation.
            variables: more variables of the chat template, such as `enable_thinking`.

        Raises:
            ApiError: the model has no chat template, or it refuses the messages, or a variable has
                the name of a tokenizer argument.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise ApiError("this model has no chat template; use /v1/completions", param="messages")
        variables = variables or {}
        self._check_variables(variables)
        try:
            text = self._render(_turns(messages), variables)
        except (TemplateError, TypeError, ValueError) as error:
            raise ApiError(
                f"the model's chat template refuses the messages: {error}", param="messages"
            ) from error
        return self._ids(text, add_special_tokens=False)

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        own = inspect.signature(self._tokenizer.apply_chat_template).parameters
        for name in variables:
            if name in own or name == "messages":  # the conversation, in templates
                raise ApiError(
                    f"chat_template_kwargs.{name} is an argument of the tokenizer, no variable of "
                    "a chat template; leave it out",
                    param="chat_template_kwargs",
                )

    def system_tokens(
        self,
        messages: Sequence[Message],
        prompt: Sequence[int],
        variables: Mapping[str, Any] | None = None,
    ) -> int:
        """Tokens of a chat's prompt that come only from its system messages; 0 if none do.

        Other chats with the same system messages begin with the same tokens. They are found by
        comparison with a prompt whose first other message differs, which works for any template and
        costs about as much as tokenizing the system messages.

        Args:
            messages: the conversation.
            prompt: its token ids, as `encode_chat` gives them.
            variables: the variables that it was given.
        """
        turns = _turns(messages)
        n_system = next((i for i, each in enumerate(turns) if each["role"] != "system"), 0)
        if not n_system:
            return 0
        other = dict(turns[n_system])
        other["content"] = "1" if other["content"][:1] != "1" else "2"
        return self._shared(prompt, [*turns[:n_system], other], variables)

    def next_turn_tokens(
        self,
        messages: Sequence[Message],
        prompt: Sequence[int],
        variables: Mapping[str, Any] | None = None,
    ) -> int:
        """Tokens of a chat's prompt that its next turn begins with; 0 if those are all.

        A template may end a prompt differently from how the next turn repeats it: with a mark for
        thinking, or with its last tokens merged with the answer's. The tokens are found by
        comparison with a prompt of one more turn, which costs about as much as tokenizing the
        prompt.

        Args:
            messages: the conversation.
            prompt: its token ids, as `encode_chat` gives them.
            variables: the variables that it was given.
        """
        more = [{"role": "assistant", "content": "1"}, {"role": "user", "content": "1"}]
        return self._shared(prompt, [*_turns(messages), *more], variables)

    def _shared(
        self,
        prompt: Sequence[int],
        turns: list[dict[str, str]],
        variables: Mapping[str, Any] | None,
    ) -> int:
        """Tokens that a prompt shares with another chat's; 0 if that begins with all of them."""
        try:
            ids = self._ids(self._render(turns, variables or {}), add_special_tokens=False)
        except (TemplateError, TypeError, ValueError, ApiError):
            return 0
        pairs = enumerate(zip(prompt, ids))
        return next((at for at, (one, another) in pairs if one != another), 0)

    def _render(self, turns: list[dict[str, str]], variables: Mapping[str, Any]) -> str:
        """A conversation as text, up to the start of the model's turn."""
        text = self._tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, **variables
        )
        return str(text)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ApiError(
                f"character {error.start} is half a surrogate pair, not text; send valid Unicode"
            ) from error
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def is_silent(self, token: int) -> bool:
        """Whether decoding omits a token: a special or a nonexistent one."""
        known = self._added.get(token)
        return known.special if known is not None else self._name(token) is None

    def is_byte(self, token: int) -> bool:
        """Whether a token is one byte, so that its text depends on its neighbours."""
        name = self._name(token)
        return name is not None and BYTE_TOKEN.fullmatch(name) is not None

    def token_text(self, token: int) -> str:
        """The text of a single token, also a special one; U+FFFD for parts of characters."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def token_bytes(self, token: int) -> bytes | None:
        """The UTF-8 bytes of a single token; None if the vocabulary does not show them."""
        text, name = self.token_text(token), self._name(token) or ""
        if PARTIAL not in text:
            return text.encode()
        if BYTE_TOKEN.fullmatch(name):
            return bytes([int(name[3:5], 16)])
        known = _byte_level()
        if not all(character in known for character in name):
            return None
        data = bytes(known[character] for character in name)
        return data if data.decode(errors="replace") == text else None

    def _name(self, token: int) -> str | None:
        name = self._tokenizer.convert_ids_to_tokens(token)
        return None if name is None else str(name)


@lru_cache(maxsize=1)
def _byte_level() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary."""
    # printable bytes of Latin-1 are their own characters, others are the characters from 256 on
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    known = {chr(byte): byte for byte in printable}
    known |= {chr(256 + index): byte for index, byte in enumerate(others)}
    assert set(known) == set(ByteLevel.alphabet())
    return known


def _turns(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as chat templates take them."""
    return [
        {"role": "system" if each.role == "developer" else each.role, "content": each.text()}
        for each in messages
    ]


class TextStream:
    """Decodes a growing list of tokens piece by piece, up to a stop string.

    All pieces together are the text of all tokens. Text that may still change is held back:
    incomplete characters; a run of byte tokens, which one invalid byte turns into replacement
    characters as a whole; and a possible start of a stop string.

    Only the last tokens are decoded at each step:

        tokens   . . . . . . [ a  b  c  d ] e      window: from a place where a character ends
        text     released    [ released | held ]

    Args:
        tokenizer: decodes the tokens.
        stops: strings that end the text and are not part of it.

    Attributes:
        stopped: whether a stop string came.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._unsettled = tokenizer.unsettled_chars
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        self._start = 0  # of the window
        self._next_start = 0
        self._released = 0  # characters of the window's text
        self._total = 0
        self._held = ""
        self._may_stop = True
        self.stopped = False

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """The text that a token adds; empty while characters or stop strings are incomplete.

        A stop string that is complete before the text may stop has no effect.
        """
        self._may_stop = may_stop
        if self.stopped or self._tokenizer.is_silent(token):
            return ""
        self._tokens.append(token)
        if self._tokenizer.is_byte(token):
            return ""
        text = self._tokenizer.decode(self._tokens[self._start :])
        settled = text.rstrip(PARTIAL)
        complete = len(settled) == len(text)
        settled = settled[: max(0, len(settled) - self._unsettled)]
        piece = settled[self._released :]
        self._released += len(piece)
        self._total += len(piece)
        if complete:
            self._move_window(text)
        return self._release(piece)

    def finish(self) -> str:
        """The rest: text that was held back, and incomplete characters."""
        if self.stopped:
            return ""
        text = self._release(self._tokenizer.decode(self._tokens)[self._total :])
        rest, self._held = self._held, ""
        return text + rest

    def _move_window(self, text: str) -> None:
        """Move the start of a long window to a later end of a character.

        A tokenizer may decode the first token differently, such as without a space. So the shorter
        window must end like the longer one and contain more than spaces.
        """
        n_tokens = len(self._tokens)
        if n_tokens - self._start < WINDOW_TOKENS:
            if n_tokens - self._start <= WINDOW_TOKENS // 2:
                self._next_start = n_tokens
            return
        shorter = self._tokenizer.decode(self._tokens[self._next_start :])
        dropped = len(text) - len(shorter)
        if shorter.strip() and text.endswith(shorter) and dropped <= self._released:
            self._start = self._next_start
            self._released -= dropped
        self._next_start = n_tokens

    def _release(self, piece: str) -> str:
        text = self._held + piece
        stops = self._stops if self._may_stop else ()
        ends = [text.index(stop) for stop in stops if stop in text]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Number of characters at the end of `text` that may be the start of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
