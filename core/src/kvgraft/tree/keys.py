"""Token sequences as the tree compares them.

Tokens become int32 bytes once, when they enter a key; from then on matching is `memcmp` over
slices. A key grows while its request decodes, and a conversation keeps one key for all its turns.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from numbers import Number
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvgraft.compiled import is_compiled
from kvgraft.errors import ConfigError
from kvgraft.optional import load_part
from kvgraft.policies.policy import PIECE_TOKENS
from kvgraft.policies.recency import untrack
from kvgraft.refusals import of_type
from kvgraft.sizes import expect_count

COMPILED = is_compiled()

if COMPILED:
    from kvgraft.tree.packing import int32_bytes

if TYPE_CHECKING:
    from kvgraft.tree.node import Node

TOKEN_BYTES = 4
"""Bytes of one token (int32)."""

SIGN_BYTE = TOKEN_BYTES - 1 if sys.byteorder == "little" else 0
"""The byte of a token that has its sign."""

SIGN = 0x80
"""The least value of that byte in a negative token."""

ONE_TOKEN = struct.Struct("i").pack

SHORT_BYTES = 1 << 12
"""Bytes of tokens up to which Python scans faster than numpy."""

COMPARED_BYTES = 1 << 16
"""Bytes that are compared at once, so that finding a late difference copies little."""

NAMESPACE_BITS = 256
"""Bits of an int in a namespace: a UUID or a digest fits."""

NAMESPACE_DEPTH = 16
"""Tuples inside tuples of a namespace; no more than `kvgraft_storage` names (`MAX_DEPTH`)."""

PLAIN = (str, int, bytes, type(None))
"""Types whose values never equal a value of another of these types."""

Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer] | Iterable[int]
Spans: TypeAlias = Iterable[tuple[int, int, str]]


def expect_namespace(namespace: object) -> None:
    """Refuse a namespace that cannot be hashed or named, or that has a number which is no `int`.

    In Python `1`, `True`, `1.0` and `Decimal(1)` are equal, so tenants of these names would share
    data (T11). Numbers and nesting have bounds, so that policies and storage can name it.

    Raises:
        ConfigError: with the namespace, and the part that is refused.
    """
    if namespace is None or type(namespace) is str:
        return
    parts = [(namespace, 0)]
    while parts:
        part, depth = parts.pop()
        if type(part) is int and part.bit_length() > NAMESPACE_BITS:
            raise ConfigError(
                f"namespace: an int of {part.bit_length()} bits is above {NAMESPACE_BITS}; use a "
                "smaller one, or a str"
            )
        if type(part) in PLAIN:
            continue
        if isinstance(part, (tuple, frozenset)):
            if depth == NAMESPACE_DEPTH:
                raise ConfigError(
                    f"namespace: tuples nest deeper than {NAMESPACE_DEPTH}; use a flat tuple"
                )
            parts += [(each, depth + 1) for each in part]
        elif isinstance(part, (Number, np.bool_)):
            raise ConfigError(
                f"namespace {shown_start(namespace)}: {part!r:.40} is {of_type(part)}, and equal "
                "numbers of different types would be one namespace; use an int, a str, bytes or a "
                "tuple of them"
            )
    try:
        hash(namespace)
    except TypeError:
        raise ConfigError(
            f"namespace {shown_start(namespace)} is {of_type(namespace)}, which cannot be hashed; "
            "use an int, a str, bytes or a tuple of them"
        ) from None


def token_ids(tokens: npt.NDArray[Any]) -> npt.NDArray[np.integer]:
    """The token ids of an array, `[n_tokens]`, after a check that they fit int32; no copy.

    Raises:
        ConfigError: they are of several sequences, masked, no integers, negative, or do not fit.
    """
    if tokens.ndim != 1:
        raise _several(tokens.shape)
    # not numpy.ma.isMaskedArray: importing numpy.ma takes 10 ms
    if type(tokens) is not np.ndarray and hasattr(tokens, "mask"):
        raise ConfigError(
            "token ids of a masked array are not all integers that fit int32; leave out or fill "
            "what is masked"
        )
    if not tokens.size:
        return np.empty(0, np.int32)
    if tokens.dtype.kind not in "iu":
        raise ConfigError(
            f"token ids of dtype {tokens.dtype} are not integers that fit int32; convert them first"
        )
    if not 0 <= np.bitwise_or.reduce(tokens) < 2**31:  # has every bit of any token
        low, high = int(tokens.min()), int(tokens.max())
        if low >= -(2**31) and high < 2**31:
            raise _negative(low)
        raise ConfigError(
            f"token ids {low}..{high} do not fit int32; use the model's own vocabulary"
        )
    return tokens


def _append(data: bytearray, ids: npt.NDArray[np.integer]) -> None:
    """Append token ids to a key's data; a prompt of another dtype is copied once, not twice."""
    if data or ids.dtype == np.int32:
        data += np.ascontiguousarray(ids, np.int32).data
    else:
        data.append(0)
        data *= ids.size * TOKEN_BYTES  # the same object
        np.frombuffer(data, np.int32)[:] = ids


