"""A cache in an engine: two turns of one chat. The second computes only what is new.

kvgraft-full
"""

from kvgraft import Cache, Request, TokenKey


def run_model(cache: Cache, request: Request, n_tokens: int) -> None:
    """An engine runs its model here; its kernels read and write these slots."""
    slots = cache.table(request, "full")
    assert len(slots) * cache.config.page_size >= request.computed + n_tokens


def serve(cache: Cache, key: TokenKey, answer: list[int]) -> int:
    """Serve a prompt, and add the answer to its key; returns the tokens that were reused."""
    request = cache.begin(key, reserve=len(answer))  # match, and pin what was found
    assert cache.admit(request).admitted  # every pool has promised the slots
    while request.computed < request.prompt:
        n_tokens = cache.next_chunk(request)
        cache.allocate(request, n_tokens)
        run_model(cache, request, n_tokens)
        cache.computed(request, n_tokens)
    for token in answer:
        key.extend([token])
        cache.allocate(request, 1)
        run_model(cache, request, 1)
        cache.computed(request, 1)
    cache.finish(request)  # its pages stay as cache
    return request.anchor_tokens


with Cache.open(["full"], page_size=16, device_tokens=4096) as cache:
    chat = TokenKey(range(1000))
    print("reused:", serve(cache, chat, answer=[7] * 50))  # reused: 0
    chat.extend(range(2000, 2100))  # the user's next message
    print("reused:", serve(cache, chat, answer=[8] * 50))  # reused: 1040
