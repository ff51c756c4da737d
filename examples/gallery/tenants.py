"""Two tenants of one cache: a batch job cannot push out what a chat has guaranteed.

kvgraft-full, kvgraft-retention
"""

from kvgraft import Cache, TokenKey

TENANTS = {
    "chat": {"namespaces": ["chat"], "guarantee": 0.5},
    "batch": {"namespaces": ["batch"], "limit": 0.75},
}


def serve(cache: Cache, namespace: str, prompt: range) -> int:
    request = cache.begin(TokenKey(prompt, namespace))
    assert cache.admit(request).admitted
    while request.computed < request.prompt:
        n_tokens = cache.next_chunk(request)
        cache.allocate(request, n_tokens)
        cache.computed(request, n_tokens)
    cache.finish(request)
    return request.anchor_tokens


with Cache.open(["full"], page_size=16, device_tokens=16_000, tenants=TENANTS) as cache:
    serve(cache, "chat", range(7000))
    for document in range(100):
        serve(cache, "batch", range(document * 10_000, document * 10_000 + 3000))
    print("chat reuses", serve(cache, "chat", range(7000)))  # chat reuses 6992
    for name, tenant in cache.stats().tenants.items():
        print(name, tenant.device["full"].used)
