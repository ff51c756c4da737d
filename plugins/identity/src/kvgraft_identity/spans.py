"""Placeholders in a key: tokens that stand for something else, such as an image, by its identity.

The tree compares a key's int32 bytes, and everything that names pages hashes them. So in place of
placeholders the key has other numbers, made from the identity and negative, which no token is. The
tree, the tiers and the stores need to know nothing of identities:

    tokens   1  2  32000  32000  ...  32000  3        the same for every image
    key      1  2  -90210 -4711  ...  -8086  3        31 bits of the identity's hash at each token

A number depends on the identity, on its token and on its place behind the first one. Eight of them
hold 248 bits. Two identities whose first numbers are equal share the pages of these alone: for
pages of one token that is one token in 2^31 pairs of images.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraft.errors import ConfigError
from kvgraft.refusals import of_type
from kvgraft.tree.keys import TokenKey, shown_start

__all__ = ["FEWEST_TOKENS", "Identities", "Placed", "Placeholders"]

FEWEST_TOKENS: Final = 8
"""Placeholders of one thing: their numbers tell identities apart."""

MOST_PLACEHOLDERS: Final = 64
"""Different tokens among them, such as an image's, its rows' ends and its own end."""

MOST_CHARACTERS: Final = 1024
"""Of an identity."""

SIGN: Final = np.uint32(1 << 31)

WITHOUT_SIGN: Final = np.int32((1 << 31) - 1)

Numbers = npt.NDArray[np.int32]


class Placeholders:
    """Tokens that stand for one thing.

    Attributes:
        identity: of the thing.
        tokens: the placeholders, int32 `[n]`.
        numbers: those of a key in their place, int32 `[n]`.
    """

    __slots__ = ("identity", "numbers", "tokens")

    def __init__(self, identity: str, tokens: Numbers, numbers: Numbers) -> None:
        self.identity = identity
        self.tokens = tokens
        self.numbers = numbers

    def __repr__(self) -> str:
        return f"<Placeholders of {self.identity!r:.40}, {len(self.tokens)} tokens>"


class Placed(NamedTuple):
    """Placeholders, and the token of the sequence that they begin at."""

    start: int
    thing: Placeholders

    @property
    def end(self) -> int:
        """The token behind the last of them."""
        return self.start + len(self.thing.tokens)

    def before(self, end: int) -> Placed:
        """Those before a token of the sequence."""
        n, thing = end - self.start, self.thing
        if n >= len(thing.tokens):
            return self
        cut = Placeholders(thing.identity, thing.tokens[:n], thing.numbers[:n])
        return Placed(self.start, cut)


def numbers_of(identity: str, tokens: Numbers) -> Numbers:
    """The negative numbers that stand for an identity in a key; the same on every machine."""
    numbers = np.empty(len(tokens), np.uint32)
    for token in np.unique(tokens):
        seed = b"kvgraft identity 1\0%d\0" % token + identity.encode()
        stream = np.frombuffer(hashlib.shake_128(seed).digest(4 * len(tokens)), "<u4")
        np.copyto(numbers, stream, where=tokens == token)
    numbers |= SIGN
    return numbers.view(np.int32)


class Identities:
    """All placeholders of one key, in order; they never change.

    Args:
        placed: they.
    """

    __slots__ = ("placed",)

    def __init__(self, placed: Sequence[Placed]) -> None:
        self.placed = placed

    @classmethod
    def appended(
        cls,
        key: TokenKey,
        tokens: Any,
        identities: Iterable[Sequence[Any]],
        fewest: int = FEWEST_TOKENS,
    ) -> Identities | None:
        """Append tokens to a key; all its placeholders then. Appends nothing if it raises.

        Args:
            key: the key.
            tokens: as for `TokenKey`.
            identities: `(start, end, identity)` of each thing, in order; tokens `[start, end)` of
                the given ones.
            fewest: placeholders of one thing.

        Raises:
            ConfigError: tokens that are none; spans that overlap, are outside of the tokens, have
                fewer than 8 tokens or more than 64 different ones; an identity that is no text of 1
                to 1,024 characters.
        """
        ids = TokenKey(tokens).tokens().copy()
        placed = [] if key.identities is None else [*key.identities.placed]
        before = 0
        for given in expect_list(identities):
            start, end, identity = expect_span(given, before, len(ids), fewest)
            own = expect_placeholders(ids[start:end].copy())
            numbers = ids[start:end] = numbers_of(identity, own)
            placed.append(Placed(key.n_tokens + start, Placeholders(identity, own, numbers)))
            before = end
        key.data += ids.tobytes()
        return cls(placed) if placed else None

    def tokens(self, start: int, numbers: Numbers) -> Numbers:
        """The tokens of a key from `start` on, int32 `[n]`, given its numbers there."""
        return tokens_of(self.placed, start, numbers)

    def before(self, n_tokens: int) -> Identities | None:
        """Those of a key that was cut to `n_tokens` tokens; None if none is left."""
        if self.placed[-1].end <= n_tokens:
            return self
        placed = [each.before(n_tokens) for each in self.placed if each.start < n_tokens]
        return Identities(placed) if placed else None

    def rebuilding(self, key: TokenKey) -> tuple[Any, tuple[Any, ...]]:
        """As `TokenKey.__reduce__`."""
        spans = [(each.start, each.end, each.thing.identity) for each in self.placed]
        return rebuilt, (key.tokens(), key.namespace, spans)

    @staticmethod
    def found(
        start: int, numbers: Numbers, known: Mapping[int, Placeholders], before: Iterable[Placed]
    ) -> list[Placed]:
        """The placeholders among a sequence's numbers from token `start` on.

        Args:
            start: the first token.
            numbers: of a key, int32 `[n]`.
            known: placeholders by their first number.
            before: those of the tokens before; some may go on from `start`.
        """
        #   before ─────────►│start      known by its first number
        #   1 2 -90210 -4711 │ -8086 3 4 -77 -5151 -808 5
        #                        └ goes on    └ begins
        placed: list[Placed] = []
        behind = np.flatnonzero(numbers < 0)
        while len(behind):
            at = int(behind[0])
            possible = [
                Placed(each.start, known.get(int(each.thing.numbers[0]), each.thing))
                for each in (() if at else before)
                if each.start < start <= each.end
            ]
            thing = known.get(int(numbers[at]))
            if thing is not None:
                possible.append(Placed(start + at, thing))
            n = 1
            for each in possible:
                n = _n_equal(numbers[at:], each.thing.numbers[start + at - each.start :])
                if n:
                    placed.append(each.before(start + at + n))
                    break
            behind = behind[behind >= at + max(n, 1)]
        return placed

    @staticmethod
    def shown(placed: Iterable[Placed], start: int, numbers: Numbers) -> Numbers:
        """Tokens for the numbers of a key from `start` on; of unknown identities some above 0."""
        return tokens_of(placed, start, np.where(numbers < 0, numbers & WITHOUT_SIGN, numbers))


def tokens_of(placed: Iterable[Placed], start: int, numbers: Numbers) -> Numbers:
    """Numbers from `start` on with tokens in place of those of placeholders."""
    tokens = np.array(numbers, np.int32)
    end = start + len(numbers)
    for each in placed:
        low, high = max(start, each.start), min(end, each.end)
        if low < high:
            own = each.thing.tokens[low - each.start : high - each.start]
            tokens[low - start : high - start] = own
    return tokens


def _n_equal(one: Numbers, other: Numbers) -> int:
    """How many numbers at the start are equal."""
    n = min(len(one), len(other))
    differing = np.flatnonzero(one[:n] != other[:n])
    return int(differing[0]) if len(differing) else n


def expect_list(identities: Any) -> Iterable[Any]:
    """Refuse identities that are no list of spans.

    Raises:
        ConfigError: they are text, or cannot be gone through.
    """
    if isinstance(identities, (str, bytes)) or not isinstance(identities, Iterable):
        raise ConfigError(
            f"identities: {shown_start(identities)} is no list; give [(start, end, identity), ...]"
        )
    return identities


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
    try:
        identity.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"identities: the identity of tokens {start} to {end} is no Unicode text: "
            f"{error.reason}; give a digest in hexadecimal"
        ) from None
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


def expect_placeholders(tokens: Numbers) -> Numbers:
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


def rebuilt(tokens: Any, namespace: object, identities: list[tuple[int, int, str]]) -> TokenKey:
    """A key in another process, or a deep copy; a cut may have left few placeholders."""
    key = TokenKey((), namespace)
    key.identities = Identities.appended(key, tokens, identities, fewest=1)
    return key
