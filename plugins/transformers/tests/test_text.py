"""Tokens to text, piece by piece, up to a stop string."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from kvgraft_transformers.serving.protocol import Message
from kvgraft_transformers.serving.text import WINDOW_TOKENS, TextStream, Tokenizer
from kvgraft_transformers.tiny_tokenizer import build_tiny_tokenizer


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    return Tokenizer(build_tiny_tokenizer())


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁a", "b", "▁▁", "é", "大", "'", "▁'", ".", "▁.", "n't", "▁s", "</w>", "c</w>", "##d"]
SPECIAL = ["<s>", "</s>", "<unk>"]
"""Two of them are special to the tokenizer, the third is a word like any other."""


def _llama_like() -> Backend:
    """A vocabulary that falls back to bytes, with SentencePiece's spaces."""
    vocabulary = {name: index for index, name in enumerate([*BYTES, *WORDS, *SPECIAL])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*spaces, decoders.Strip(" ", 1, 0)])
    return backend


def _unigram() -> Backend:
    words = [(name, -1.0) for name in [*SPECIAL, *BYTES, *WORDS]]
    backend = Backend(models.Unigram(words, unk_id=2, byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return backend


def _word_piece() -> Backend:
    vocabulary = {name: index for index, name in enumerate([*SPECIAL, *WORDS, *"xyz!?,"])}
    backend = Backend(models.WordPiece(vocab=vocabulary, unk_token="<unk>"))
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return backend


def _word_ends() -> Backend:
    vocabulary = {name: index for index, name in enumerate([*SPECIAL, *WORDS])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], end_of_word_suffix="</w>"))
    backend.decoder = decoders.BPEDecoder()
    return backend


BYTE_FALLBACK_B = 256 + WORDS.index("b")
"""The token `b` of `_llama_like`."""

BACKENDS = {
    "byte-fallback": _llama_like,
    "unigram": _unigram,
    "word-piece": _word_piece,
    "word-ends": _word_ends,
}


@cache
def fast(kind: str) -> Tokenizer:
    """A tokenizer of a kind, with an added word and two special tokens."""
    if kind == "byte-level":
        return tokenizer()
    backend = BACKENDS[kind]()
    backend.add_special_tokens(SPECIAL[:2])
    backend.add_tokens(["<added>"])
    cleans = kind == "word-piece"
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=cleans)
    return Tokenizer(wrapped)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["byte-level", *BACKENDS])
@settings(deadline=None, max_examples=50)  # the first example builds the tokenizer
@given(data=st.data())
def test_a_stream_gives_the_text_of_all_tokens_decoded_at_once(kind: Any, data: Any) -> None:
    n_tokens = 512 if kind == "byte-level" else 300
    some = st.integers(0, n_tokens + 3)  # a model may have tokens its tokenizer does not
    few = st.sampled_from(data.draw(st.lists(some, min_size=1, max_size=4)))
    tokens = data.draw(st.lists(st.one_of(some, few), max_size=120))
    stream = TextStream(fast(kind))
    said = [stream.push(token) for token in tokens]
    assert "".join([*said, stream.finish()]) == fast(kind).decode(tokens)


def test_a_valid_byte_before_invalid_ones_is_held_back_with_them() -> None:
    each = fast("byte-fallback")
    tokens = [0x41, 0xFF, BYTE_FALLBACK_B]
    stream = TextStream(each)
    assert [stream.push(token) for token in tokens] == ["", "", "\ufffd\ufffdb"]
    assert each.decode(tokens) == "\ufffd\ufffdb"


def test_text_comes_as_soon_as_nothing_can_change_it() -> None:
    each = fast("byte-fallback")
    character = [*"大".encode()]
    stream = TextStream(each)
    tokens = [BYTE_FALLBACK_B, *character, BYTE_FALLBACK_B, *character]
    said = [stream.push(token) for token in tokens]
    assert said == ["b", "", "", "", "大b", "", "", ""]
    assert stream.finish() == "大"


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_a_long_answer_is_decoded_a_few_tokens_at_a_time(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = fast(kind)
    some = (
        each.encode("a tree\n") if kind == "byte-level" else [BYTE_FALLBACK_B, BYTE_FALLBACK_B + 2]
    )
    tokens = (some * 2000)[:2000]
    decoded = []
    decode = each.decode

    def counted(some: Any) -> Any:
        decoded.append(len(some))
        return decode(some)

    monkeypatch.setattr(each, "decode", counted)
    stream = TextStream(each)
    said = [stream.push(token) for token in tokens]
    assert max(decoded) <= 2 * WINDOW_TOKENS
    assert "".join(said) == decode(tokens)


def pieces(tokens: list[int], stops: list[str]) -> tuple[list[str], bool]:
    stream = TextStream(tokenizer(), stops)
    said = []
    for token in tokens:
        said.append(stream.push(token))
        if stream.stopped:
            break
    return [*said, stream.finish()], stream.stopped


@settings(deadline=None)  # the first example builds the tokenizer
@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_the_text_ends_before_the_first_stop_string(text: Any, stops: Any) -> None:
    tokens = tokenizer().encode(text)
    whole = tokenizer().decode(tokens)
    ends = [whole.index(stop) for stop in stops if stop in whole]
    said, stopped = pieces(tokens, stops)
    assert "".join(said) == whole[: min(ends, default=len(whole))]
    assert stopped == bool(ends)


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(tokenizer(), ["ENDE"])
    said = [stream.push(token) for token in tokenizer().encode("xENDy")]
    assert "".join(said) == "xENDy"
    assert not any(piece.endswith(("E", "EN", "END")) for piece in said)


HI = Message(role="user", content="Hi")
SYSTEM = Message(role="system", content="You are terse.")
DEVELOPER = Message(role="developer", content="Say nothing of pages.")


@pytest.mark.parametrize(
    ("messages", "shared"),
    [
        ([SYSTEM, HI], "<|system|>You are terse.<|end|><|user|>"),
        (
            [SYSTEM, DEVELOPER, HI, SYSTEM, HI],
            "<|system|>You are terse.<|end|><|system|>Say nothing of pages.<|end|><|user|>",
        ),
        ([SYSTEM, Message(role="user", content="1")], "<|system|>You are terse.<|end|><|user|>"),
        ([HI], ""),
        ([SYSTEM], ""),
    ],
)
def test_the_tokens_of_system_messages_are_those_other_chats_begin_with(
    messages: Any, shared: Any
) -> None:
    prompt = tokenizer().encode_chat(messages)
    assert tokenizer().system_tokens(messages, prompt) == len(tokenizer().encode(shared))


def test_a_template_that_puts_the_system_message_elsewhere_is_asked_as_well() -> None:
    """As Gemma's, whose system message begins the user's turn; and one that takes no short chat."""
    inner = build_tiny_tokenizer()
    inner.chat_template = (
        "<|user|>{{ messages[0]['content'] }}\n\n{{ messages[1]['content'] }}<|end|>"
        "{% if 'strict' in messages[0]['content'] and messages | length < 3 %}"
        "{{ raise_exception('too short') }}{% endif %}<|assistant|>"
    )
    folding = Tokenizer(inner)
    prompt = folding.encode_chat([SYSTEM, HI])
    n_tokens = folding.system_tokens([SYSTEM, HI], prompt)
    assert folding.decode(prompt[:n_tokens]).strip() == "You are terse."
    strict = [Message(role="system", content="Be strict."), HI, HI]
    assert folding.system_tokens(strict, folding.encode_chat(strict)) == 0
