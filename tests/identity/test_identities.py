"""Keys with identities: their pages are shared where tokens and identities are equal (T11)."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraft import Cache, ConfigError, TokenKey
from kvgraft_observe.events import Stored
from kvgraft_storage.keys import page_hash

from ..serving import life

IMAGE = 32_000
PAGE = 4
TEXT = 0
"""The length of a part that is an image, so not of one that is text."""

Part = tuple[str, int]
"""The identity of an image, or none for text, and a number of tokens."""


def tokens_of(parts: Sequence[Part]) -> list[int]:
    """Of every image 16 placeholders and an end of row for each 5; of text the given numbers."""
    tokens: list[int] = []
    for identity, n in parts:
        row = [*[IMAGE] * 5, IMAGE + 1]
        tokens += (row * 3)[:16] if identity else [n] * 5
    return tokens


def spans_of(parts: Sequence[Part]) -> list[tuple[int, int, str]]:
    """The images' spans, from the first part on."""
    spans, at = [], 0
    for identity, n in parts:
        end = at + len(tokens_of([(identity, n)]))
        if identity:
            spans.append((at, end, identity))
        at = end
    return spans


def units(parts: Sequence[Part]) -> list[tuple[str, int, int]]:
    """An oracle of what a cache may share: by token the identity, the token, its place in it."""
    found: list[tuple[str, int, int]] = []
    for identity, n in parts:
        tokens = tokens_of([(identity, n)])
        found += [(identity, token, at if identity else 0) for at, token in enumerate(tokens)]
    return found


def key_of(parts: Sequence[Part], pieces: int = 1) -> TokenKey:
    """A key of whole parts, given at once or in pieces."""
    key = TokenKey()
    size = -(-len(parts) // pieces) or 1
    for at in range(0, len(parts), size):
        some = parts[at : at + size]
        key.extend(tokens_of(some), spans_of(some))
    return key


PARTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["cat", "dog", "a\0b"]), st.just(TEXT)),
        st.tuples(st.just(""), st.integers(1, 2)),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(PARTS, st.integers(1, 3), st.integers(0, 20)), min_size=2, max_size=8))
def test_pages_are_shared_where_tokens_and_identities_are_equal(
    served: list[tuple[list[Part], int, int]],
) -> None:
    """Of keys that come whole, in pieces, cut and copied: exactly the longest common prefix."""
    before: list[list[tuple[str, int, int]]] = []
    with Cache.open(["full"], device_tokens=4096, page_size=PAGE, payload=False) as cache:
        for parts, pieces, cut in served:
            key, whole = key_of(parts, pieces), units(parts)
            if cut and len(whole) - cut > 0:
                key = copy.copy(key)
                key.truncate(len(whole) - cut)
                key.extend([7, 8, 9])
                whole = [*whole[: len(whole) - cut], *[("", each, 0) for each in (7, 8, 9)]]
            assert key.tokens().tolist() == [token for _, token, _ in whole]
            assert copy.deepcopy(key).data == key.data
            common = max([_common(whole, each) for each in before], default=0)
            request = life.serve(cache, key)
            assert request.anchor_tokens == min(common, len(whole) - 1) // PAGE * PAGE
            before.append(whole)


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    return n


def pictures(number: int) -> tuple[TokenKey, TokenKey]:
    """Two prompts of equal tokens about two pictures; the text before them is the pair's alone."""
    text, question = [number] * PAGE, [11, 12, 13, 14, 15]
    tokens = [*text, *[IMAGE] * 64, *question]
    span = PAGE, PAGE + 64
    one, other = [
        TokenKey(tokens, identities=[(*span, f"picture {number} {which}")]) for which in "ab"
    ]
    return one, other


