"""A model of three kinds of attention: a prompt resumes where all of them can.

kvgraft-full, kvgraft-swa, kvgraft-mamba, kvgraft-observe
"""

from kvgraft import Cache, TokenKey

LAYERS = {
    "full": {"n_layers": 4},  # needs every token before a boundary
    "swa": {"window": 256, "n_layers": 20},  # needs the last 256
    "mamba": {"n_layers": 8, "states": 12},  # needs the state at the boundary itself
}


def serve(cache: Cache, prompt: range | list[int], shared: int | None = None) -> int:
    """Serve a prompt; others will go on differently after `shared` tokens of it."""
    request = cache.begin(TokenKey(prompt), resume_at=shared)
    assert cache.admit(request).admitted
    while request.computed < request.prompt:
        n_tokens = cache.next_chunk(request)  # ends where a state is to be kept
        cache.allocate(request, n_tokens)
        cache.computed(request, n_tokens)
    cache.finish(request)
    return request.anchor_tokens


with Cache.open(LAYERS, page_size=16, device_tokens=8192) as cache:
    document = list(range(2000))
    print(serve(cache, [*document, 1, 2, 3], shared=2000))  # 0
    print(serve(cache, [*document, 4, 5, 6]))  # 2000
    print(serve(cache, [*document[:1500], 7]))  # 0
    # Full attention has 1,488 tokens of that one, but nobody kept a state there:
    print(cache.explain(TokenKey(document[:1200])))
