"""Names, batches and lengths of values on a server."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft_storage import Status, Value
from kvgraft_storage.payload import HEADER_NBYTES
from kvgraft_valkey.records import RUN_KEYS, RUN_NBYTES, Names, placed, runs, verdict

KEYS = st.binary(min_size=32, max_size=32)
PREFIX = b"a{b}:"


@given(st.lists(st.integers(1, RUN_NBYTES + 10) | st.integers(0, 9), max_size=600))
def test_runs_keep_the_order_and_are_no_longer_than_they_must_be(sizes: list[int]) -> None:
    found = list(runs(sizes))
    assert list(itertools.chain.from_iterable(found)) == list(range(len(sizes)))
    for run in found:
        assert 0 < len(run) <= RUN_KEYS
        assert sum(sizes[number] for number in run) <= RUN_NBYTES or len(run) == 1
    for run, following in itertools.pairwise(found):
        nbytes = sum(sizes[number] for number in run) + sizes[following[0]]
        assert len(run) == RUN_KEYS or nbytes > RUN_NBYTES, "they would have gone together"


@given(KEYS, KEYS)
def test_names_tell_the_key_and_the_part(key: bytes, other: bytes) -> None:
    names = Names.of(PREFIX, key)
    assert [Names.key_of(PREFIX, name) for name in names] == [key, key]
    assert [Names.is_payload(name) for name in names] == [False, True]
    assert (names == Names.of(PREFIX, other)) == (key == other)
    assert b"{" + key.hex().encode() + b"}" in names.payload, "one slot for both"


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b"k:",
        b"k:{" + b"0" * 64 + b"}:other",
        b"k:{" + b"g" * 64 + b"}:payload",
        b"k:{" + b"A" * 64 + b"}:payload",
        b"k:{" + b"0" * 62 + b"}:payload",
        b"k:{" + b" 0" * 32 + b"}:header",
        b"k:{" + b"0" * 64 + b"}:payload:header",
        b"k:\xff" + b"0" * 64 + b"}:payload",
    ],
)
def test_names_of_others_are_not_taken_for_ours(name: bytes) -> None:
    assert Names.key_of(b"k:", name) is None


def memory(nbytes: int) -> Value:
    return Value(memoryview(bytearray(HEADER_NBYTES)), memoryview(bytearray(nbytes)))


@pytest.mark.parametrize(
    ("header", "payload", "status"),
    [
        (256, 1000, Status.OK),
        (None, None, Status.MISS),
        (None, 1000, Status.MISS),
        (0, 1000, Status.MISS),
        (256, 0, Status.MISS),
        (256, None, Status.MISS),
        (255, 1000, Status.CORRUPT),
        (257, 1000, Status.CORRUPT),
        (256, 999, Status.CORRUPT),
        (256, 1001, Status.TOO_LARGE),
    ],
)
def test_lengths_are_reported(header: int | None, payload: int | None, status: Status) -> None:
    assert verdict(memory(1000), header, payload) is status
    value = memory(1000)
    found = [b"h" * (header or 0), b"p" * (payload or 0)]
    assert placed(value, *found) is status
    assert list(map(bytes, value)) == (found if status is Status.OK else [bytes(256), bytes(1000)])
