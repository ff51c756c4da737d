"""Token sequences as the tree compares them.

Tokens become int32 bytes once, when they enter a key; from then on matching is `memcmp` over
slices. A key grows while its request decodes, and a conversation keeps one key for all its turns.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from kvgraft.tree.node import Node

__all__ = ["TOKEN_BYTES", "PageHashes", "TokenKey", "Tokens", "common_prefix_pages"]

TOKEN_BYTES = 4
"""Bytes of one token (int32)."""

Tokens = Sequence[int] | npt.NDArray[np.integer] | Iterable[int]


class PageHashes(NamedTuple):
    """What pages of a key are called in STORAGE, computed when they were looked for there (S8).

    Attributes:
        owner: the tree whose names they are.
        namespace: the key's, when they were computed.
        first: the first page.
        hashes: one a page, from `first` on.
    """

    owner: object
    namespace: object
    first: int
    hashes: list[bytes]


class TokenKey:
    """An appendable token sequence in a namespace.

    Args:
        tokens: token ids that fit int32.
        namespace: anything hashable that must not share cache with others: a tenant's salt, an
            adapter's id, a tuple of both (T11).

    Raises:
        ConfigError: a token id that does not fit int32.
    """

    __slots__ = ("data", "edits", "hashed", "namespace", "trail")

    def __init__(self, tokens: Tokens = (), namespace: object = None) -> None:
        self.namespace = namespace
        self.edits = 0
        """Times the key was cut; a running request notices."""
        self.data = bytearray()
        """int32 `[n_tokens]` as bytes; append through `extend` only."""
        self.trail: Node | None = None
        """A node this key was found or inserted at; its path need not be compared again."""
        self.hashed: PageHashes | None = None
        """Hashes that its pages need not be given again."""
        self.extend(tokens)

    def extend(self, tokens: Tokens) -> None:
        """Append token ids; O(new tokens)."""
        if isinstance(tokens, np.ndarray):
            if tokens.dtype != np.int32:
                if tokens.size and tokens.dtype.kind not in "iu":
                    raise ConfigError(
                        f"token ids of dtype {tokens.dtype} are not integers that fit int32; "
                        "convert them first"
                    )
                if tokens.size and (tokens.min() < -(2**31) or tokens.max() >= 2**31):
                    raise ConfigError(
                        f"token ids {int(tokens.min())}..{int(tokens.max())} do not fit int32; "
                        "use the model's own vocabulary"
                    )
                tokens = tokens.astype(np.int32)
            self.data += tokens.tobytes()
            return
        if isinstance(tokens, (bytes, bytearray)):
            tokens = list(tokens)  # array() would read them as int32 memory
        try:
            if isinstance(tokens, (list, tuple)):
                self.data += struct.pack(f"{len(tokens)}i", *tokens)  # 3x array()
            else:
                self.data += array("i", tokens).tobytes()
        except (OverflowError, TypeError, struct.error) as error:
            raise ConfigError(
                f"token ids must be integers that fit int32: {error}; "
                "use the model's own vocabulary"
            ) from error

    def __copy__(self) -> TokenKey:
        """An independent key with the same tokens, for a conversation that forks."""
        fork = TokenKey(namespace=self.namespace)
        fork.data += self.data
        fork.trail, fork.hashed = self.trail, self.hashed
        return fork

    def page_hashes(self, owner: object, start: int, end: int) -> list[bytes] | None:
        """The hashes that pages `[start, end)` have in a tree; None unless all are known."""
        known = self.hashed
        if known is None or known.owner is not owner or known.namespace != self.namespace:
            return None
        if not known.first <= start <= end <= known.first + len(known.hashes):
            return None
        return known.hashes[start - known.first : end - known.first]

    def truncate(self, n_tokens: int) -> None:
        """Drop tokens behind the first `n_tokens`."""
        del self.data[n_tokens * TOKEN_BYTES :]
        self.edits += 1
        self.trail = self.hashed = None

    @property
    def n_tokens(self) -> int:
        """Tokens so far."""
        return len(self.data) // TOKEN_BYTES

    def __len__(self) -> int:
        return len(self.data) // TOKEN_BYTES

    def tokens(self, start: int = 0, end: int | None = None) -> npt.NDArray[np.int32]:
        """Token ids from `start` to `end`, by default all, int32 `[n]` (a copy)."""
        stop = None if end is None else end * TOKEN_BYTES
        return np.frombuffer(bytes(self.data[start * TOKEN_BYTES : stop]), dtype=np.int32)


def common_prefix_pages(key: bytes | bytearray, offset: int, edge: bytes, page_bytes: int) -> int:
    """Whole pages on which `key[offset:]` and `edge` agree; vectorised first difference."""
    length = min(len(key) - offset, len(edge)) // page_bytes * page_bytes
    mine = np.frombuffer(bytes(key[offset : offset + length]), dtype=np.int32)
    theirs = np.frombuffer(edge, dtype=np.int32, count=length // TOKEN_BYTES)
    differing = mine != theirs
    first = int(differing.argmax()) if length else 0
    if not length or not differing[first]:
        return length // page_bytes
    return first * TOKEN_BYTES // page_bytes
