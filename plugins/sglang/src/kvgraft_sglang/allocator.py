"""SGLang's allocators over the pools of a kvgraft cache.

A slot of the cache is a page of SGLang's pool, whose number is one higher: SGLang keeps page 0 for
padding. Pages come from `Cache.engine_slots` and go back there, or become the tree's when a request
publishes them. Before a cache is bound they are SGLang's own allocators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.utils import get_num_new_pages

if TYPE_CHECKING:
    from kvgraft import Cache

__all__ = ["PagesOfCache", "TokensOfCache", "slots_of", "swapped"]

Sglang = Any
"""An object of SGLang, which mypy does not see."""

PADDING = 1
"""Pages in front of the first one that is handed out."""

AT_ONCE = 64
"""Pages that are taken beyond those asked for."""


def slots_of(pages: torch.Tensor) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The cache's slots of pages; waits for the device."""
    return (pages.cpu().numpy() - PADDING).astype(np.int32)


class _OfCache:
    """Pages come from a component's pool once a cache is bound.

    Attributes:
        cache: the cache; None before it is bound.
        component: whose pool.
        slots: the pool's slots, which only say how many of them are free.
    """

    cache: Cache | None = None
    component = ""
    slots: Any = None
    free_pages: torch.Tensor
    page_size: int
    device: Any

    def bind(self, cache: Cache, component: str) -> None:
        """From now on pages are the cache's."""
        self.cache, self.component = cache, component
        self.slots = cache.tree.component(component).device.allocator
        self.free_pages = self.free_pages[:0]

    def hold(self, n_pages: int) -> bool:
        """Have at least so many `free_pages`, if the pool has; SGLang evicts before it allocates.

        Some more are taken at once, which later calls hand out.
        """
        assert self.cache is not None
        lacking = n_pages - self.free_pages.shape[0]
        if lacking <= 0:
            return True
        free = int(self.slots.n_free)
        if lacking > free:
            return False
        slots = self.cache.engine_slots.take(self.component, min(free, lacking + AT_ONCE))
        if slots is None:
            return False
        more = torch.from_numpy(slots.astype(np.int64) + PADDING).to(self.device)
        self.free_pages = torch.cat((self.free_pages, more))
        return True

    def give_back(self, pages: torch.Tensor) -> None:
        """Pages are free again."""
        assert self.cache is not None
        self.cache.engine_slots.give_back(self.component, slots_of(pages))

    def available_size(self) -> int:
        """Free tokens."""
        if self.cache is None:
            own: int = super().available_size()  # type: ignore[misc]
            return own
        return (int(self.slots.n_free) + self.free_pages.shape[0]) * self.page_size

    def get_all_free_pages(self) -> torch.Tensor:
        """The numbers of the free pages; for SGLang's checks."""
        if self.cache is None:
            own: torch.Tensor = super().get_all_free_pages()  # type: ignore[misc]
            return own
        free = torch.tensor(self.slots.free_slots(), device=self.device)
        return torch.cat((self.free_pages, free.long() + PADDING))

    def clear(self) -> None:
        """All pages are free; once bound, the tree's `reset` has done it."""
        if self.cache is None:
            super().clear()  # type: ignore[misc]


class TokensOfCache(_OfCache, TokenToKVPoolAllocator):
    """Pages of one token."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if self.cache is not None and not self.hold(need_size):
            return None
        found: torch.Tensor | None = super().alloc(need_size)
        return found

    def free(self, free_index: torch.Tensor) -> None:
        if self.cache is None or self.free_group is not None:
            super().free(free_index)
        elif free_index.numel():
            self.give_back(free_index)


class PagesOfCache(_OfCache, PagedTokenToKVPoolAllocator):
    """Pages of several tokens; SGLang's kernels cut them into token slots."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if self.cache is not None and not self.hold(need_size // self.page_size):
            return None
        found: torch.Tensor | None = super().alloc(need_size)
        return found

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        if self.cache is not None and not self.hold(int(num_new_pages)):
            return None
        lens = prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu
        given = last_loc, extend_num_tokens, num_new_pages
        found: torch.Tensor | None = super().alloc_extend(*lens, *given)
        return found

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        if self.cache is not None and not self.hold(len(seq_lens)):  # a page each, at most
            n_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True
            )
            self.hold(int(n_pages))
        found: torch.Tensor | None = super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)
        return found

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        if self.cache is None:
            super()._release_page_ids(*page_ids)
            return
        for each in page_ids:
            self.give_back(each)


def swapped(allocator: Sglang) -> Sglang:
    """The allocator over a cache's pools in place of SGLang's; the same one if it has none."""
    if isinstance(allocator, _OfCache):
        return allocator
    if type(allocator) is SWATokenToKVPoolAllocator and not allocator.swa_req_ring:
        for side in ("full_attn_allocator", "swa_attn_allocator"):
            setattr(allocator, side, swapped(getattr(allocator, side)))
        return allocator
    given = {
        name: getattr(allocator, name) for name in ("size", "dtype", "device", "need_sort")
    } | {"kvcache": allocator.get_kvcache()}
    if type(allocator) is TokenToKVPoolAllocator:
        return TokensOfCache(**given)
    if type(allocator) is PagedTokenToKVPoolAllocator:
        return PagesOfCache(page_size=allocator.page_size, **given)
    return allocator
