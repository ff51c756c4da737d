"""A prefetch's cost on the scheduler's thread: its longest `prefetch`, `poll` and `begin`.

A prompt is stored by one cache and prefetched by another, over a store in memory, so that no disk
is in it; then 64 prompts are prefetched at once that share all but their last pages with it, one
is cancelled and one begins before its time. Processor time of the calling thread, the longest call
of all rounds. Garbage collection is on, and counts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from _measure import arguments, grid, heading

from kvgraft import Cache, Request, TokenKey
from kvgraft_storage import Capabilities, Status, Value
from kvgraft_testing.storage import MemoryBackend

T = TypeVar("T")
SETS: dict[str, dict[str, dict[str, int]]] = {
    "full": {"full": {}},
    "full + swa + mamba": {"full": {}, "swa": {"window": 4096}, "mamba": {}},
}
PAGE = 64
SHARING = 64
BAR_MS = 3.0


class Kept(MemoryBackend):
    """Closing it removes nothing: the second cache finds the first one's data."""

    @property
    def capabilities(self) -> Capabilities:
        """It is done with memory when a call returns: no copies, and threads rarely switch."""
        return super().capabilities._replace(synchronous=True)

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        """Store without checking the total size."""
        for key, value in zip(keys, values):
            self.stored[key] = bytes(value.header), bytes(value.payload)
        return [Status.OK] * len(keys)

    def close(self) -> None:
        pass


class Longest:
    """The longest call by name, in milliseconds of processor time, and how many there were."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def run(self, name: str, call: Callable[..., T], *given: Any, **named: Any) -> T:
        begun = time.thread_time()
        result = call(*given, **named)
        took_ms = (time.thread_time() - begun) * 1e3
        self.found[name] = max(self.found.get(name, 0.0), took_ms)
        return result


def opened(components: dict[str, dict[str, int]], n_tokens: int, store: Kept) -> Cache:
    settings = {
        "model": "m",
        "weights": "w",
        "store": "write-through",
        "prefetch": "wait-complete",
        "prefetch_nbytes": "4GiB",
        "deadline_s": 600,
    }
    cache = Cache.open(
        components,
        storage=settings,
        load=None,
        device_tokens=2 * n_tokens,
        host_tokens=2 * n_tokens,
    )
    assert cache.storage
    cache.storage.attach(store)
    return cache


def compute(cache: Cache, key: TokenKey) -> None:
    """Compute and store a prompt."""
    request = cache.begin(key)
    assert cache.admit(request).admitted
    cache.load_back(request)
    while request.computed < request.prompt:
        n_tokens = cache.next_chunk(request)
        cache.allocate(request, n_tokens)
        cache.computed(request, n_tokens)
        cache.checkpoint(request)
    cache.finish(request)
    while not cache.drain():
        pass


def one(cache: Cache, key: TokenKey, longest: Longest) -> tuple[int, float]:
    """A prefetch from its start to the request's; its polls, and seconds of them all."""
    assert cache.storage
    prefetch = longest.run("prefetch", cache.storage.prefetch, key)
    n_polls, total_s = 0, 0.0
    while not prefetch.ended:
        begun = time.thread_time()
        longest.run("poll", cache.poll)
        total_s += time.thread_time() - begun
        n_polls += 1
        time.sleep(0.001)
    assert prefetch.gained_tokens == key.n_tokens - 1, prefetch
    request: Request = longest.run("begin", cache.begin, key, prefetch=prefetch)
    assert request.storage_tokens == key.n_tokens - 1
    longest.run("abort", cache.abort, request)
    return n_polls, total_s


def many(cache: Cache, key: TokenKey, longest: Longest) -> None:
    """Prompts with a long common prefix at once, one cancelled and one begun too early."""
    assert cache.storage
    prefetches = []
    for number in range(SHARING):
        fork = TokenKey(namespace=None)
        fork.data += key.data[: -PAGE * 4 * (number + 2)]
        fork.extend([number] * PAGE * 2)
        prefetches.append(longest.run("prefetch", cache.storage.prefetch, fork))
        longest.run("poll", cache.poll)
    for _ in range(20):
        longest.run("poll", cache.poll)
        time.sleep(0.001)
    longest.run("cancel", cache.storage.cancel, prefetches.pop(1))
    early = prefetches.pop(0)
    request: Request = longest.run("begin", cache.begin, early.key, prefetch=early)
    longest.run("abort", cache.abort, request)
    while not all(prefetch.ended for prefetch in prefetches):
        longest.run("poll", cache.poll)
        time.sleep(0.001)
    least = key.n_tokens - 1 - PAGE * 2 * SHARING
    for prefetch in prefetches:
        found = longest.run("begin", cache.begin, prefetch.key, prefetch=prefetch)
        assert found.anchor_tokens >= least, prefetch
        longest.run("abort", cache.abort, found)


def main() -> None:
    given = arguments(__doc__).parse_args()
    pages, rounds = (4096, 1) if given.quick else (65_536, 3)
    n_tokens = pages * PAGE
    heading("a prefetch", pages=pages, page=PAGE, rounds=rounds, sharing=SHARING, gc_here="on")
    rows = []
    for name, components in SETS.items():
        store, key = Kept(1 << 34), TokenKey(range(n_tokens + 1))
        first = opened(components, n_tokens, store)
        compute(first, TokenKey(key.tokens(0, n_tokens - PAGE * 2 * SHARING)))
        compute(first, key)
        first.close()
        gc.enable()
        longest, numbers = Longest(), (0, 0.0)
        for scene in [one] * rounds + [many]:
            gc.collect()
            cache = opened(components, n_tokens, store)
            fresh = TokenKey(key.tokens())
            if scene is one:
                numbers = one(cache, fresh, longest)
            else:
                many(cache, fresh, longest)
            cache.close()
        names = ("prefetch", "poll", "begin", "abort", "cancel")
        found = [f"{longest.found[each]:.2f}" for each in names]
        rows.append([name, *found, str(numbers[0]), f"{numbers[1] * 1e3:.0f}"])
    calls = ("prefetch", "poll", "begin", "abort", "cancel")
    grid(["longest, ms", *calls, "polls of one", "ms in them"], rows)
    print(f"\nbar: {BAR_MS:g} ms for each")


if __name__ == "__main__":
    main()