def _is_short(tokens: npt.NDArray[Any]) -> bool:
    """Whether its bytes are the key's, and as fast to copy and look through as to look at."""
    plain = type(tokens) is np.ndarray and tokens.dtype == np.int32 and tokens.ndim == 1
    return plain and tokens.nbytes <= SHORT_BYTES


@lru_cache(maxsize=256)
def _packing(n_tokens: int) -> Callable[..., bytes]:
    """The function that makes int32 bytes of so many ids, each an argument of its own.

    `struct.pack` takes a format before them: Python copies a list into the arguments twice then.
    """
    return struct.Struct(f"{n_tokens}i").pack


def _refuse_negative(data: bytes) -> None:
    # a numpy call takes microseconds, a slice with a step one per thousand bytes
    short = len(data) <= SHORT_BYTES
    if short and data[SIGN_BYTE::TOKEN_BYTES].isascii():
        return
    low = int(np.frombuffer(data, np.int32).min())
    if low < 0:
        raise _negative(low)


def _negative(token: int) -> ConfigError:
    return ConfigError(
        f"token id {token} is negative; give ids of the model's own vocabulary, and leave padding "
        "out"
    )


def _several(shape: tuple[int, ...]) -> ConfigError:
    """The refusal of an array or a tensor that is no sequence of ids."""
    return ConfigError(
        f"token ids of shape {tuple(shape)}; give one sequence, such as ids[0] of a batch"
    )


def expect_sequence(tokens: object) -> None:
    """Refuse objects that iterate over characters or bytes, or over token ids in no order.

    Raises:
        ConfigError: text, bytes, a set or a mapping.
    """
    if isinstance(tokens, memoryview):
        unfit = tokens.itemsize == 1
    else:
        unfit = isinstance(tokens, (str, bytes, bytearray, set, frozenset, dict))
    if unfit:
        raise ConfigError(
            f"token ids given as {type(tokens).__name__}; give a list of integers that fit int32, "
            "such as those of the model's tokenizer"
        )


def _first_bad(tokens: object, error: Exception) -> str:
    """Which token cannot be used; what was raised where the tokens were an iterator."""
    if isinstance(tokens, (list, tuple)):
        for index, token in enumerate(tokens):
            try:
                struct.pack("i", token)
            except (TypeError, struct.error):
                return f"token {index} is {shown_start(token)}"
    return str(error) if hasattr(tokens, "__iter__") else f"{of_type(tokens)} is no list"


def shown_start(value: object) -> str:
    """The start of a value's text; its type where it has none, as an int of 5,000 digits."""
    try:
        return f"{value!r:.60}"
    except (ValueError, RecursionError):  # a number too long to print, or too deep a list
        return f"of type {type(value).__name__}"


