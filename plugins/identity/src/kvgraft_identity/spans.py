"""Spans of a key whose tokens stand for something else, such as an image, and its identity.

The tree compares a key's int32 bytes, and everything that names pages hashes them. So in a span the
key has other numbers in place of the tokens, made from the identity and negative, which no token
is. What compares or names data needs to know nothing of identities:

    tokens   1  2  32000  32000  ...  32000  3        the same for every image
    key      1  2  -90210 -4711  ...  -8086  3        31 bits of the identity's hash at each token

A number depends on the identity, on its token and on its place in the span. Eight of them hold 248
bits. Two identities whose first numbers are equal share the pages of these alone: for pages of one
token that is one token in 2^31 pairs of images.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any, ClassVar, Final
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from kvgraft.errors import ConfigError
from kvgraft.refusals import of_type
from kvgraft.tree.keys import TokenKey, shown_start

__all__ = ["FEWEST_TOKENS", "Identities", "Span"]

FEWEST_TOKENS: Final = 8
"""Tokens of the shortest span: their numbers tell identities apart."""

MOST_PLACEHOLDERS: Final = 64
"""Different tokens in a span, such as an image's, its rows' ends and its own end."""

MOST_CHARACTERS: Final = 1024
"""Of an identity."""

SIGN: Final = np.uint32(1 << 31)

WITHOUT_SIGN: Final = np.int32((1 << 31) - 1)


class Span:
    """Tokens of a key that stand for one thing.

    Attributes:
        start, end: the tokens `[start, end)`.
        identity: of the thing.
        tokens: the placeholders, int32 `[end - start]`.
        numbers: the key's numbers in their place, int32 `[end - start]`.
    """

    __slots__ = ("__weakref__", "end", "identity", "numbers", "start", "tokens")

    def __init__(
        self,
        start: int,
        identity: str,
        tokens: npt.NDArray[np.int32],
        numbers: npt.NDArray[np.int32],
    ) -> None:
        self.start = start
        self.end = start + len(tokens)
        self.identity = identity
        self.tokens = tokens
        self.numbers = numbers

    def before(self, end: int) -> Span:
        """Its part before a token of the key."""
        n = end - self.start
        if n >= len(self.tokens):
            return self
        return Span(self.start, self.identity, self.tokens[:n], self.numbers[:n])

    def __repr__(self) -> str:
        return f"<Span [{self.start}, {self.end}) of {self.identity!r:.40}>"


def numbers_of(identity: str, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The negative numbers that stand for an identity in a key; the same on every machine."""
    numbers = np.empty(len(tokens), np.uint32)
    for token in np.unique(tokens):
        seed = b"kvgraft identity 1\0%d\0" % token + identity.encode()
        stream = np.frombuffer(hashlib.shake_128(seed).digest(4 * len(tokens)), "<u4")
        np.copyto(numbers, stream, where=tokens == token)
    numbers |= SIGN
    return numbers.view(np.int32)


def expect_span(given: Any, before: int, n_tokens: int, fewest: int) -> tuple[int, int, str]:
    """A span as it is to be given; `before` is the end of the one before.

    Raises:
        ConfigError: it is none.
    """
    try:
        start, end, identity = given
        start, end = operator.index(start), operator.index(end)
    except (TypeError, ValueError):
        raise ConfigError(
            f"identities: {shown_start(given)} is no span; give (start, end, identity)"
        ) from None
    is_text = isinstance(identity, str)
    if not is_text or not 0 < len(identity) <= MOST_CHARACTERS:
        said = f"has {len(identity)} characters" if is_text else f"is {of_type(identity)}"
        raise ConfigError(
            f"identities: the identity of tokens {start} to {end} {said}; give text of 1 to "
            f"{MOST_CHARACTERS} characters, such as a digest in hexadecimal"
        )
    if not before <= start < end <= n_tokens:
        raise ConfigError(
            f"identities: the span of tokens {start} to {end} is not inside tokens {before} to "
            f"{n_tokens}; spans are in order, do not overlap, and count from the tokens given here"
        )
    if end - start < fewest:
        raise ConfigError(
            f"identities: the span of tokens {start} to {end} has fewer than {fewest} tokens, too "
            "few to tell identities apart; put the identity into the namespace"
        )
    return start, end, identity


