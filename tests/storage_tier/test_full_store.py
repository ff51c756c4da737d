"""A full store keeps prefixes that can be used, though their heads are served from memory."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvgraft.cache import Cache
from kvgraft_file import FileBackend, FileOptions
from kvgraft_storage import BLOCK_NBYTES, Address, Status, StorageBackend, Value
from kvgraft_testing.storage import MemoryBackend

from ..serving.server import Server
from ..serving.setups import Setup, installed
from .shelf import addresses, open_cache, tier_of

FULL = installed("full")
WINDOW = installed("full", "swa")
LONG = pytest.mark.long
TURNS, PAGES = 10, 6
SIZES: dict[str, Any] = {"device_tokens": 512, "host_tokens": 4096}


class InMemory(MemoryBackend):
    """Counts the bytes that are stored; closing it forgets nothing."""

    def __init__(self, capacity_nbytes: int = 1 << 30) -> None:
        super().__init__(capacity_nbytes)
        self.written = 0

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        told = super().set_from(keys, values, deadline_s)
        self.written += _nbytes(values, told)
        return told

    def close(self) -> None:
        """Keep everything."""


class OnDisk(FileBackend):
    """Counts the records that are stored, and remembers how many it had when it was closed."""

    n_written = n_records = 0

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        told = super().set_from(keys, values, deadline_s)
        self.n_written += told.count(Status.OK)
        return told

    def close(self) -> None:
        self.n_records = self.stats().n_records
        super().close()


def _nbytes(values: Sequence[Value], told: Sequence[Status]) -> int:
    """Bytes of the payloads stored, with the header of each."""
    return sum(
        len(value.header) + value.nbytes
        for value, status in zip(values, told)
        if status is Status.OK
    )


def turns(n_conversations: int) -> Iterator[tuple[int, list[int]]]:
    """Conversations in turn, by chance, each time a few pages longer."""
    rng = random.Random(n_conversations)
    lengths = dict.fromkeys(range(n_conversations), 0)
    order = [number for number in lengths for _ in range(TURNS)]
    rng.shuffle(order)
    for number in order:
        lengths[number] += 2 * rng.randint(PAGES // 2, PAGES + PAGES // 2)
        yield number, conversation(number, lengths[number])


def conversation(number: int, n_tokens: int) -> list[int]:
    return [1000 * (number + 1) + token for token in range(n_tokens)]


def serve(setup: Setup, store: StorageBackend, n_conversations: int) -> tuple[Cache, list[int]]:
    """Serve all turns with a HOST that holds everything; the tokens of each conversation."""
    server = Server(open_cache(setup, store, **SIZES))
    tokens = [0] * n_conversations
    for number, prompt in turns(n_conversations):
        server.serve(prompt)
        tokens[number] = len(prompt)
    assert server.cache.drain()
    return server.cache, tokens


def usable_pages(cache: Cache, prompt: list[int]) -> int:
    """The deepest boundary of a prompt whose pages the store has, in pages."""
    components = [(each, addresses(cache, prompt, each.name)) for each in cache.tree.components]
    for boundary in range(len(prompt) // cache.tree.page_size, 0, -1):
        needed = [
            address
            for component, pages in components
            for span in component.reach_pages.spans(boundary)
            for page in pages[span.start : span.end]
            for address in page
        ]
        if has_all(cache, needed):
            return boundary
    return 0


def has_all(cache: Cache, needed: list[Address]) -> bool:
    """Whether a store has them, from its memory: no use of them."""
    return all(tier_of(cache).client.probably_has(needed))


def leaf_lru(n_conversations: int, n_pages: int) -> int:
    """The pages that exact leaf-LRU of a number of pages keeps: all of them can be used."""
    kept: dict[int, int] = {}
    for number, prompt in turns(n_conversations):
        kept.pop(number, None)
        kept[number] = len(prompt) // 2
        while sum(kept.values()) > n_pages:
            oldest = next(number for number, pages in kept.items() if pages)
            kept[oldest] -= 1
    return sum(kept.values())


def kept_and_best(setup: Setup, store: InMemory | OnDisk, n_conversations: int) -> tuple[int, int]:
    """The usable pages that a store of a third keeps, and those of exact leaf-LRU."""
    cache, tokens = serve(setup, store, n_conversations)
    mine = sum(
        usable_pages(cache, conversation(number, length)) for number, length in enumerate(tokens)
    )
    cache.check_integrity()
    cache.close()
    return mine, leaf_lru(n_conversations, sum(tokens) // 2 // 3)


@pytest.mark.parametrize(
    ("setup", "n_conversations"),
    [
        (FULL, 6),
        (WINDOW, 6),
        pytest.param(FULL, 12, marks=LONG),
        pytest.param(WINDOW, 12, marks=LONG),
    ],
    ids=["full, 6", "full and swa, 6", "full, 12", "full and swa, 12"],
)
def test_conversations_that_do_not_fit_keep_prefixes_that_can_be_used(
    setup: Setup, n_conversations: int
) -> None:
    unlimited = InMemory()
    serve(setup, unlimited, n_conversations)[0].close()
    store = InMemory(unlimited.written // 3)
    mine, best = kept_and_best(setup, store, n_conversations)
    assert mine >= 0.9 * best
    assert store.written <= 1.3 * unlimited.written


def test_all_records_of_a_full_file_store_can_be_used(tmp_path: Path) -> None:
    lengths = {number: len(prompt) // 2 for number, prompt in turns(6)}
    record = 2 * BLOCK_NBYTES
    capacity = sum(lengths.values()) // 3 * record
    store = OnDisk(tmp_path, FileOptions(capacity=capacity, segment=4 * record, refresh_s=3600))
    mine, _ = kept_and_best(FULL, store, 6)
    assert mine >= 0.9 * store.n_records > 0.7 * capacity / record
    assert store.n_written <= 1.3 * sum(lengths.values())


def test_a_head_that_the_store_lost_is_stored_again_with_the_next_tail() -> None:
    store = InMemory()
    server = Server(open_cache(FULL, store, **SIZES))
    server.serve(conversation(0, 40))
    assert server.cache.drain()
    head = [page[0].key for page in addresses(server.cache, conversation(0, 40), "full")]
    del store.stored[head[3]]
    server.serve(conversation(0, 60))
    assert server.cache.drain()
    assert head[3] in store.stored
    assert usable_pages(server.cache, conversation(0, 60)) == 30
    server.cache.close()


def test_a_head_that_the_store_lost_is_stored_again_when_its_prompt_is_served_again() -> None:
    store = InMemory()
    server = Server(open_cache(FULL, store, **SIZES))
    server.serve(conversation(0, 40))
    server.serve(conversation(1, 40))
    assert server.cache.drain()
    head = [page[0].key for page in addresses(server.cache, conversation(0, 40), "full")]
    del store.stored[head[3]]
    server.serve(conversation(1, 40))
    assert server.cache.drain()
    assert head[3] not in store.stored
    server.serve(conversation(0, 40))
    assert server.cache.drain()
    assert head[3] in store.stored
    server.cache.check_integrity()
    server.cache.close()


class Asked(InMemory):
    """Notes the keys it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[bytes] = set()

    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        self.asked.update(keys)
        return super().exists(keys)


