"""The tiers of the prefix that a request resumes from, at its match."""

from __future__ import annotations

from typing import NamedTuple

from kvgraft.cache import Cache
from kvgraft.requests.request import Request
from kvgraft.types import Span

__all__ = ["Hits", "hits_of"]


class Hits(NamedTuple):
    """A match by tier, in tokens; the sum is its anchor.

    Attributes:
        device: tokens on DEVICE, which need no copy.
        host: tokens on HOST.
        storage: tokens on HOST only because STORAGE brought them while the request was queued.
    """

    device: int
    host: int
    storage: int

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.device + self.host + self.storage

    def at_most(self, n_tokens: int) -> Hits:
        """The first `n_tokens` of it; drops tokens of the farthest tier first."""
        device = min(self.device, n_tokens)
        host = min(self.host, n_tokens - device)
        return self._replace(
            device=device, host=host, storage=min(self.storage, n_tokens - device - host)
        )


def hits_of(cache: Cache, request: Request, fetched: Span) -> Hits:
    """The hits of a request's match, before the load-back.

    Args:
        cache: the request's cache.
        request: an admitted request.
        fetched: the pages of its prefix that its prefetch made resumable.
    """
    size = cache.tree.page_size
    anchor, device = request.anchor_tokens, request.device_tokens
    storage = max(0, min(anchor, fetched.end * size) - max(device, fetched.start * size))
    return Hits(device, anchor - device - storage, storage)
