"""Wrong bytes under our keys are never handed out, and verify finds them all."""

from __future__ import annotations

import json
import random

import pytest

from kvgraft_storage import Address, Status, Storage, Value
from kvgraft_storage.payload import HEADER_NBYTES
from kvgraft_testing.storage.traffic import (
    addresses,
    fetched,
    opened,
    payload,
    settled,
    stored,
    supervised,
)
from kvgraft_valkey.records import RUN_NBYTES, Names
from tests.commands import storage_command

from . import shared
from .servers import needs_server

pytestmark = needs_server

OK, MISS, CORRUPT = Status.OK, Status.MISS, Status.CORRUPT
PREFIX = "damage:"
SIZE = 5000
LONG = RUN_NBYTES + 5000
"""A run of its own, so it is read straight into its memory."""


def url() -> str:
    return f"{shared.single().url}?prefix={PREFIX}"


def name(place: Address, part: str = "payload") -> bytes:
    names = Names.of(PREFIX.encode(), place.key)
    return names.header if part == "header" else names.payload


def value(place: Address, part: str = "payload") -> bytes:
    found = shared.single().ask("GET", name(place, part))
    assert isinstance(found, bytes)
    return found


def plant(place: Address, content: bytes, part: str = "payload") -> None:
    shared.single().ask("SET", name(place, part), content)


def n_damaged(storage: Storage) -> int:
    ticket = storage.ask("verify", lambda store: len(store.verify().damaged))
    assert ticket.wait(20)
    assert isinstance(ticket.value, int)
    return ticket.value


@pytest.mark.parametrize("size", [SIZE, LONG])
def test_header_and_payload_are_strings_under_readable_names(size: int) -> None:
    (place,) = addresses(1)
    with supervised(url()) as storage:
        stored(storage, [place], size)
        assert name(place) == f"damage:{{{place.key.hex()}}}:payload".encode()
        assert value(place) == payload(place, size)
        assert len(value(place, "header")) == HEADER_NBYTES


@pytest.mark.parametrize(
    ("part", "cut", "status"),
    [
        ("payload", lambda whole: whole[:-1], CORRUPT),
        ("payload", lambda whole: whole[:1], CORRUPT),
        ("payload", lambda whole: whole + b"\0", Status.TOO_LARGE),
        ("payload", lambda whole: whole + whole[:5000], Status.TOO_LARGE),
        ("payload", lambda whole: bytes(len(whole)), CORRUPT),
        ("payload", lambda whole: whole[::-1], CORRUPT),
        ("payload", lambda whole: b"a stranger's value", CORRUPT),
        ("header", lambda whole: whole[:7], CORRUPT),
        ("header", lambda whole: whole + b"\0", CORRUPT),
        ("header", lambda whole: bytes(len(whole)), CORRUPT),
        ("header", lambda whole: whole * 5, CORRUPT),
    ],
)
@pytest.mark.parametrize("size", [SIZE, LONG])
def test_a_value_that_was_cut_lengthened_or_replaced_is_found_out_and_removed(
    part: str, cut: object, status: Status, size: int
) -> None:
    assert callable(cut)
    places = addresses(3)
    with supervised(url()) as storage:
        assert stored(storage, places, size) == [OK] * 3
        plant(places[1], cut(value(places[1], part)), part)
        assert n_damaged(storage) == 1
        assert fetched(storage, places, size) == [OK, status, OK]
        assert shared.single().ask("EXISTS", *Names.of(PREFIX.encode(), places[1].key)) == 0
        assert fetched(storage, places, size) == [OK, MISS, OK]
        assert stored(storage, [places[1]], size) == [OK]
        assert n_damaged(storage) == 0


@pytest.mark.parametrize("size", [SIZE, LONG])
def test_less_time_than_the_client_waits_is_time_enough(size: int) -> None:
    places = addresses(3)
    with supervised(f"{url()}&timeout_s=30") as storage:
        assert stored(storage, places, size) == [OK] * 3
        plant(places[1], value(places[1])[:-1])
        assert fetched(storage, places, size) == [OK, CORRUPT, OK]