def test_heads_of_prompts_served_again_are_asked_for_up_to_a_limit_of_pages_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvgraft_storage.tier.storing.RESUMED_PAGES", 30)
    monkeypatch.setattr("kvgraft_storage.tier.storing.RESUMED_S", 1e9)  # only drain asks
    store = Asked()
    server = Server(open_cache(FULL, store, **SIZES))
    prompts = [conversation(number, 41) for number in range(4)]
    for prompt in prompts * 2:
        server.serve(prompt)
    store.asked.clear()
    for prompt in prompts:
        request = server.start(prompt)
        server.prefill(request)
        server.cache.finish(request)
    pages = [
        {page[0].key for page in addresses(server.cache, prompt, "full")} for prompt in prompts
    ]
    for n_asked in (2, 4):  # of 20 pages each; the second one begins below the limit
        assert server.cache.drain()
        assert store.asked == set().union(*pages[:n_asked])
    server.cache.close()


def written_in_ten_rounds(store: InMemory) -> int:
    """Bytes written while three prompts are served ten times."""
    server = Server(open_cache(FULL, store, **SIZES))
    for number in [0, 1, 2] * 10:
        server.serve(conversation(number, 40))
        assert server.cache.drain()
    server.cache.close()
    return store.written


def test_prompts_that_do_not_fit_are_not_written_every_time_they_are_served() -> None:
    unlimited = written_in_ten_rounds(InMemory())
    assert 0 < written_in_ten_rounds(InMemory(unlimited // 2)) <= 1.3 * unlimited


def test_a_tail_waits_until_its_head_may_be_written_again() -> None:
    store = InMemory()
    server = Server(open_cache(FULL, store, **SIZES))
    server.serve(conversation(0, 40))
    assert server.cache.drain()
    store.stored.clear()
    server.serve(conversation(0, 44))
    assert server.cache.drain()
    assert not store.stored
    for n_tokens in range(60, 300, 20):
        server.serve(conversation(0, n_tokens))
        assert server.cache.drain()
    assert usable_pages(server.cache, conversation(0, 280)) == 140
    server.cache.check_integrity()
    server.cache.close()