def test_no_page_of_two_pictures_has_one_name() -> None:
    """10,000 random pairs; the names are those of stores, events and other machines."""
    for number in range(10_000):
        names: list[set[bytes]] = []
        for key in pictures(number):
            above, found = b"\0" * 32, set()
            for at in range(PAGE, key.n_tokens // PAGE * PAGE, PAGE):
                above = page_hash(above, key.data[at * 4 : (at + PAGE) * 4])
                found.add(above)
            names.append(found)
        assert not names[0] & names[1]


def test_two_pictures_share_nothing_on_device_and_host() -> None:
    sizes: dict[str, Any] = {"device_tokens": 512, "host_tokens": 4096, "page_size": PAGE}
    with Cache.open({"full": {}, "mamba": {"states": 8}}, payload=False, **sizes) as cache:
        for number in range(200):
            one, other = pictures(number)
            life.serve(cache, one)
            before = life.serve(cache, other)
            assert before.anchor_tokens <= PAGE, "the text before the picture at most"
        found = [life.serve(cache, key) for number in range(190, 200) for key in pictures(number)]
        assert all(each.anchor_tokens > PAGE + 64 for each in found), "each finds its own data"
        assert any(each.device_tokens < each.anchor_tokens for each in found), "some of it on HOST"


def test_two_pictures_share_nothing_in_a_store(tmp_path: Path) -> None:
    storage = {
        "url": f"file:{tmp_path}?capacity=64MiB",
        "model": "a model",
        "weights": "rev-1",
        "store": "write-through",
        "prefetch": "wait-complete",
        "threshold_tokens": 1,
    }
    planes = {"n_layers": 1, "n_kv_heads": 1, "head_dim": 4, "dtype": "float32"}
    sizes: dict[str, Any] = {"device_tokens": 4096, "host_tokens": 4096, "page_size": PAGE}

    def opened() -> Cache:
        return Cache.open({"full": planes}, storage=storage, **sizes)

    with opened() as cache:
        for number in range(20):
            life.serve(cache, pictures(number)[0])
        assert cache.drain()
    for which, found in ((1, False), (0, True)):
        with opened() as cache:
            for number in range(20):
                key = pictures(number)[which]
                prefetch = cache.storage.prefetch(key)
                assert cache.drain()
                request = cache.begin(key, prefetch=prefetch)
                assert (request.storage_tokens > PAGE) == found
                cache.abort(request)


def test_an_index_of_a_warm_restart_knows_pictures(tmp_path: Path) -> None:
    """Keys are the same in another process: their numbers come from the identity alone."""
    one, _ = pictures(3)
    again = pickle.loads(pickle.dumps(one))
    assert (again.data, again.tokens().tolist()) == (one.data, one.tokens().tolist())
    expected = [-776793805, -1347564332]
    assert np.frombuffer(one.data, np.int32)[PAGE : PAGE + 2].tolist() == expected


def test_a_picture_that_was_cut_stays_that_picture_and_what_follows_is_itself() -> None:
    one, other = pictures(1)
    for key in (one, other):
        key.truncate(PAGE + 5)
    assert one.data != other.data
    copied = pickle.loads(pickle.dumps(one))
    assert copied.data == one.data
    one.extend([1, 2])
    assert one.tokens().tolist() == [*[1] * PAGE, *[IMAGE] * 5, 1, 2]
    one.truncate(PAGE)
    assert one.identities is None
    assert one.data == TokenKey([1] * PAGE).data


def test_events_have_the_placeholders_and_what_stands_behind_them() -> None:
    """Also where no key is left, and where a picture is published in pieces or found in part."""
    with Cache.open(["full"], device_tokens=1024, page_size=PAGE, payload=False) as cache:
        stream = cache.events()
        stream.take()
        for which, name in enumerate(("picture 5 a", "picture 5 b")):
            request = life.admitted(cache, pictures(5)[which], chunk=24)
            life.prefill(cache, request, each=cache.checkpoint)
            cache.finish(request)
            longer = pictures(5)[which]
            longer.truncate(PAGE + 30)
            longer.extend([8] * 40)
            life.serve(cache, longer)
            del request, longer
            told = [event.pages for event in stream.take() if isinstance(event, Stored)]
            assert len(told) > 3
            for pages in told:
                first = pages.start * PAGE
                assert all(each[0] == PAGE - first and each[2] == name for each in pages.identities)
                tokens = pages.tokens.tolist()
                assert set(tokens) <= {5, IMAGE, 8, *range(11, 16)}
                for at, token in enumerate(tokens):
                    inside = any(start <= at < end for start, end, _ in pages.identities)
                    assert (token == IMAGE) == inside


def test_events_of_data_that_is_older_than_their_reader_have_no_negative_tokens() -> None:
    with Cache.open(["full"], device_tokens=1024, page_size=PAGE, payload=False) as cache:
        life.serve(cache, pictures(5)[0])
        (stored,) = [each for each in cache.events().take() if isinstance(each, Stored)]
        assert stored.pages.tokens.min() >= 0
        assert stored.pages.identities == []


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([(0, 7, "x")], "fewer than 8 tokens"),
        ([(0, 41, "x")], "not inside tokens 0 to 40"),
        ([(-1, 20, "x")], "not inside tokens 0 to 40"),
        ([(9, 9, "x")], "not inside tokens 0 to 40"),
        ([(0, 20, "x"), (19, 30, "y")], "not inside tokens 20 to 40"),
        ([(0, 20, "")], "has 0 characters"),
        ([(0, 20, "x" * 1025)], "has 1025 characters"),
        ([(0, 20, b"x")], "is a bytes"),
        ([(0, 20)], "is no span"),
        ([(0.0, 20, "x")], "is no span"),
        ([7], "is no span"),
        (7, "is no list"),
        ("x", "is no list"),
        ([(0, 20, "\ud800")], "is no Unicode text"),
    ],
)
def test_other_spans_are_refused_and_nothing_is_appended(spans: Any, said: str) -> None:
    key = TokenKey([1, 2, 3])
    with pytest.raises(ConfigError, match=said):
        key.extend([IMAGE] * 40, spans)
    assert (key.n_tokens, key.identities) == (3, None)


def test_text_is_no_placeholder() -> None:
    with pytest.raises(ConfigError, match="100 different tokens, more than 64"):
        TokenKey(range(100), identities=[(0, 100, "x")])


def test_an_identity_tells_apart_from_its_placeholders_and_from_other_placeholders() -> None:
    same = [(0, 16, "x")]
    keys = [
        TokenKey([IMAGE] * 16, identities=same),
        TokenKey([IMAGE + 1] * 16, identities=same),
        TokenKey([IMAGE] * 16),
        TokenKey([IMAGE] * 16, identities=[(0, 8, "x"), (8, 16, "x")]),
    ]
    assert len({bytes(key.data) for key in keys}) == len(keys)
    random = Random(1)
    other = [random.choice([IMAGE, IMAGE + 1]) for _ in range(16)]
    both = TokenKey(other, identities=same)
    for at, token in enumerate(other):  # a number depends on its place and its token alone
        alone = keys[token - IMAGE]
        assert both.data[4 * at : 4 * at + 4] == alone.data[4 * at : 4 * at + 4]
