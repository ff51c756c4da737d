"""The store hears of the prefixes that DEVICE and HOST serve, so that it keeps usable data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvgraft_storage import Capabilities
from kvgraft_storage.settings import StorePolicy

from ..serving.server import Server
from ..serving.setups import Setup, installed, one_of_each_kind
from .shelf import Shelf, addresses, open_cache, settings, step_by_step, tier_of

PROMPT = list(range(100, 140))
FULL = installed("full")
HYBRID = installed("full", "swa", "mamba")


class Listening(Shelf):
    """Notes every key that is touched, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.touched: list[bytes] = []

    def touch(self, keys: Sequence[bytes]) -> None:
        self.touched += keys
        super().touch(keys)


def opened(setup: Setup, shelf: Shelf, **options: Any) -> Server:
    sizes: dict[str, Any] = {"device_tokens": 256, "host_tokens": 512, **options}
    return Server(open_cache(setup, shelf, settings(store=StorePolicy.WRITE_THROUGH), **sizes))


def served_twice(shelf: Listening, setup: Setup, **options: Any) -> Server:
    """A cache that stored a prompt, and served it again from memory."""
    server = opened(setup, shelf, **options)
    server.serve(PROMPT)
    assert server.cache.drain()
    shelf.touched.clear()
    server.serve([*PROMPT, 1, 2, 3])
    assert server.cache.drain()
    return server


def test_a_prefix_served_from_memory_is_touched_from_its_end_to_its_start() -> None:
    shelf = Listening()
    server = served_twice(shelf, FULL)
    pages = [page[0].key for page in addresses(server.cache, PROMPT, "full")]
    known = [key for key in shelf.touched if key in pages]
    last = {key: number for number, key in enumerate(known)}
    assert len(last) >= len(pages) - 1, "every page that was resumed from"
    assert sorted(last, key=last.__getitem__) == pages[: len(last)][::-1]
    server.cache.close()


@pytest.mark.parametrize("setup", one_of_each_kind())
def test_only_data_that_the_store_has_is_touched(setup: Setup) -> None:
    shelf = Listening()
    server = served_twice(shelf, setup)
    assert shelf.touched
    assert {*shelf.touched} <= {*shelf.stored}
    server.cache.check_integrity()
    server.cache.close()


def test_of_a_window_and_a_state_only_pages_that_the_boundary_needs_are_touched() -> None:
    shelf = Listening()
    server = opened(HYBRID, shelf)
    server.serve(range(100, 180))
    assert server.cache.drain()
    shelf.touched.clear()
    server.serve(range(100, 190))
    assert server.cache.drain()
    prompt = range(100, 180)
    touched = {
        name: sum(
            each.key in shelf.touched
            for page in addresses(server.cache, prompt, name)
            for each in page
        )
        for name in ("full", "swa", "mamba")
    }
    assert touched["full"] > touched["swa"] > 0 < touched["mamba"]
    server.cache.close()


def test_chains_with_a_common_head_are_touched_so_that_no_page_is_older_than_one_after_it() -> None:
    shelf = Listening()
    server = opened(FULL, shelf, pace=step_by_step())
    prompts = [[*PROMPT, *range(first, first + 20)] for first in (1000, 2000, 3000)]
    for prompt in [*prompts, *prompts]:
        server.serve(prompt)
    assert server.cache.drain()
    for prompt in prompts:
        pages = [page[0].key for page in addresses(server.cache, prompt, "full")]
        ranks = [list(shelf.stored).index(key) for key in pages if key in shelf.stored]
        assert len(ranks) > len(PROMPT) // 4
        assert ranks == sorted(ranks, reverse=True)
    server.cache.close()


class Deaf(Listening):
    @property
    def capabilities(self) -> Capabilities:
        return super().capabilities._replace(touch=False)


def test_a_store_that_gains_nothing_by_it_is_not_notified() -> None:
    shelf = Deaf()
    server = served_twice(shelf, FULL)
    assert not shelf.touched
    assert not any(name.startswith("touch") for name in tier_of(server.cache).counts())
    server.cache.close()


def test_another_store_is_not_notified_of_uses_of_the_last_one() -> None:
    shelf = Listening()
    server = opened(FULL, shelf)
    server.serve(PROMPT)
    assert server.cache.drain()
    shelf.touched.clear()
    server.serve([*PROMPT, 1, 2, 3])
    tier_of(server.cache).detach().wait(60)
    other = Listening()
    tier_of(server.cache).attach(other)
    assert server.cache.drain()
    assert not other.touched
    server.cache.check_integrity()
    server.cache.close()
