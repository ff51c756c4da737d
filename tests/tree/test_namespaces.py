"""A namespace costs nothing once nobody uses it and nothing is cached in it (T1, T11)."""

from __future__ import annotations

from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction

import numpy as np
import pytest

from kvgraft import Cache, ConfigError, TokenKey

from ..serving.life import serve


class Number(IntEnum):
    ONE = 1


class Name(str, Enum):
    A = "a"


def small_cache() -> Cache:
    return Cache.open(["full"], page_size=4, device_tokens=64, load=None)


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


NUMBERS = (
    *(False, True, 0.0, -0.0, 1.0, 2.5, float("nan"), 1j, Decimal(1), Fraction(1), Number.ONE),
    *(np.int64(1), np.float32(1), np.True_, np.timedelta64(0, "s")),
)


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: f"{type(number).__name__} {number}")
def test_a_number_that_is_no_int_is_refused_as_a_namespace(number: object) -> None:
    """Most equal an int, and so would share its tenant's data."""
    said = rf" is an? {type(number).__name__}, and equal numbers .*; use an int, a str, bytes or"
    cache = small_cache()
    for name in (number, ("a", (2, number)), frozenset({"a", number})):
        with pytest.raises(ConfigError, match=said) as refused:
            TokenKey(range(9), namespace=name)
        assert str(refused.value).startswith(f"namespace {name!r:.60}: {number!r} is a")
        assert "\n" not in str(refused.value)
        key = TokenKey(range(9))
        key.namespace = name
        with pytest.raises(ConfigError, match=said):
            cache.begin(key)
        with pytest.raises(ConfigError, match=said):
            cache.explain(key)
    assert not cache.tree.roots


def test_a_namespace_may_be_anything_else_that_can_be_hashed() -> None:
    for name in (-1, 2**70, Name.A, frozenset({1, "a"}), object(), nested(16), np.str_("a"), int):
        assert TokenKey(range(9), namespace=name).namespace is name


def nested(depth: int) -> object:
    deep: object = 1
    for _ in range(depth):
        deep = (deep,)
    return deep


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (10**5000, "namespace: an int of 16610 bits is above 256"),
        (("a", -(2**256)), "namespace: an int of 257 bits is above 256"),
        (nested(17), "namespace: tuples nest deeper than 16"),
        (nested(5000), "namespace: tuples nest deeper than 16"),
        ((10**5000, True), "namespace of type tuple: True is a bool"),
        ([10**5000], "namespace of type list is a list, which cannot be hashed"),
    ],
    ids=range(6),
)
def test_a_namespace_that_cannot_be_named_is_refused_in_one_line(name: object, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        TokenKey(range(9), namespace=name)
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)