def expect_placeholders(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Refuse text in a span: only few different tokens are placeholders.

    Raises:
        ConfigError: there are more.
    """
    different = len(np.unique(tokens))
    if different > MOST_PLACEHOLDERS:
        raise ConfigError(
            f"identities: a span has {different} different tokens, more than {MOST_PLACEHOLDERS}; "
            "give the placeholders alone"
        )
    return tokens


class Identities:
    """The spans of one key, in order; they never change.

    Args:
        spans: they.
    """

    __slots__ = ("spans",)

    known: ClassVar[WeakSet[Span]] = WeakSet()
    """The spans of all keys there are, for readers of events, who see numbers alone."""

    knowing: ClassVar[Lock] = Lock()

    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans
        with self.knowing:
            self.known.update(spans)

    @classmethod
    def appended(
        cls,
        key: TokenKey,
        tokens: Any,
        identities: Iterable[Sequence[Any]],
        fewest: int = FEWEST_TOKENS,
    ) -> Identities:
        """Append tokens to a key; all its spans then. Appends nothing if it raises.

        Args:
            key: the key.
            tokens: as for `TokenKey`.
            identities: `(start, end, identity)` of each span, in order; tokens `[start, end)` of
                the given ones.
            fewest: tokens of the shortest span.

        Raises:
            ConfigError: tokens that are none; spans that overlap, are outside of the tokens, have
                fewer than 8 tokens or more than 64 different ones; an identity that is no text of 1
                to 1,024 characters.
        """
        ids = TokenKey(tokens).tokens().copy()
        spans: list[Span] = [] if key.identities is None else [*key.identities.spans]
        before = 0
        for given in identities:
            start, end, identity = expect_span(given, before, len(ids), fewest)
            placeholders = expect_placeholders(ids[start:end].copy())
            numbers = ids[start:end] = numbers_of(identity, placeholders)
            spans.append(Span(key.n_tokens + start, identity, placeholders, numbers))
            before = end
        found = cls(spans)
        key.data += ids.tobytes()
        return found

    def tokens(self, start: int, numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The tokens of a key from `start` on, int32 `[n]`, given its numbers there."""
        tokens = np.array(numbers, np.int32)
        end = start + len(numbers)
        for span in self.spans:
            low, high = max(start, span.start), min(end, span.end)
            if low < high:
                placeholders = span.tokens[low - span.start : high - span.start]
                tokens[low - start : high - start] = placeholders
        return tokens

    def before(self, n_tokens: int) -> Identities | None:
        """The spans of a key that was cut to `n_tokens` tokens; None if none is left."""
        spans = [each.before(n_tokens) for each in self.spans if each.start < n_tokens]
        return Identities(spans) if spans else None

    @staticmethod
    def shown(numbers: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], list[str | None]]:
        """Tokens for numbers of keys, int32 `[n]`, and the identity that each stands for.

        An identity that no key has any more is unknown: its numbers without their sign stand for
        its tokens, and there is no text.
        """
        tokens = np.where(numbers < 0, numbers & WITHOUT_SIGN, numbers)
        names: list[str | None] = [None] * len(numbers)
        with Identities.knowing:
            known = list(Identities.known)
        at, behind = 0, np.flatnonzero(numbers < 0)
        while len(behind):
            at = int(behind[0])
            n = 1
            for span in known:
                for first in np.flatnonzero(span.numbers == numbers[at]):
                    mine = span.numbers[first : first + len(numbers) - at]
                    same = numbers[at : at + len(mine)] == mine
                    length = len(mine) if same.all() else int(same.argmin())
                    if length > n or n == 1:
                        n = max(n, length)
                        tokens[at : at + length] = span.tokens[first : first + length]
                        names[at : at + length] = [span.identity] * length
            behind = behind[behind >= at + n]
        return tokens, names

    def rebuilding(self, key: TokenKey) -> tuple[Any, tuple[Any, ...]]:
        """As `TokenKey.__reduce__`."""
        spans = [(each.start, each.end, each.identity) for each in self.spans]
        return rebuilt, (key.tokens(), key.namespace, spans)


def rebuilt(tokens: Any, namespace: object, identities: list[tuple[int, int, str]]) -> TokenKey:
    """A key in another process, or a deep copy; a cut may have left a short span."""
    key = TokenKey((), namespace)
    key.identities = Identities.appended(key, tokens, identities, fewest=1)
    return key
