"""Tokens to text, piece by piece, up to a stop string."""

from __future__ import annotations

from functools import lru_cache

from hypothesis import given
from hypothesis import strategies as st

from kvgraft_transformers.serving.text import TextStream, Tokenizer
from kvgraft_transformers.tiny_tokenizer import build_tiny_tokenizer


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    return Tokenizer(build_tiny_tokenizer())


def pieces(tokens: list[int], stops: list[str]) -> tuple[list[str], bool]:
    stream = TextStream(tokenizer(), stops)
    said = []
    for token in tokens:
        said.append(stream.push(token))
        if stream.stopped:
            break
    return [*said, stream.finish()], stream.stopped


@given(st.lists(st.integers(0, 511), max_size=40))
def test_pieces_add_up_to_the_text_whatever_the_tokens(tokens):
    said, stopped = pieces(tokens, [])
    assert "".join(said) == tokenizer().decode(tokens)
    assert not stopped


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_the_text_ends_before_the_first_stop_string(text, stops):
    tokens = tokenizer().encode(text)
    whole = tokenizer().decode(tokens)
    ends = [whole.index(stop) for stop in stops if stop in whole]
    said, stopped = pieces(tokens, stops)
    assert "".join(said) == whole[: min(ends, default=len(whole))]
    assert stopped == bool(ends)


def test_what_may_become_a_stop_string_is_held_back():
    stream = TextStream(tokenizer(), ["ENDE"])
    said = [stream.push(token) for token in tokenizer().encode("xENDy")]
    assert "".join(said) == "xENDy"
    assert not any(piece.endswith(("E", "EN", "END")) for piece in said)
