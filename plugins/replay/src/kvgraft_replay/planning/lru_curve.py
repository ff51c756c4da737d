"""The hit rate of an LRU cache of pages for every size at once, in one pass over the requests.

Pages are kept in a stack, the most recently used on top. A page at depth `d` when a request looks
for it is in every cache of at least `d` pages, and in no smaller one (R. L. Mattson and others,
Evaluation Techniques for Storage Hierarchies, 1970). A request uses its pages from the last to the
first, so no page is above its predecessor, and the pages of a prefix that a cache holds are always
its first ones, as in a prefix tree.

Pages that were last used together are adjacent. So the stack's entries are runs of pages, which are
the edges of a prefix tree: split where requests diverge, joined where they continue together. The
depth of a run is a sum over later ones, in a Fenwick tree: O(log n) per run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvgraft_replay.workload import Span, TraceRequest, join_spans

__all__ = ["LruCurve", "lru_curve"]


class LruCurve:
    """Tokens that an LRU cache saves, by its size.

    Args:
        page_size: tokens per page.
        input_tokens: prompts of all requests.
        hits: int64 `[n]`, pages found at depth `i + 1` of the stack.
        n_pages: distinct pages: a cache of that many evicts nothing.
    """

    def __init__(
        self, page_size: int, input_tokens: int, hits: npt.NDArray[np.int64], n_pages: int
    ) -> None:
        self.page_size = page_size
        self.input_tokens = input_tokens
        self.n_pages = n_pages
        self._hit_pages = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(hits)])

    @property
    def needed_pages(self) -> int:
        """The fewest pages that save as much as any number of them."""
        return int(np.searchsorted(self._hit_pages, self._hit_pages[-1]))

    def saved_tokens(self, n_pages: int) -> int:
        """Prompt tokens that a cache of `n_pages` pages saves."""
        return int(self._hit_pages[min(n_pages, len(self._hit_pages) - 1)]) * self.page_size

    def hit_rate(self, n_pages: int) -> float:
        """The same as a share of all prompt tokens."""
        return self.saved_tokens(n_pages) / self.input_tokens if self.input_tokens else 0.0

    def pages_for(self, hit_rate: float) -> int | None:
        """The fewest pages that reach a hit rate; None if no number does."""
        rates = self._hit_pages * self.page_size / max(self.input_tokens, 1)
        found = int(np.searchsorted(rates, hit_rate))
        return found if found < len(self._hit_pages) else None


def lru_curve(requests: Iterable[TraceRequest], page_size: int) -> LruCurve:
    """The curve of an LRU cache over pages that serves requests one after another.

    Prompts and outputs are cached in whole pages; at least one token of a prompt is computed.

    Cost: O(runs · log runs) per request, where a run is a piece of its path in the prefix tree;
    memory of a few numbers per run.
    """
    stack = _Stack(page_size)
    input_tokens = 0
    for request in requests:
        input_tokens += request.prompt_tokens
        stack.use(
            request.content,
            n_pages=(request.prompt_tokens + request.output_tokens) // page_size,
            n_wanted=(request.prompt_tokens - 1) // page_size,
        )
    return LruCurve(page_size, input_tokens, stack.hits(), stack.n_pages)


class _Run:
    """Pages of one edge of the prefix tree, last used together.

    Attributes:
        spans: their content, as few spans as possible.
        n_pages: how many.
        turn: the order of their use; unique per run.
        below: the runs behind it, by the content of their first page.
    """

    __slots__ = ("below", "n_pages", "spans", "turn")

    def __init__(
        self,
        spans: tuple[Span, ...],
        n_pages: int,
        turn: int = 0,
        below: dict[tuple[Span, ...], _Run] | None = None,
    ) -> None:
        self.spans = spans
        self.n_pages = n_pages
        self.turn = turn
        self.below = {} if below is None else below


class _Stack:
    """All pages used so far, in a prefix tree, with their depths in the order of recency."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._root = _Run((), 0)
        self._turns = _Turns()
        self._first: list[int] = []
        self._behind: list[int] = []

    @property
    def n_pages(self) -> int:
        """Distinct pages used so far."""
        return self._turns.total

    def use(self, content: Sequence[Span], *, n_pages: int, n_wanted: int) -> None:
        """A request looks for its first `n_wanted` pages, then uses `n_pages` of them."""
        rest = _Reader(content)
        path = self._walk(rest, n_pages)
        left = n_wanted
        for run in path:
            if left <= 0:
                break
            above = self._turns.later_than(run.turn)
            found = min(run.n_pages, left)
            self._first.append(above)
            self._behind.append(above + found)
            left -= found
        for run in path:
            self._turns.take(run.turn, run.n_pages)
        n_new = n_pages - sum(run.n_pages for run in path)
        path = self._joined(path)
        if n_new:
            path = self._extended(path, rest.take(n_new * self.page_size), n_new)
        for run in reversed(path):
            run.turn = self._turns.append(run.n_pages)

    def hits(self) -> npt.NDArray[np.int64]:
        """Pages found, by depth from 1 on."""
        steps = np.zeros(max(self._behind, default=0) + 1, dtype=np.int64)
        np.add.at(steps, self._first, 1)
        np.add.at(steps, self._behind, -1)
        return np.cumsum(steps)[:-1]

    def _walk(self, rest: _Reader, n_pages: int) -> list[_Run]:
        """The runs that a request shares, the last one split where it departs."""
        path, above = [], self._root
        while n_pages:
            run = above.below.get(rest.peek(self.page_size))
            if run is None:
                break
            shared = min(rest.shared_with(run.spans) // self.page_size, n_pages)
            if shared < run.n_pages:
                self._split(run, shared)
            rest.skip(shared * self.page_size)
            n_pages -= shared
            path.append(run)
            above = run
        return path

    def _split(self, run: _Run, n_pages: int) -> None:
        """Split a run; both parts have its turn until the upper one is used."""
        content = _Reader(run.spans)
        upper = content.take(n_pages * self.page_size)
        first = content.peek(self.page_size)
        lower = content.take((run.n_pages - n_pages) * self.page_size)
        run.below = {first: _Run(lower, run.n_pages - n_pages, run.turn, run.below)}
        run.spans, run.n_pages = upper, n_pages

    def _joined(self, path: list[_Run]) -> list[_Run]:
        """The path with runs joined where no other run begins between them."""
        joined: list[_Run] = []
        for run in path:
            if joined and len(joined[-1].below) == 1:
                last = joined[-1]
                last.spans = join_spans((*last.spans, *run.spans))
                last.n_pages += run.n_pages
                last.below = run.below
            else:
                joined.append(run)
        return joined

    def _extended(self, path: list[_Run], spans: tuple[Span, ...], n_pages: int) -> list[_Run]:
        """The path with new pages behind it, in its last run if nothing follows that."""
        if path and not path[-1].below:
            last = path[-1]
            last.spans = join_spans((*last.spans, *spans))
            last.n_pages += n_pages
            return path
        new = _Run(spans, n_pages)
        above = path[-1] if path else self._root
        above.below[_Reader(spans).peek(self.page_size)] = new
        return [*path, new]


class _Turns:
    """Pages by the turn they were last used in, counted from 1: a Fenwick tree that grows."""

    def __init__(self) -> None:
        self._sums = [0]
        self.total = 0

    def append(self, n_pages: int) -> int:
        """Add a turn with that many pages; returns its number."""
        turn = len(self._sums)
        total, below, last = n_pages, turn - 1, turn - (turn & -turn)
        while below > last:
            total += self._sums[below]
            below -= below & -below
        self._sums.append(total)
        self.total += n_pages
        return turn

    def take(self, turn: int, n_pages: int) -> None:
        """Take `n_pages` pages out of a turn."""
        self.total -= n_pages
        sums, end = self._sums, len(self._sums)
        while turn < end:
            sums[turn] -= n_pages
            turn += turn & -turn

    def later_than(self, turn: int) -> int:
        """Pages of later turns."""
        sums, total = self._sums, self.total
        while turn:
            total -= sums[turn]
            turn -= turn & -turn
        return total


class _Reader:
    """Reads content from its start, without copying the rest."""

    __slots__ = ("_index", "_offset", "_spans")

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._index = 0
        self._offset = 0

    def peek(self, n_tokens: int) -> tuple[Span, ...]:
        """The next tokens."""
        found, index, offset = [], self._index, self._offset
        while n_tokens and index < len(self._spans):
            first, length = self._spans[index]
            taken = min(length - offset, n_tokens)
            found.append(Span(first + offset, taken))
            n_tokens -= taken
            index, offset = index + 1, 0
        return tuple(found)

    def skip(self, n_tokens: int) -> None:
        """Skip the next tokens."""
        self._offset += n_tokens
        while self._index < len(self._spans) and self._offset >= self._spans[self._index].length:
            self._offset -= self._spans[self._index].length
            self._index += 1

    def take(self, n_tokens: int) -> tuple[Span, ...]:
        """Return the next tokens and skip them."""
        found = self.peek(n_tokens)
        self.skip(n_tokens)
        return found

    def shared_with(self, other: Sequence[Span]) -> int:
        """How many of the next tokens are equal to the first ones of `other`."""
        shared, index, offset = 0, self._index, self._offset
        for first, length in other:
            if index == len(self._spans) or self._spans[index].first + offset != first:
                break
            # spans are maximal: where one ends and the other continues, they diverge
            left = self._spans[index].length - offset
            shared += min(left, length)
            if left != length:
                break
            index, offset = index + 1, 0
        return shared