class TokenKey:
    """An appendable token sequence in a namespace.

    Args:
        tokens: token ids, 0 or more, that fit int32. In a list true and false count as 1 and 0, as
            in Python: a check would make short keys an eighth to a quarter slower.
        namespace: anything hashable that must not share cache with others: a tenant's salt, an
            adapter's id, a tuple of both (T11). Compared by `==`, like a dictionary's keys: `None`,
            `""`, `0` and `"0"` are four. A number must be an `int`, in tuples and frozensets too,
            because `1`, `True` and `1.0` would be one.
        identities: `(start, end, identity)` of placeholder tokens that stand for an image, a sound
            or a tool's result: a text that names it, such as its digest (`kvgraft_identity`). Pages
            are shared where tokens and identities are equal (T11).

    Raises:
        ConfigError: a token id that is negative or does not fit int32, text, bytes or an array of
            several dimensions in place of ids, or a namespace that cannot be hashed or has a number
            which is no `int`, an int of more than 256 bits or more than 16 tuples inside one
            another.
    """

    __slots__ = (
        "__weakref__",
        "counted",
        "data",
        "edits",
        "hashed",
        "identities",
        "namespace",
        "runners",
        "shared",
        "sums",
        "trail",
        "trail_end",
        "trail_root",
    )

    def __init__(
        self, tokens: Tokens = (), namespace: object = None, identities: Spans | None = None
    ) -> None:
        if namespace is not None:
            expect_namespace(namespace)
        self.namespace = namespace
        self.edits = 0
        """Times the key was cut; a running request notices."""
        self.data = bytearray()
        """int32 `[n_tokens]` as bytes; of what has an identity its numbers, which are negative."""
        self.identities: Any = None
        self.shared = False
        """Whether others read them as well, which only grow: a cut leaves them as they are."""
        self.trail: Node | None = None
        """A node this key was found or inserted at; its path need not be compared again."""
        self.trail_end = 0
        """The boundary that node ended at then, in pages; a leaf may have grown since."""
        self.trail_root: Node | None = None
        """The root that it was below: a key may be used with several trees."""
        self.hashed: Any = None
        """Hashes that its pages need not be given again, the storage tier's own."""
        self.sums: list[int] = []
        """Checksums of its prefixes, as far as an eviction policy asked for them."""
        untrack((self.sums,))  # engines may keep many keys
        self.counted = -1
        """Tokens that a request had when it was retracted or restarted, to go on later; else -1."""
        self.runners: tuple[Any, ...] = ()
        """Weak references of the caches that have a running request of the key."""
        self.extend(tokens, identities)

    def extend(self, tokens: Tokens, identities: Spans | None = None) -> None:
        """Append token ids; O(new tokens). Raises like a new key, and appends nothing then."""
        #   one id ── its sign bit ──────────────────┐
        #   a list, compiled ── one loop, all checks ─┼─► data grows, as the last thing
        #   packed, or a short array ── signs after ──┤
        #   a long array ── checked where it is ──────┘
        if identities is not None:
            self.identities = load_part("identities").appended(self, tokens, identities)
            return
        try:
            if type(tokens) is list and len(tokens) == 1:
                data = ONE_TOKEN(tokens[0])  # a decode's, at every step
                if data[SIGN_BYTE] < SIGN:
                    self.data += data
                    return
            elif isinstance(tokens, (list, tuple)):
                if COMPILED and type(tokens) is list:
                    checked = int32_bytes(tokens)
                    if checked is not None:
                        self.data += checked
                        return
                data = _packing(len(tokens))(*tokens)  # three times as fast as array()
            elif isinstance(tokens, np.ndarray):
                if not _is_short(tokens):
                    _append(self.data, token_ids(tokens))
                    return
                data = tokens.tobytes()
            else:
                expect_sequence(tokens)
                shape = getattr(tokens, "shape", None)
                if isinstance(shape, tuple) and len(shape) != 1:
                    raise _several(shape)
                data = array("i", tokens).tobytes()
        except (OverflowError, TypeError, struct.error) as error:
            raise ConfigError(
                f"token ids must be integers that fit int32: {_first_bad(tokens, error)}; "
                "give a list of one sequence's, of the model's own vocabulary"
            ) from error
        _refuse_negative(data)
        self.data += data

    def __repr__(self) -> str:
        where = "" if self.namespace is None else f" in namespace {self.namespace!r:.60}"
        return f"<TokenKey of {self.n_tokens} tokens{where}>"

    def __copy__(self) -> TokenKey:
        """An independent key with the same tokens, for a conversation that forks."""
        fork = TokenKey(namespace=self.namespace)
        fork.data += self.data
        fork.trail, fork.trail_end, fork.trail_root = self.trail, self.trail_end, self.trail_root
        fork.hashed, fork.identities = self.hashed, self.identities
        fork.sums += self.sums
        return fork

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Its arguments alone, for another process or a deep copy: no tree goes along."""
        if self.identities is not None:
            return self.identities.rebuilding(self)  # type: ignore[no-any-return]
        return type(self), (self.tokens(), self.namespace)

    def found_at(self, node: Node, root: Node) -> None:
        """Note where below `root` the key was found or inserted: its first pages lead to `node`."""
        self.trail, self.trail_end, self.trail_root = node, node.end, root

    def truncate(self, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens and drop the rest: an edited turn, a rejected draft.

        A request that runs with the key goes on if all tokens that it computed, and its prompt,
        are before the cut. Else it refuses to share or finish data computed behind it; end it
        first, or `Cache.restart` it if its prompt is still whole. A prefetch goes on with the
        sequence as it was: the kept tokens are copied then.

        Raises:
            ConfigError: no whole number, or fewer than 0 tokens.
        """
        n_tokens = expect_count("truncate: n_tokens", n_tokens)
        if n_tokens >= self.n_tokens:
            return
        if self.shared:
            self.data, self.shared = self.data[:], False
        del self.data[n_tokens * TOKEN_BYTES :]
        self.edits += 1
        for mark in self.runners:
            cache = mark()
            if cache is not None:
                cache.key_was_cut(self, n_tokens)
        self.trail = self.trail_root = self.hashed = None
        self.identities = self.identities and self.identities.before(n_tokens)
        del self.sums[n_tokens // PIECE_TOKENS :]

    @property
    def n_tokens(self) -> int:
        """Tokens so far."""
        return len(self.data) // TOKEN_BYTES

    def __len__(self) -> int:
        return len(self.data) // TOKEN_BYTES

    def tokens(self, start: int = 0, end: int | None = None) -> npt.NDArray[np.int32]:
        """Token ids from `start` to `end`, by default all, int32 `[n]` (a copy)."""
        stop = None if end is None else end * TOKEN_BYTES
        found = np.frombuffer(bytes(self.data[start * TOKEN_BYTES : stop]), dtype=np.int32)
        first = slice(start, end).indices(self.n_tokens)[0]
        return found if self.identities is None else self.identities.tokens(first, found)


def common_prefix_pages(
    key: bytes | bytearray,
    offset: int,
    edge: bytes | bytearray | memoryview,
    page_bytes: int,
    start: int = 0,
) -> int:
    """Whole pages on which `key[offset:]` and `edge` agree; vectorised first difference.

    Args:
        key: one sequence.
        offset: the byte of it to begin at.
        edge: the other one.
        page_bytes: bytes of a page.
        start: bytes from which to compare; they agree before.
    """
    length = min(len(key) - offset, len(edge)) // page_bytes * page_bytes
    step = max(COMPARED_BYTES // page_bytes, 1) * page_bytes
    with memoryview(edge) as theirs:
        for low in range(start // page_bytes * page_bytes, length, step):
            high = min(low + step, length)
            if not key.startswith(theirs[low:high], offset + low):
                ours = np.frombuffer(key[offset + low : offset + high], dtype=np.int32)
                differing = ours != np.frombuffer(theirs[low:high], dtype=np.int32)
                return (low + int(differing.argmax()) * TOKEN_BYTES) // page_bytes
    return max(length, 0) // page_bytes
