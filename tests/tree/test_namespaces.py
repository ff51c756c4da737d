"""A namespace costs nothing once nobody uses it and nothing is cached in it (T1, T11)."""

from __future__ import annotations

from kvgraft import Cache, TokenKey


def small_cache() -> Cache:
    return Cache.open(["full"], page_size=4, device_tokens=64, load=None)


def serve(cache: Cache, key: TokenKey) -> None:
    request = cache.begin(key)
    assert cache.admit(request).admitted
    cache.allocate(request, key.n_tokens)
    cache.computed(request, key.n_tokens)
    cache.finish(request)


def test_namespaces_that_were_only_asked_about_leave_nothing_behind() -> None:
    cache = small_cache()
    for salt in range(50):
        cache.abort(cache.begin(TokenKey(range(9), namespace=salt)))
        cache.explain(TokenKey(range(9), namespace=("explain", salt)))
    assert not cache.tree.roots


def test_a_namespace_goes_with_its_last_cached_page() -> None:
    cache = small_cache()
    serve(cache, TokenKey(range(8), namespace="a"))
    assert list(cache.tree.roots) == ["a"]
    cache.evict("full", 16)
    assert not cache.tree.roots
    cache.check_integrity()


def test_a_request_outlives_the_eviction_of_all_that_its_namespace_held() -> None:
    cache = small_cache()
    serve(cache, TokenKey(range(8), namespace="a"))
    request = cache.begin(TokenKey(range(100, 108), namespace="a"))
    cache.evict("full", 16)
    assert cache.admit(request).admitted
    cache.allocate(request, 8)
    cache.computed(request, 8)
    assert cache.finish(request) == 8
    again = cache.begin(TokenKey(range(100, 112), namespace="a"))
    assert again.anchor_tokens == 8
    cache.abort(again)
    cache.check_integrity()


def test_namespaces_that_are_false_or_look_equal_are_told_apart() -> None:
    """Each is served twice, so that a namespace which lost its tree computes everything again."""
    with small_cache() as cache:
        names: list[object] = [None, "", 0, "0", "None", (), b""]
        for number, name in enumerate(names):
            serve(cache, TokenKey(range(number, number + 8), namespace=name))
        for number, name in enumerate(names):
            for other in range(len(names)):
                request = cache.begin(TokenKey(range(other, other + 9), namespace=name))
                assert request.anchor_tokens == (8 if other == number else 0), (name, names[other])
                cache.abort(request)
        assert list(cache.tree.roots) == names
        cache.check_integrity()
