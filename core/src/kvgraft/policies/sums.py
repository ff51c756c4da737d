"""Checksums that name the prefixes of a sequence, for policies that remember what they have seen.

A sequence is cut into pieces of 1,024 tokens; the checksum of a piece follows that of the one
before, so that it names the whole prefix. Two prefixes of one checksum are a wrong count, no more:
hashes of stores and events are SHA-256, as theirs would be another's data.
"""

from __future__ import annotations

from typing import Any, Final

import xxhash

from kvgraft.policies.policy import PIECE_TOKENS, Use

PIECE_BYTES: Final = PIECE_TOKENS * 4

digest: Final[Any] = xxhash.xxh3_64_intdigest


def prefix_sums(use: Use, n_tokens: int) -> list[int]:
    """The checksums of the prefixes of 1,024 tokens, 2,048 and so on, up to `n_tokens`.

    Namespaces share none, but those that are no int, text or bytes, nor a tuple of these, count
    as one. Only pieces that the key was not asked for before are read. 64 bits each, the same on
    every rank.
    """
    sums = use.sums
    n_pieces = n_tokens // PIECE_TOKENS
    if len(sums) < n_pieces:
        last = sums[-1] if sums else 0
        with memoryview(use.tokens) as tokens:  # its slices copy nothing
            for at in range(len(sums) * PIECE_BYTES, n_pieces * PIECE_BYTES, PIECE_BYTES):
                last = digest(tokens[at : at + PIECE_BYTES], last)
                sums.append(last)
    if use.namespace is None:
        return sums[:n_pieces]
    salt = digest(_named(use.namespace).encode())
    return [each ^ salt for each in sums[:n_pieces]]


def _named(namespace: object) -> str:
    """A namespace's text, the same on every rank; of objects that have none it is empty."""
    if isinstance(namespace, tuple):
        return f"({','.join(map(_named, namespace))})"
    return repr(namespace) if isinstance(namespace, (str, int, bytes)) else ""
