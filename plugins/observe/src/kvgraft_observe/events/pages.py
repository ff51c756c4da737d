"""Pages as events name them: by their position on a path, and by hashes on request.

A hash covers the hash of the page before and the page's tokens, so it does not depend on where
nodes are split. Hashes are made when a reader asks for them, each once, on the reader's thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from kvgraft.errors import ConfigError
from kvgraft.optional import load_part
from kvgraft.tree.keys import TOKEN_BYTES
from kvgraft_storage.keys import HASH_NBYTES, namespace_digest, page_hash

__all__ = ["Pages", "Run", "root_of"]

HASHING = Lock()
"""Held while a reader hashes pages, on whichever thread it runs."""


class Pages:
    """Consecutive pages of one sequence.

    Attributes:
        start: number of the first page, from the start of the sequence.
        end: number of the page behind the last.
    """

    __slots__ = ("_run", "end", "start")

    def __init__(self, run: Run, start: int, end: int) -> None:
        self._run: Run | None = run
        self.start = start
        self.end = end

    def __repr__(self) -> str:
        where = "" if self.namespace is None else f" in namespace {self.namespace!r:.60}"
        return f"<Pages [{self.start}, {self.end}){where}>"

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def run(self) -> Run:
        """The run that they belong to; a run has no reference to itself, which would be a cycle."""
        assert self._run is not None
        return self._run

    @property
    def namespace(self) -> object:
        """The namespace of the sequence."""
        return self.run.key_namespace

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """The tokens of the pages, int32 `[n_pages * page_size]` (a copy).

        Of what has an identity they are the placeholders. Where that is not known, because the data
        is older than the first reader, they are numbers in their place.
        """
        run = self.run
        numbers = np.frombuffer(run.tokens_of(self.start, self.end), dtype=np.int32)
        if numbers.min(initial=0) >= 0:
            return numbers
        tokens: npt.NDArray[np.int32]
        start = self.start * run.page_size
        tokens = load_part("identities").shown(run.placed, start, numbers)
        return tokens

    @property
    def identities(self) -> list[tuple[int, int, str]]:
        """Things behind placeholders in the pages: `(start, end, identity)` of each.

        Tokens are counted from the first of the pages, below 0 for one that begins before them. The
        end is as far as the thing was known when the pages came.
        """
        run = self.run
        first, size = self.start * run.page_size, len(self) * run.page_size
        return [
            (each.start - first, each.end - first, each.thing.identity)
            for each in run.placed
            if each.start - first < size and each.end > first
        ]

    @property
    def hashes(self) -> list[bytes]:
        """The pages' hashes, 32 bytes each; all events and all caches name a page alike.

        Computed at the first call, 1 µs a page, together with unknown hashes of the pages before.
        Any thread may ask.
        """
        found = self.run.hash_until(self.end)
        base, size = self.run.start, HASH_NBYTES
        return [
            found[at * size : (at + 1) * size] for at in range(self.start - base, self.end - base)
        ]

    @property
    def before(self) -> Pages | None:
        """Pages that these follow; None at the start of the sequence."""
        run = self.run
        return run.follows if self.start == run.start else Pages(run, run.start, self.start)

    @property
    def parent(self) -> bytes | None:
        """The hash of the page before the first; None at the start of the sequence."""
        before = self.before
        return None if before is None else before.hashes[-1]

    def part(self, start: int, end: int) -> Pages:
        """The pages numbered `[start, end)`, which are among them."""
        return Pages(self.run, start, end)


class Run(Pages):
    """Consecutive pages of one path that were reported together, with their hashes.

    Args:
        namespace: the path's.
        follows: pages of which the last comes before its first; None at the start of the sequence.
        tokens: of its pages, int32 bytes.
        page_bytes: bytes of a page.
        start: number of its first page.
        known: the hashes of its first pages, where they are known.
        placed: what stands behind placeholders in it, as the part `identities` says.
    """

    __slots__ = ("_hashes", "_page_bytes", "_tokens", "follows", "key_namespace", "placed")

    def __init__(
        self,
        namespace: object,
        follows: Pages | None,
        tokens: bytes,
        page_bytes: int,
        start: int,
        known: bytes = b"",
        placed: Sequence[Any] = (),
    ) -> None:
        self._run = None
        self.start = start
        self.end = start + len(tokens) // page_bytes
        self.key_namespace = namespace
        self.follows = follows
        self._tokens = tokens
        self._page_bytes = page_bytes
        self._hashes = known
        self.placed = placed

    @property
    def run(self) -> Run:
        """Itself."""
        return self

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._page_bytes // TOKEN_BYTES

    def tokens_of(self, start: int, end: int) -> bytes:
        """The tokens of some of its pages, int32 bytes."""
        size = self._page_bytes
        return self._tokens[(start - self.start) * size : (end - self.start) * size]

    def known(self, start: int, end: int) -> bytes:
        """The hashes of the first of pages `[start, end)`, as far as they are known."""
        first, last = start - self.start, end - self.start
        return self._hashes[first * HASH_NBYTES : last * HASH_NBYTES]

    def hash_until(self, end: int) -> bytes:
        """The hashes of its first pages; computes those up to `end`, and earlier ones that lack."""
        unknown: list[tuple[Run, int]] = []
        run, last = self, end
        with HASHING:
            while len(run._hashes) < (last - run.start) * HASH_NBYTES:
                unknown.append((run, last))
                before = run.follows
                if run._hashes or before is None:
                    break
                run, last = before.run, before.end
            for each, until in reversed(unknown):
                each._hash(until)
            return self._hashes

    def _hash(self, end: int) -> None:
        """Hash its pages up to `end`; the pages that it follows are hashed already."""
        found, size = [self._hashes], self._page_bytes
        if self._hashes:
            parent = self._hashes[-HASH_NBYTES:]
        elif self.follows is None:
            parent = root_of(self.key_namespace)
        else:
            parent = self.follows.run.known(self.follows.end - 1, self.follows.end)
        for at in range(len(self._hashes) // HASH_NBYTES, end - self.start):
            parent = page_hash(parent, self._tokens[at * size : (at + 1) * size])
            found.append(parent)
        self._hashes = b"".join(found)


def root_of(namespace: object) -> bytes:
    """The parent hash of a namespace's first pages.

    It is the same in every process if the namespace has canonical bytes. Another namespace, such as
    an object, is named by its `hash`.
    """
    try:
        digest = namespace_digest(namespace)
    except ConfigError:
        digest = repr((type(namespace).__qualname__, hash(namespace))).encode()
    return hashlib.sha256(b"kvgraft events 1\0" + digest).digest()
