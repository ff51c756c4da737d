"""Several stores and processes on one server: together under one prefix, apart under two."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvgraft_storage import Status, open_storage
from kvgraft_testing.storage.traffic import (
    addresses,
    fetched,
    opened,
    payload,
    settled,
    stored,
    supervised,
    until,
)
from kvgraft_valkey.connection import unseen
from kvgraft_valkey.records import Names

from . import shared
from .servers import needs_server

pytestmark = needs_server

OK, MISS = Status.OK, Status.MISS
SIZE = 3000

BASES = {"single": lambda: shared.single().url + "?", "cluster": lambda: shared.cluster().url + "&"}


@pytest.mark.parametrize("base", BASES)
def test_two_clients_see_each_others_writes_and_removals(base: str) -> None:
    url = f"{BASES[base]()}prefix=both:"
    places = addresses(20)
    with supervised(url) as one, supervised(url) as other:
        assert stored(one, places, SIZE) == [OK] * 20
        assert fetched(other, places, SIZE) == [OK] * 20
        assert settled(other.remove(places[:7])) == [OK] * 7
        assert fetched(one, places, SIZE) == [MISS] * 7 + [OK] * 13
        assert settled(one.exists(places)) == [MISS] * 7 + [OK] * 13


@pytest.mark.parametrize("base", BASES)
def test_prefixes_keep_stores_apart_and_clear_removes_one(base: str) -> None:
    places = addresses(12)
    prefixes = ["apart:", "apart:x", "apart", "apar"]
    urls = [f"{BASES[base]()}prefix={prefix}" for prefix in prefixes]
    with opened(urls[0]), opened(urls[1]), opened(urls[2]), opened(urls[3]):
        pass
    stores = [open_storage(url) for url in urls]
    try:
        with supervised(urls[0]) as storage:
            stored(storage, places, SIZE)
        with supervised(urls[1]) as storage:
            stored(storage, places[:5], SIZE)
        assert [store.stats().n_records for store in stores] == [12, 5, 0, 0]
        stores[2].clear()
        assert [store.stats().n_records for store in stores] == [12, 5, 0, 0]
        stores[0].clear()
        assert [store.stats().n_records for store in stores] == [0, 5, 0, 0]
        assert [store.verify().n_records for store in stores] == [0, 5, 0, 0]
    finally:
        for store in stores:
            store.close()


def test_keys_of_others_are_neither_counted_nor_removed() -> None:
    server = shared.single()
    stems = [b"ours:{%b}" % (b"0" * n) for n in (62, 63, 64, 65, 66)]
    theirs = [b"ours", b"ours:", b"ours:" + bytes(32), b"ours:{" + b"x" * 64 + b"}:payload"]
    theirs += [stem + b":other" for stem in stems] + [b"o" + stem + b":payload" for stem in stems]
    theirs += [stem + b":header" for stem in stems if len(stem) != 71]
    for each in theirs:
        server.ask("SET", each, b"theirs")
    with opened(f"{server.url}?prefix=ours:") as store:
        assert store.stats().n_records == 0
        assert store.verify().damaged == ()
        store.clear()
    assert server.ask("EXISTS", *theirs) == len(theirs)
    server.ask("DEL", *theirs)


@pytest.mark.parametrize("part", Names._fields)
def test_a_value_that_servers_half_evicted_is_a_miss_until_it_is_stored_again(part: str) -> None:
    places = addresses(3)
    server = shared.single()
    with supervised(f"{server.url}?prefix=half:") as storage:
        assert stored(storage, places, SIZE) == [OK] * 3
        names = Names.of(b"half:", places[1].key)
        server.ask("DEL", getattr(names, part))
        assert settled(storage.exists(places)) == [OK, MISS, OK]
        assert fetched(storage, places, SIZE) == [OK, MISS, OK]
        found = storage.ask("both", lambda store: (store.stats().n_records, store.verify()))
        assert found.wait(20)
        answer: Any = found.value
        n_records, report = answer
        assert (n_records, report.n_records, report.damaged) == (2, 2, ())
        ticket = storage.set(places, [payload(each, SIZE) for each in places], only_missing=True)
        assert settled(ticket) == [OK] * 3
        assert fetched(storage, places, SIZE) == [OK] * 3
        server.ask("DEL", getattr(names, part))
        assert storage.ask("clear", lambda store: store.clear()).wait(20)
    assert server.ask("EXISTS", *names) == 0


@pytest.mark.parametrize("base", BASES)
def test_more_keys_than_a_page_of_a_scan_are_all_found(base: str) -> None:
    places = addresses(3000)
    with supervised(f"{BASES[base]()}prefix=many:") as storage:
        assert set(stored(storage, places, 20)) == {OK}
        with opened(f"{BASES[base]()}prefix=few:"):
            ticket = storage.ask("stats", lambda store: store.stats().n_records)
            assert ticket.wait(20)
        assert ticket.value == 3000
        assert storage.ask("clear", lambda store: store.clear()).wait(20)
        assert set(fetched(storage, places, 20)) == {MISS}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("base", BASES)
def test_clients_that_store_remove_and_read_the_same_keys_never_read_wrong_bytes(base: str) -> None:
    url = f"{BASES[base]()}prefix=busy:"
    places = addresses(10)
    seen = [set[Status | None]() for _ in range(3)]
    faults: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with supervised(url) as storage:
                for turn in range(15):
                    first = (turn + number) % 5
                    stored(storage, places[first : first + 5], 1_200_000)
                    seen[number].update(fetched(storage, places, 1_200_000))
                    settled(storage.remove(places[first : first + 2]))
        except BaseException as fault:  # noqa: BLE001 - told below
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert set().union(*seen) <= {OK, MISS}


def test_verify_beside_others_that_remove_and_store_finds_nothing() -> None:
    url = f"{shared.single().url}?prefix=stirred:"
    places = addresses(12)
    stop = threading.Event()

    def stir() -> None:
        with supervised(url) as storage:
            while not stop.is_set():
                stored(storage, places, 1_500_000)
                settled(storage.remove(places[::2]))

    thread = threading.Thread(target=stir)
    store = open_storage(url)
    thread.start()
    try:
        until(lambda: store.stats().n_records)
        damaged = [each for _ in range(25) for each in store.verify().damaged]
    finally:
        stop.set()
        thread.join()
        store.close()
    assert damaged == []


def test_a_name_that_a_scan_repeats_is_taken_once() -> None:
    seen: set[bytes] = set()
    pages = [[b"a", b"b", b"a"], [], [b"b", b"c"], [b"a"]]
    assert [unseen(page, seen) for page in pages] == [[b"a", b"b"], [], [b"c"], []]
