"""What a prefetch costs the scheduler's thread: when it starts, and in the polls that take it in.

A prompt of 128K tokens is stored by one cache and prefetched by another, over a store in memory, so
that no disk is in it. Processor time of the calling thread; garbage collection is off.
"""

from __future__ import annotations

import gc
import statistics
import time

from _measure import arguments, grid, heading

from kvgraft import Cache, TokenKey
from kvgraft.testing.storage import MemoryBackend

SETS: dict[str, dict[str, dict[str, int]]] = {
    "full": {"full": {}},
    "full + swa + mamba": {"full": {}, "swa": {"window": 4096}, "mamba": {}},
}


class Kept(MemoryBackend):
    """Closing it forgets nothing: the second cache finds what the first one stored."""

    def close(self) -> None:
        pass


def opened(components: dict[str, dict[str, int]], n_tokens: int, store: Kept) -> Cache:
    settings = {"model": "m", "weights": "w", "store": "write-through", "prefetch": "wait-complete"}
    sizes = {"device_tokens": 2 * n_tokens, "host_tokens": 2 * n_tokens}
    cache = Cache.open(components, storage=settings, load=None, **sizes)
    assert cache.storage is not None
    cache.storage.attach(store)
    return cache


def compute(cache: Cache, key: TokenKey) -> None:
    """Compute and store the prompt."""
    request = cache.begin(key)
    assert cache.admit(request).admitted
    cache.load_back(request)
    while request.computed < request.prompt:
        n_tokens = cache.next_chunk(request)
        cache.allocate(request, n_tokens)
        cache.computed(request, n_tokens)
        cache.checkpoint(request)
    cache.finish(request)
    assert cache.drain()


def prefetched(cache: Cache, key: TokenKey) -> tuple[float, float]:
    """Seconds to start, and of the longest poll."""
    assert cache.storage is not None
    started = time.thread_time()
    prefetch = cache.storage.prefetch(key)
    start_s, longest_s = time.thread_time() - started, 0.0
    while not prefetch.ended:
        begun = time.thread_time()
        cache.poll()
        longest_s = max(longest_s, time.thread_time() - begun)
        time.sleep(0.002)
    assert prefetch.gained_tokens == key.n_tokens - 1, prefetch
    return start_s, longest_s


def main() -> None:
    given = arguments(__doc__).parse_args()
    n_tokens, rounds = (16 * 1024, 2) if given.quick else (128 * 1024, 5)
    gc.disable()
    heading("a prefetch", tokens=n_tokens, page=64, rounds=f"{rounds}, medians")
    rows = []
    for name, components in SETS.items():
        store, key = Kept(1 << 34), TokenKey(range(n_tokens + 1))
        first = opened(components, n_tokens, store)
        compute(first, key)
        first.close()
        times = []
        for _ in range(rounds):
            cache = opened(components, n_tokens, store)
            times.append(prefetched(cache, key))
            cache.close()
            gc.collect()
        start_s, longest_s = (statistics.median(each) for each in zip(*times))
        rows.append([name, f"{start_s * 1e3:.1f}", f"{longest_s * 1e3:.1f}"])
    grid(["", "start ms", "longest poll ms"], rows)


if __name__ == "__main__":
    main()
