"""Where a decode keeps its states, and which reach it keeps until the next one (I7, I10, G3)."""

from __future__ import annotations

from kvgraft.cache import Cache
from kvgraft.requests.request import Request

__all__ = ["decode_pages", "draft_pages", "reached_from"]

DRAFTED_TOKENS = 64
"""Tokens between two states of a decode with drafts, at most, where there are windows."""


def decode_pages(cache: Cache) -> int:
    """Pages between two states that a decode keeps."""
    tokens = cache.config.decode_interval_tokens
    if _has_windows(cache):
        tokens = min(tokens, DRAFTED_TOKENS) if cache.config.max_drafts else 0
    return max(1, -(-tokens // cache.tree.page_size))


def draft_pages(cache: Cache) -> int:
    """Pages beside a window that a decode takes for drafts and until its next state (A4, G1)."""
    drafts = -(-cache.config.max_drafts // cache.tree.page_size)
    return drafts + (decode_pages(cache) - 1 if cache.tree.has_state else 0)


def reached_from(cache: Cache, request: Request) -> int:
    """The boundary, in pages, whose reaches a running request keeps."""
    size = cache.tree.page_size
    page = request.computed // size
    if request.computed <= request.prompt or not (cache.tree.has_state and _has_windows(cache)):
        return page
    return max(page - page % decode_pages(cache), request.prompt // size)


def _has_windows(cache: Cache) -> bool:
    return not all(each.is_state or each.is_prefix_closed for each in cache.tree.components)
