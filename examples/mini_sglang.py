"""mini-sglang's prefix cache over a kvgraft cache: its seven members, for its own `CacheManager`.

    put_in(scheduler.cache_manager)

mini-sglang has the free pages itself and hands pages over when it inserts them, so it takes all of
the cache's slots at first, and requests adopt them (rule N2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from minisgl.kvcache import base

from kvgraft import Cache, Request, TokenKey


@dataclass(frozen=True)
class Handle(base.BaseCacheHandle):  # type: ignore[misc]
    """A prefix; while it is locked, requests of the cache hold it."""

    tokens: torch.Tensor
    cache: PrefixCache
    holders: list[Request] = field(default_factory=list)

    def get_matched_indices(self) -> torch.Tensor:
        return self.cache.token_slots(self.cache.kvgraft.table(self.holders[0], "full"))


class PrefixCache(base.BasePrefixCache):  # type: ignore[misc]
    """Decides which of the pages of mini-sglang's pool stay."""

    def __init__(self, num_pages: int, page_size: int, policy: str) -> None:
        self.page_size, tokens = page_size, num_pages * page_size
        given: dict[str, Any] = {"page_size": page_size, "device_tokens": tokens}
        self.kvgraft = Cache.open(["full"], payload=False, policy=policy, **given)

    def _begin(self, tokens: torch.Tensor) -> Request:
        """A request behind `tokens`, which resumes from at most all of them."""
        return self.kvgraft.begin(TokenKey([*tokens.tolist(), 0]))

    def match_prefix(self, input_ids: torch.Tensor) -> base.MatchResult:
        request = self._begin(input_ids)
        n_tokens = request.anchor_tokens
        self.kvgraft.abort(request)
        return base.MatchResult(Handle(n_tokens, input_ids[:n_tokens].clone(), self))

    def lock_handle(self, handle: Handle, unlock: bool = False) -> None:  # noqa: FBT001, FBT002
        if unlock:
            self.kvgraft.abort(handle.holders.pop())
        else:
            handle.holders.append(self._begin(handle.tokens))
            assert handle.holders[-1].anchor_tokens == handle.cached_len

    def insert_prefix(self, input_ids: torch.Tensor, indices: torch.Tensor) -> base.InsertResult:
        size, slots = self.page_size, self.kvgraft.engine_slots
        tokens = input_ids[: len(input_ids) // size * size].clone()
        request = self._begin(tokens)
        there = request.anchor_tokens
        pages = indices[there : len(tokens) : size] // size
        slots.admit(request)
        slots.adopt(request, len(pages), {"full": pages.numpy()})
        self.kvgraft.computed(request, len(tokens) - there)
        self.kvgraft.finish(request)
        return base.InsertResult(there, Handle(len(tokens), tokens, self))

    def evict(self, size: int) -> torch.Tensor:
        freed = self.kvgraft.evict("full", -(-size // self.page_size))
        if freed * self.page_size < size:
            raise RuntimeError(f"{size} tokens to evict, {freed * self.page_size} are evictable")
        return self.take(freed)

    def take(self, n_pages: int) -> torch.Tensor:
        """The token slots of pages that are free."""
        return self.token_slots(self.kvgraft.engine_slots.take("full", n_pages))

    def token_slots(self, pages: Any) -> torch.Tensor:
        offsets = torch.arange(self.page_size, dtype=torch.int32)
        return (torch.from_numpy(pages.copy())[:, None] * self.page_size + offsets).flatten()

    @property
    def size_info(self) -> base.SizeInfo:
        pool = self.kvgraft.stats().components["full"].device
        return base.SizeInfo(pool.evictable * self.page_size, pool.pinned * self.page_size)

    def reset(self) -> None:
        raise NotImplementedError("put a new one in")

    def check_integrity(self) -> None:
        self.kvgraft.check_integrity()


def put_in(manager: Any, policy: str = "density") -> None:
    """Replace the prefix cache of a `CacheManager` that holds nothing yet."""
    manager.prefix_cache = PrefixCache(manager.num_pages, manager.page_size, policy)
    manager.free_slots = manager.prefix_cache.take(manager.num_pages)[:: manager.page_size]
