"""Working copies: tensors that a batch's attention reads, one per plane, growing in place.

Pools keep tokens in scattered pages; attention needs `[batch, heads, tokens, dim]`. Gathering
everything for every new token would cost up to half of the model's time. So a batch keeps the
gathered tokens, and a pass adds its new ones:

    columns    base ...... first .......... end ........ base + capacity
               given back  what the pass reads           room for the next ones

Columns are those of the padded batch; a window drops its first ones. Columns that are missing in
the copy are gathered from the pool: at the beginning, after a change of the batch's padding, and
for tokens that were computed in another batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch

if TYPE_CHECKING:
    from kvgraft_transformers.session import Session
    from kvgraft_transformers.session_cache import SessionCache

__all__ = ["Columns", "Places", "Views", "WorkingCopy", "WorkingMemory"]

LEAST_ROOM = 64
"""Fewest free columns behind a new copy; otherwise an eighth of its content."""


class Views(NamedTuple):
    """Views of a plane of a pool.

    Attributes:
        rows: one row per token, `[n_rows, heads, dim]`.
        heads: the same by heads, `[heads, n_rows, dim]`.
        pages: the same by pages, `[heads, n_slots, page_size, dim]`.
    """

    rows: torch.Tensor
    heads: torch.Tensor
    pages: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, page_size: int) -> Views:
        """The views of a plane with one row per token, `[n_rows, heads, dim]`."""
        n_rows, n_heads, dim = rows.shape
        n_slots = n_rows // page_size
        heads = rows.transpose(0, 1)
        return cls(rows, heads, heads.view(n_heads, n_slots, page_size, dim))


class Places(NamedTuple):
    """The places of one sequence's columns in the pool, in order.

    Attributes:
        before: rows of the columns before the first whole page, int64 `[n]`.
        pages: whole pages, int64 `[n_pages]`.
        after: rows of the columns behind the last whole page, int64 `[n]`.
    """

    before: torch.Tensor
    pages: torch.Tensor
    after: torch.Tensor


class Columns(NamedTuple):
    """The columns that a pass reads of a component, and their places in the pool.

    Attributes:
        first: the first column that new tokens may attend to.
        past: the first new column.
        end: the column behind the last new one.
        write: int64 `[batch * n_new]`, rows of the new tokens in the component's planes.
        read: gives computed columns from a given one to `past`: places by sequence, or rows of all,
            int64 `[batch, n]`.
    """

    first: int
    past: int
    end: int
    write: torch.Tensor
    read: Callable[[int], Sequence[Places] | torch.Tensor]


class WorkingCopy:
    """One plane's columns for one batch; empty until its first use.

    Args:
        views: views of the plane.
    """

    def __init__(self, views: Views) -> None:
        self._rows, self._heads, self._pages = views
        self._tensor: torch.Tensor | None = None
        self._base = self._end = 0

    def drop(self) -> None:
        """Release its memory; the next pass gathers everything."""
        self._tensor = None
        self._base = self._end = 0

    def extend(self, columns: Columns, new: torch.Tensor) -> torch.Tensor:
        """Store new tokens in the pool and in the copy.

        Args:
            columns: columns of the running pass.
            new: `[batch, heads, n_new, dim]`.

        Returns:
            All columns of the pass, `[batch, heads, end - first, dim]`: a view, valid until the
            next call.
        """
        self._rows.index_copy_(0, columns.write, new.transpose(1, 2).flatten(0, 1))
        tensor = self._room_for(columns, new)
        if self._end < columns.past:
            into = self._between(tensor, self._end, columns.past)
            self._gather(columns.read(self._end), into)
        self._between(tensor, columns.past, columns.end).copy_(new)
        self._end = columns.end
        return self._between(tensor, columns.first, columns.end)

    def _gather(self, found: Sequence[Places] | torch.Tensor, into: torch.Tensor) -> None:
        """Read columns from the pool into `[batch, heads, n, dim]`."""
        if isinstance(found, torch.Tensor):
            held = self._rows.index_select(0, found.flatten())
            into.copy_(held.view(*found.shape, *held.shape[1:]).transpose(1, 2))
            return
        for places, held in zip(found, into):
            self._gather_one(places, held)

    def _gather_one(self, places: Places, into: torch.Tensor) -> None:
        """Read columns of one sequence into `[heads, n, dim]`; copies each page once."""
        before, pages, after = places
        first, end = len(before), into.shape[1] - len(after)
        if first:
            torch.index_select(self._heads, 1, before, out=into[:, :first])
        if len(pages):
            n_heads, _, dim = into.shape
            whole = into[:, first:end].view(n_heads, len(pages), -1, dim)
            torch.index_select(self._pages, 1, pages, out=whole)
        if len(after):
            torch.index_select(self._heads, 1, after, out=into[:, end:])

    def _between(self, tensor: torch.Tensor, first: int, end: int) -> torch.Tensor:
        return tensor[:, :, first - self._base : end - self._base]

    def _room_for(self, columns: Columns, new: torch.Tensor) -> torch.Tensor:
        """The tensor, or a larger one with the columns that the pass still reads."""
        former, first = self._tensor, columns.first
        if former is not None and columns.end <= self._base + former.shape[2]:
            self._end = max(self._end, first)
            return former
        n_columns = columns.end - first
        capacity = n_columns + max(LEAST_ROOM, n_columns // 8)
        batch, heads, _, dim = new.shape
        with torch.inference_mode(False):  # else only passes in inference mode could write to it
            tensor = self._rows.new_empty((batch, heads, capacity, dim))
        held = max(first, self._end)
        if former is not None and held > first:
            tensor[:, :, : held - first] = self._between(former, first, held)
        self._tensor, self._base, self._end = tensor, first, held
        return tensor


class WorkingMemory:
    """Bounds the working copies of all batches.

    Args:
        limit_tokens: most tokens that they hold together, padding included; a batch beyond that
            gathers everything in every pass.
    """

    def __init__(self, limit_tokens: int) -> None:
        self.limit_tokens = limit_tokens
        self._held: WeakKeyDictionary[SessionCache, int] = WeakKeyDictionary()

    @property
    def n_tokens(self) -> int:
        """Held tokens, padding included."""
        return sum(self._held.values())

    def hold(self, cache: SessionCache, n_tokens: int) -> bool:
        """Whether a batch may keep copies of so many tokens after the beginning pass."""
        others = self.n_tokens - self._held.get(cache, 0)
        fits = others + n_tokens <= self.limit_tokens
        self._held[cache] = n_tokens if fits else 0
        return fits

    def release(self, cache: SessionCache) -> None:
        """Note that a batch has released its copies."""
        self._held.pop(cache, None)

    def leave(self, session: Session) -> None:
        """Note that a session has ended, and with it its batches."""
        for cache in list(self._held):
            if session in cache.sessions:
                cache.release()
