"""Token keys: any source of integers, int32 inside, whole pages compared."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvgraft import Cache, ConfigError, TokenKey
from kvgraft.tree.keys import TOKEN_BYTES, common_prefix_pages

ids = st.integers(0, 2**31 - 1)


@given(tokens=st.lists(ids))
def test_a_key_holds_the_tokens_it_was_given(tokens: list[int]) -> None:
    key = TokenKey(tokens)
    assert key.tokens().tolist() == tokens
    assert key.n_tokens == len(key) == len(tokens)


@pytest.mark.parametrize(
    "source",
    [
        (7, 8, 9),
        [7, np.int64(8), np.uint8(9)],
        iter([7, 8, 9]),
        range(7, 10),
        array("q", [7, 8, 9]),
        memoryview(array("i", [7, 8, 9])),
        np.array([7, 8, 9], dtype=np.int64),
        np.array([7, 8, 9], dtype=np.uint8),
        np.array([0, 7, 0, 8, 0, 9], dtype=np.int32)[1::2],
    ],
    ids=lambda source: type(source).__name__,
)
def test_any_source_of_integers_gives_the_same_key(source: Any) -> None:
    assert TokenKey(source).data == TokenKey([7, 8, 9]).data


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32"])
def test_the_ids_of_a_prompt_are_copied_once(dtype: str) -> None:
    prompt = np.arange(100_000, dtype=dtype)
    TokenKey(prompt[:5000])  # what is imported at the first one
    tracemalloc.start()
    key = TokenKey(prompt)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1.1 * len(key.data)
    assert key.data == prompt.astype(np.int32).tobytes()


def test_a_key_that_gets_its_first_ids_keeps_its_data() -> None:
    key = TokenKey()
    data = key.data  # a policy reads it as it grows
    key.extend(np.arange(3))
    key.extend(np.arange(3, 5000))
    assert data is key.data
    assert key.tokens().tolist() == list(range(5000))


@given(parts=st.lists(st.lists(ids)))
def test_extending_is_concatenating(parts: list[list[int]]) -> None:
    key = TokenKey()
    for part in parts:
        key.extend(part)
    assert key.tokens().tolist() == [token for part in parts for token in part]


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2**31],
        [1, -(2**31) - 1],
        [1, 2.5],
        ["one"],
        "text",
        np.array([1, 2**31]),
        np.array([1, 2**63], dtype=np.uint64),
        np.array([1.5, 2.0]),
        np.array([True, False]),
        np.ma.array([1, 2, 3], mask=[False, True, False]),
    ],
    ids=repr,
)
def test_a_token_that_is_no_int32_is_refused_and_the_key_stays_as_it_was(tokens: Any) -> None:
    key = TokenKey([5])
    with pytest.raises(ConfigError, match="int32"):
        key.extend(tokens)
    assert key.tokens().tolist() == [5]


@pytest.mark.parametrize(
    ("tokens", "bad"),
    [
        ([3, 1.5], "token 1 is 1.5"),
        ((2**40,), "token 0 is 1099511627776"),
        ([7, 7, "a"], "2 is 'a'"),
        ([[1, 2], [3]], r"0 is \[1, 2\]; give a list of one sequence's, of the model's own vocab"),
        (5, "int32: an int is no list; give a list of one sequence's, of the model's"),
    ],
)
def test_a_refusal_names_the_first_token_that_is_no_int32(tokens: Any, bad: str) -> None:
    with pytest.raises(ConfigError, match=bad):
        TokenKey(tokens)


@pytest.mark.parametrize(
    "text",
    [b"ab", bytearray(b"ab"), memoryview(b"ab"), "ab", b"", "", {1, 2}, {1: 2}],
    ids=["bytes", "bytearray", "memoryview", "str", "no bytes", "no text", "set", "dict"],
)
def test_text_and_what_has_no_order_is_no_list_of_tokens(text: Any) -> None:
    key = TokenKey([5])
    kind = type(text).__name__
    for call in (TokenKey, key.extend):
        with pytest.raises(ConfigError) as refused:
            call(text)
        assert str(refused.value) == (
            f"token ids given as {kind}; give a list of integers that fit int32, such as those of "
            "the model's tokenizer"
        )
    assert key.tokens().tolist() == [5]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
@pytest.mark.parametrize(
    ("ids", "shape"), [([[1, 2, 3]], "(1, 3)"), ([[1], [2]], "(2, 1)"), ([[]], "(1, 0)"), (5, "()")]
)
def test_ids_of_several_dimensions_are_refused_with_their_shape(
    make: Any, ids: Any, shape: str
) -> None:
    key = TokenKey([5])
    with pytest.raises(ConfigError) as refused:
        key.extend(make(ids))
    assert str(refused.value) == (
        f"token ids of shape {shape}; give one sequence, such as ids[0] of a batch"
    )
    assert key.tokens().tolist() == [5]
    assert TokenKey(make([1, 2, 3])).tokens().tolist() == [1, 2, 3]


@pytest.mark.parametrize("lowest", [-1, -100, -(2**31)])
@pytest.mark.parametrize("form", [list, tuple, iter, np.array, lambda ids: np.array(ids, np.int32)])
def test_a_negative_token_is_refused_and_the_key_stays_as_it_was(form: Any, lowest: int) -> None:
    """-100 marks a label without a token, -1 padding: neither has data to share."""
    for ids in ([lowest], [3, 2**31 - 1, lowest, -1, 4]):
        key = TokenKey([5])
        with pytest.raises(ConfigError, match=f"token ids? {lowest}"):
            key.extend(form(ids))
        assert key.tokens().tolist() == [5]


@given(tokens=st.lists(ids, max_size=20), keep=st.integers(0, 25))
def test_truncating_keeps_the_first_tokens(tokens: list[int], keep: int) -> None:
    key = TokenKey(tokens)
    key.truncate(keep)
    assert key.tokens().tolist() == tokens[:keep]


def test_a_cut_copies_no_token() -> None:
    """A decode cuts rejected drafts from long keys at every pass."""
    key = TokenKey(range(100))
    data = key.data
    key.truncate(97)
    assert key.data is data
    assert key.tokens().tolist() == [*range(97)]


@given(
    shared=st.lists(ids, max_size=12),
    mine=st.lists(ids, max_size=6),
    theirs=st.lists(ids, max_size=6),
    offset=st.integers(0, 5),
    page_size=st.integers(1, 4),
)
def test_the_common_prefix_is_counted_in_whole_pages(
    shared: list[int], mine: list[int], theirs: list[int], offset: int, page_size: int
) -> None:
    key = TokenKey([0] * offset + shared + mine)
    edge = TokenKey(shared + theirs)
    agreed = 0
    for one, two in zip(key.tokens()[offset:], edge.tokens()):
        if one != two:
            break
        agreed += 1
    found = common_prefix_pages(
        key.data, offset * TOKEN_BYTES, bytes(edge.data), page_size * TOKEN_BYTES
    )
    assert found == agreed // page_size


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda key: pickle.loads(pickle.dumps(key))]
)
def test_a_copy_of_a_key_that_was_served_is_a_key_of_its_own(
    copied: Callable[[TokenKey], TokenKey],
) -> None:
    with Cache.open(["full"], page_size=4, device_tokens=64) as cache:
        key = TokenKey(range(9), namespace=("a", 1))
        request = cache.begin(key)
        assert cache.admit(request).admitted
        assert cache.allocate(request, 9)
        cache.computed(request, 9)
        assert cache.finish(request) == 8
        made = copied(key)
        made.extend([9])
        assert made.tokens().tolist() == list(range(10))
        assert made.namespace == key.namespace
        assert key.n_tokens == 9
        assert cache.begin(made).anchor_tokens == 8


def test_a_pickled_key_takes_no_tree_along() -> None:
    with Cache.open(["full"], page_size=4, device_tokens=4096) as cache:
        for first in range(0, 4000, 100):
            key = TokenKey(range(first, first + 9))
            request = cache.begin(key)
            assert cache.admit(request).admitted
            assert cache.allocate(request, 9)
            cache.computed(request, 9)
            cache.finish(request)
        assert len(pickle.dumps(key)) < len(pickle.dumps(TokenKey(range(9)))) + 8
