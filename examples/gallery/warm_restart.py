"""A store behind the cache: a second process reuses what the first one computed.

kvgraft-full, kvgraft-storage, kvgraft-file
"""

import tempfile

from kvgraft import Cache, TokenKey


def serve(cache: Cache, key: TokenKey) -> int:
    """Serve a prompt, whose prefix may come from the store; returns the tokens that did."""
    prefetch = cache.storage.prefetch(key)  # when the request is queued; the engine goes on
    while not prefetch.ready:
        cache.poll()
    request = cache.begin(key, prefetch=prefetch)
    assert cache.admit(request).admitted
    cache.load_back(request)
    cache.drain()
    while request.computed < request.prompt:
        n_tokens = cache.next_chunk(request)
        cache.allocate(request, n_tokens)
        cache.computed(request, n_tokens)
    cache.finish(request)
    return request.storage_tokens


with tempfile.TemporaryDirectory() as directory:
    storage = {
        "url": f"file:{directory}?capacity=1GiB",
        "model": "my-model",  # data of another model, other weights or shapes is never used
        "weights": "rev-1",
        "store": "write-through",
    }
    for process in "first", "second":
        with Cache.open(
            ["full"], page_size=16, device_tokens=8192, host_tokens=16_384, storage=storage
        ) as cache:
            print(process, serve(cache, TokenKey(range(5000))))
