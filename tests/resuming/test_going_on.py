"""A request goes on past the window that it resumed with (L2, L6)."""

from __future__ import annotations

from typing import Any

import pytest

from kvgraft import Cache

from ..serving.server import Server

SMALL: dict[str, Any] = {"n_layers": 1, "n_kv_heads": 1, "head_dim": 2}
WINDOW = 8
PROMPT = list(range(100, 132))
LONG = [*PROMPT, *range(200, 232)]


def cache_of(*names: str) -> tuple[Cache, Server]:
    """A cache that holds the prompt; one page a token."""
    options = {"full": SMALL, "swa": {**SMALL, "window": WINDOW}}
    cache = Cache.open({name: options[name] for name in names}, device_tokens=256, page_size=1)
    server = Server(cache)
    server.serve(PROMPT)
    return cache, server


@pytest.mark.parametrize("names", [("swa",), ("full", "swa")])
def test_the_window_it_resumed_with_is_free_to_go_once_it_lies_behind(
    names: tuple[str, ...],
) -> None:
    cache, server = cache_of(*names)
    window = cache.tree.component("swa").device
    request = server.start(LONG, chunk=WINDOW)
    assert request.anchor_tokens == len(PROMPT)
    assert window.pinned == WINDOW
    while request.computed < len(PROMPT) + 2 * WINDOW:
        server.step(request, WINDOW)
    assert window.pinned == 0
    cache.evict("swa", window.capacity)
    assert window.evictable == 0
    cache.check_integrity()
    server.prefill(request)
    cache.finish(request)
    cache.check_integrity()
    cache.close()


@pytest.mark.parametrize("names", [("swa",), ("full", "swa")])
def test_it_shares_its_data_even_if_all_it_resumed_with_is_gone(
    names: tuple[str, ...],
) -> None:
    cache, server = cache_of(*names)
    request = server.start(LONG, chunk=WINDOW)
    while request.computed < len(PROMPT) + 2 * WINDOW:
        server.step(request, WINDOW)
    server.empty_device()
    server.prefill(request)
    cache.finish(request)
    cache.check_integrity()
    again = server.start([*LONG, 1])
    assert again.anchor_tokens == len(LONG)
    server.prefill(again)
    cache.finish(again)
    cache.check_integrity()
    cache.close()
