"""Log-probabilities of tokens, in the two formats of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvgraft_transformers.engine import Choice, PromptToken
from kvgraft_transformers.serving.text import Tokenizer

__all__ = ["chat_logprobs", "completion_logprobs", "count_characters", "prompt_logprobs"]

CONTINUATION = range(0x80, 0xC0)
"""Continuation bytes of UTF-8."""


def chat_logprobs(tokenizer: Tokenizer, choices: Sequence[Choice]) -> dict[str, Any]:
    """`logprobs` of a chat's choice: an entry per token, with its bytes."""
    content = []
    for choice in choices:
        top = [_entry(tokenizer, token, logprob) for token, logprob in choice.top]
        content.append({**_entry(tokenizer, choice.token, choice.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, choices: Sequence[Choice], offset: int
) -> dict[str, Any]:
    """`logprobs` of a completion's choice: lists with an entry per token.

    Args:
        tokenizer: decodes the tokens.
        choices: the tokens.
        offset: characters of the text before the first token.
    """
    offsets: list[int] = []
    top_logprobs: list[dict[str, float | None] | None] = []
    for choice in choices:
        offsets.append(offset)
        offset += count_characters(tokenizer, [choice])
        if choice.logprob is None:  # the first token of a prompt
            top_logprobs.append(None)
            continue
        top: dict[str, float | None] = {}
        for token, logprob in (*choice.top, (choice.token, choice.logprob)):
            top.setdefault(_name(tokenizer, token), logprob)
        top_logprobs.append(top)
    return {
        "tokens": [_name(tokenizer, choice.token) for choice in choices],
        "token_logprobs": [choice.logprob for choice in choices],
        "top_logprobs": top_logprobs,
        "text_offset": offsets,
    }


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[PromptToken]
) -> list[dict[str, Any] | None]:
    """As vLLM has them: of each token but the first, itself and the likeliest ones, by id."""
    entries: list[dict[str, Any] | None] = []
    for told in prompt:
        if told.logprob is None:
            entries.append(None)
            continue
        ranked = [(told.token, told.logprob, told.rank)]
        ranked += [(each.token, each.logprob, rank) for rank, each in enumerate(told.top, 1)]
        entry: dict[str, Any] = {}
        for token, logprob, rank in ranked:
            said = {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.token_text(token)}
            entry.setdefault(str(token), said)
        entries.append(entry)
    return entries


def count_characters(tokenizer: Tokenizer, choices: Sequence[Choice]) -> int:
    """The number of characters that begin in these tokens."""
    n_characters = 0
    for choice in choices:
        data = tokenizer.token_bytes(choice.token)
        if data is None:
            n_characters += len(tokenizer.token_text(choice.token))
        else:
            n_characters += sum(byte not in CONTINUATION for byte in data)
    return n_characters


def _entry(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {
        "token": tokenizer.token_text(token),
        "logprob": logprob,
        "bytes": None if data is None else list(data),
    }


def _name(tokenizer: Tokenizer, token: int) -> str:
    """A token's text; for a part of characters its bytes in hexadecimal."""
    text, data = tokenizer.token_text(token), tokenizer.token_bytes(token)
    if data is None or text.encode() == data:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