def test_every_flipped_bit_is_found() -> None:
    (place,) = addresses(1)
    chance = random.Random(11)
    with supervised(url()) as storage:
        stored(storage, [place], SIZE)
        parts = {"header": value(place, "header"), "payload": value(place)}
        flips = [("header", bit) for bit in range(0, 8 * HEADER_NBYTES, 31)]
        flips += [("payload", bit) for bit in chance.sample(range(8 * SIZE), 60)]
        for part, bit in flips:
            flipped = bytearray(parts[part])
            flipped[bit // 8] ^= 1 << bit % 8
            for each, whole in parts.items():
                plant(place, bytes(flipped) if each == part else whole, each)
            if bit % 5 == 0:
                assert n_damaged(storage) == 1, f"bit {bit} of the {part}"
            (told,) = fetched(storage, [place], SIZE)
            assert told in (CORRUPT, Status.STALE), f"bit {bit} of the {part} is {told}"
        for part, whole in parts.items():
            plant(place, whole, part)
        assert fetched(storage, [place], SIZE) == [OK]


def test_another_keys_value_is_stale() -> None:
    here, there = addresses(2)
    with supervised(url()) as storage:
        stored(storage, [here, there], SIZE)
        for part in Names._fields:
            plant(here, value(there, part), part)
        assert n_damaged(storage) == 1
        assert fetched(storage, [here, there], SIZE) == [Status.STALE, OK]


@pytest.mark.parametrize("part", Names._fields)
def test_a_key_of_another_type_is_corrupt_and_is_replaced(part: str) -> None:
    places = addresses(3)
    with supervised(url()) as storage:
        stored(storage, places, SIZE)
        shared.single().ask("DEL", name(places[0], part))
        shared.single().ask("RPUSH", name(places[0], part), "a", "b")
        ticket = storage.ask("stats", lambda store: store.stats().n_records)
        assert ticket.wait(20)
        assert ticket.value == 2
        assert n_damaged(storage) == 1
        assert fetched(storage, places, SIZE) == [CORRUPT, OK, OK]
        shared.single().ask("RPUSH", name(places[0], part), "a", "b")
        assert stored(storage, places, SIZE) == [OK] * 3
        assert fetched(storage, places, SIZE) == [OK] * 3


@pytest.mark.parametrize("part", Names._fields)
def test_a_key_of_another_type_in_a_long_values_place_is_a_miss_and_stored_again(part: str) -> None:
    (place,) = addresses(1)
    with supervised(url()) as storage:
        stored(storage, [place], LONG)
        shared.single().ask("DEL", name(place, part))
        shared.single().ask("RPUSH", name(place, part), "a", "b")
        assert fetched(storage, [place], LONG) == [MISS]
        ticket = storage.set([place], [payload(place, LONG)], only_missing=True)
        assert settled(ticket) == [OK]
        assert fetched(storage, [place], LONG) == [OK]


def test_an_empty_value_counts_as_missing() -> None:
    (place,) = addresses(1)
    with supervised(url()) as storage:
        plant(place, b"")
        plant(place, bytes(HEADER_NBYTES), "header")
        assert n_damaged(storage) == 0
        assert fetched(storage, [place], SIZE) == [MISS]
        assert stored(storage, [place], SIZE) == [OK]
        assert fetched(storage, [place], SIZE) == [OK]


def test_a_server_that_does_not_let_verify_look_is_no_damage() -> None:
    with supervised(url()) as storage:
        stored(storage, addresses(2), SIZE)
        shared.single().ask("ACL", "SETUSER", "default", "-strlen")
        try:
            ticket = storage.ask("verify", lambda store: store.verify())
            assert ticket.wait(20)
        finally:
            shared.single().ask("ACL", "SETUSER", "default", "+strlen")
        assert ticket.value is None
        assert "no permissions to run the 'strlen' command" in str(ticket.error).lower()


def test_a_buffer_of_another_length_is_filled_with_nothing_beyond_it() -> None:
    (place,) = addresses(1)
    with opened(url()) as store:
        whole = [Value(memoryview(bytes(HEADER_NBYTES)), memoryview(bytes(SIZE)))]
        store.set_from([place.key], whole, 5.0)
        guarded = bytearray(b"\xa5" * 100)
        into = Value(memoryview(bytearray(HEADER_NBYTES)), memoryview(guarded)[40:60])
        assert list(store.get_into([place.key], [into], 5.0)) == [Status.TOO_LARGE]
        assert guarded[:40] + guarded[60:] == b"\xa5" * 80


def test_verify_changes_nothing() -> None:
    places = addresses(4)
    with supervised(url()) as storage:
        stored(storage, places, SIZE)
        plant(places[0], b"damaged")
        before = [value(place) for place in places]
        assert n_damaged(storage) == n_damaged(storage) == 1
        assert [value(place) for place in places] == before


def test_the_command_shows_verifies_and_clears() -> None:
    places = addresses(3)
    with supervised(url()) as storage:
        stored(storage, places, SIZE)
        told = json.loads(storage_command("stats", "--json", url())[1])
        assert (told["records"], told["capacity"]) == (3, None)
        assert told["bytes"] >= 3 * (SIZE + HEADER_NBYTES)
        assert storage_command("stats", url())[0] == 0
        assert "nothing damaged" in storage_command("verify", url())[1]
        plant(places[0], value(places[0])[:-1])
        status, shown = storage_command("verify", url())
        assert (status, f"its header says {SIZE}" in shown) == (1, True)
        (found,) = json.loads(storage_command("verify", "--json", url())[1])["damaged"]
        assert found["key"] == places[0].key.hex()
        assert storage_command("clear", url())[0] != 0, "nobody said yes"
        assert fetched(storage, places[1:], SIZE) == [OK, OK]
        assert "removed 3 records" in storage_command("clear", "--yes", url())[1]
        assert fetched(storage, places, SIZE) == [MISS] * 3
