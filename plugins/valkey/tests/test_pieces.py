"""Values in pieces: nothing is lost, nothing is asked for twice, runs stay short."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft.storage import Status, Value
from kvgraft.storage.payload import HEADER_NBYTES
from kvgraft_valkey.pieces import RUN_KEYS, RUN_NBYTES, pieces, runs, take, whole

SIZES = st.one_of(
    st.integers(1, 5000),
    st.sampled_from([n * RUN_NBYTES + d for n in (1, 2, 3) for d in (-257, -1, 0, 1, 256)]),
)


@given(st.lists(SIZES, max_size=600))
def test_pieces_cover_every_value_once_and_in_order(sizes: list[int]) -> None:
    found: dict[int, int] = {}
    for piece in pieces(sizes):
        assert piece.start == found.get(piece.number, 0) < piece.stop
        assert piece.start > 0 or piece.stop > HEADER_NBYTES, "the header is in one piece"
        found[piece.number] = piece.stop
        assert piece.last == (piece.stop == HEADER_NBYTES + sizes[piece.number])
    assert found == {number: HEADER_NBYTES + size for number, size in enumerate(sizes)}


@given(st.lists(SIZES, max_size=600), st.sampled_from([pieces, whole]))
def test_runs_keep_the_order_and_are_no_longer_than_they_must_be(
    sizes: list[int], cut: object
) -> None:
    assert callable(cut)
    found = list(runs(cut(sizes)))
    assert list(itertools.chain.from_iterable(found)) == list(cut(sizes))
    for run in found:
        nbytes = sum(piece.stop - max(piece.start, HEADER_NBYTES) for piece in run)
        assert 0 < len(run) <= RUN_KEYS
        assert nbytes <= RUN_NBYTES or len(run) == 1


@given(SIZES)
def test_what_is_taken_piece_by_piece_is_the_value(size: int) -> None:
    stored = bytes(number % 251 for number in range(1009)) * (size // 1009 + 2)
    stored = stored[: HEADER_NBYTES + size]
    value = Value(memoryview(bytearray(HEADER_NBYTES)), memoryview(bytearray(size)))
    told = []
    for piece in pieces([size]):
        first, last = piece.asked
        told.append(take(piece, stored[first : last + 1], value))
    assert told == [None] * (len(told) - 1) + [Status.OK]
    assert b"".join(value) == stored


@pytest.mark.parametrize(
    ("found", "status"),
    [(b"", Status.MISS), (bytes(255), Status.CORRUPT), (bytes(1257), Status.TOO_LARGE)],
)
def test_another_length_is_told(found: bytes, status: Status) -> None:
    (piece,) = pieces([1000])
    value = Value(memoryview(bytearray(HEADER_NBYTES)), memoryview(bytearray(1000)))
    assert take(piece, found, value) is status
