"""Values in a store: damaged, foreign, of others; and options of a URL."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from click.testing import CliRunner

from kvgraft import ConfigError
from kvgraft_mooncake import MooncakeBackend
from kvgraft_storage import Status, Storage, SupervisionLimits, Value, open_storage
from kvgraft_storage.command import storage as storage_command
from kvgraft_testing.storage.traffic import (
    FINGERPRINT,
    addresses,
    fetched,
    payload,
    record,
    room,
    settled,
    stored,
)

OK, MISS = Status.OK, Status.MISS
SIZE = 9000
STIRRING = [sys.executable, "-m", "kvgraft_testing.storage.stirring"]


@pytest.fixture(scope="module")
def raw() -> Iterator[Any]:
    """Mooncake's own client."""
    client = import_module("mooncake.store").MooncakeDistributedStore()
    code = client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "127.0.0.1:50051")
    assert code == 0
    yield client
    client.close()


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return f"mooncake:127.0.0.1:50051/{request.node.name.partition('[')[0]}"


@pytest.fixture
def store(url: str) -> Iterator[MooncakeBackend]:
    opened = open_storage(url)
    assert isinstance(opened, MooncakeBackend)
    yield opened
    opened.close()


def test_a_value_is_header_and_payload_under_its_key_in_hex(
    store: MooncakeBackend, raw: Any
) -> None:
    (place,) = addresses(1)
    storage = Storage(FINGERPRINT, store)
    assert stored(storage, [place], SIZE) == [OK]
    assert raw.get(f"{store.location.namespace}/{place.key.hex()}") == record(place, SIZE)
    assert storage.close()


def test_registered_memory_is_stored_without_a_copy_in_one_part_or_more(
    store: MooncakeBackend,
) -> None:
    places = addresses(2)
    pool = bytearray(2 * SIZE)  # no mapping: any other memory of this kind is copied
    for number, place in enumerate(places):
        pool[number * SIZE : (number + 1) * SIZE] = payload(place, SIZE)
    rows = [memoryview(pool)[n * SIZE : (n + 1) * SIZE] for n in range(2)]
    sent: list[bool] = []
    send = store.set_from

    def recording(keys: Any, values: Any, deadline_s: float) -> Any:
        sent.extend(all(part.obj is pool for part in each.parts) for each in values)
        return send(keys, values, deadline_s)

    store.set_from = recording  # type: ignore[method-assign]
    storage = Storage(FINGERPRINT, store)
    registered = storage.register(pool)
    assert settled(registered) == []
    assert registered.value is True, registered.error
    parts = [rows[0], (rows[1][:100], rows[1][100:])]
    assert settled(storage.set(places, parts)) == [OK, OK]
    assert sent == [True, True]
    assert fetched(storage, places, SIZE) == [OK, OK]
    gone = storage.unregister(pool)
    assert settled(gone) == []
    assert gone.value is True, gone.error
    assert settled(storage.remove(places)) == [OK, OK]
    assert settled(storage.set(places, parts)) == [OK, OK]
    assert sent == [True, True, False, False]
    assert fetched(storage, places, SIZE) == [OK, OK]
    assert storage.close()


def test_kinds_of_damage_are_told_apart_found_by_verify_and_replaced(
    store: MooncakeBackend, raw: Any
) -> None:
    places = addresses(6)
    right = [record(each, SIZE) for each in places]
    flipped = right[4][:5000] + bytes([right[4][5000] ^ 1]) + right[4][5001:]
    planted = [right[0], right[1] + b"x", right[2][:-1], right[3][:100], flipped, right[0]]
    for place, content in zip(places, planted):
        assert raw.put(store.location.name_of(place.key), content) == 0
    report = store.verify()
    assert (report.n_records, report.nbytes) == (6, sum(map(len, planted)))
    assert {each.key for each in report.damaged} == {each.key.hex() for each in places[1:]}
    storage = Storage(FINGERPRINT, store)
    corrupt, stale, large = Status.CORRUPT, Status.STALE, Status.TOO_LARGE
    assert fetched(storage, places, SIZE) == [OK, large, corrupt, corrupt, corrupt, stale]
    assert fetched(storage, places, SIZE) == [OK] + [MISS] * 5
    assert stored(storage, places, SIZE) == [OK] * 6
    assert store.verify().damaged == ()
    assert storage.close()


def test_a_key_that_is_there_is_kept_and_stored_anew_once_removed(store: MooncakeBackend) -> None:
    key, old, new = bytes(32), bytes(SIZE), b"\1" * SIZE
    header, found = memoryview(bytes(256)), room(SIZE)
    for content, expected in ((old, old), (new, old)):
        assert list(store.set_from([key], [Value(header, memoryview(content))], 5)) == [OK]
        assert list(store.get_into([key], [found], 5)) == [OK]
        assert found.payload == expected
    assert list(store.remove([key])) == [OK]
    assert list(store.set_from([key], [Value(header, memoryview(new))], 5)) == [OK]
    assert list(store.get_into([key], [found], 5)) == [OK]
    assert found.payload == new


def test_values_of_others_are_left_alone(store: MooncakeBackend, raw: Any) -> None:
    (place,) = addresses(1)
    own, name = store.location.namespace, place.key.hex()
    theirs = [f"{own}/notes", f"{own}x/{name}", f"{own}/below/{name}", f"x{own}/{name}"]
    theirs += [f"{own}/{name}0", f"{own}/{name.upper()}", name]
    for each in theirs:
        assert raw.put(each, b"theirs") == 0
    storage = Storage(FINGERPRINT, store)
    stored(storage, addresses(3), SIZE)
    found = store.stats()
    assert (found.n_records, found.nbytes) == (3, 3 * (256 + SIZE))
    assert found.details["foreign_values"] >= len(theirs)
    assert store.verify().damaged == ()
    store.clear()
    assert store.stats().n_records == 0
    assert [raw.get(each) for each in theirs] == [b"theirs"] * len(theirs)
    assert raw.remove_by_regex(".*", True) >= len(theirs)
    assert storage.close()


def test_memory_of_a_supervised_store_is_registered_once(store: MooncakeBackend) -> None:
    storage = Storage(FINGERPRINT, store, SupervisionLimits(n_workers=2))
    for first in range(0, 40, 4):
        places = addresses(4, first=first)
        assert stored(storage, places, SIZE) == [OK] * 4
        assert fetched(storage, places, SIZE) == [OK] * 4
    assert 1 <= store.stats().details["regions"] <= 2
    assert storage.close()


def test_other_processes_records_are_read_whole_or_not_at_all(url: str) -> None:
    writers = [
        subprocess.Popen([*STIRRING, url, str(SIZE)], stderr=subprocess.DEVNULL) for _ in range(2)
    ]
    storage = Storage(FINGERPRINT, open_storage(url))
    places = addresses(8)
    while any(writer.poll() is None for writer in writers):
        told = fetched(storage, places, SIZE)
        assert set(told) <= {OK, MISS, Status.STALE, Status.CORRUPT}, "removed while it was read"
    assert [writer.returncode for writer in writers] == [0, 0]
    assert stored(storage, places, SIZE) == [OK] * 8
    assert fetched(storage, places, SIZE) == [OK] * 8
    assert storage.close()


def test_a_store_that_was_closed_says_so_and_does_not_end_the_process(url: str) -> None:
    store = open_storage(url)
    store.close()
    store.close()
    assert not store.healthy()
    for call in (
        lambda: store.exists([bytes(32)]),
        lambda: store.get_into([bytes(32)], [room(SIZE)], 5),
        lambda: store.remove([bytes(32)]),
        store.clear,
        store.flush,
        store.stats,
        store.verify,
    ):
        with pytest.raises(ConfigError, match="was closed; open it again"):
            call()


def command(*arguments: str) -> tuple[int, str]:
    """Exit status and output of `kvgraft storage`."""
    done = CliRunner().invoke(storage_command, list(arguments), env={"COLUMNS": "250"})
    return done.exit_code, done.output


def test_the_command_shows_verifies_and_clears(url: str, raw: Any) -> None:
    places = addresses(3)
    namespace = url.rpartition("/")[2]
    for place in places[:2]:
        assert raw.put(f"{namespace}/{place.key.hex()}", record(place, SIZE)) == 0
    status, told = command("stats", "--json", url)
    assert (status, json.loads(told)["records"]) == (0, 2)
    assert command("verify", url)[0] == 0
    assert raw.put(f"{namespace}/{places[2].key.hex()}", record(places[0], SIZE)) == 0
    status, told = command("verify", url)
    assert (status, "is stored under another key" in told) == (1, True)
    status, told = command("clear", "--yes", url)
    assert (status, told.startswith("removed 3 records, ")) == (0, True)
    assert json.loads(command("stats", "--json", url)[1])["records"] == 0


def test_without_the_masters_http_service_only_counting_fails(url: str) -> None:
    store = open_storage(f"{url}?admin=http://127.0.0.1:1")
    storage = Storage(FINGERPRINT, store)
    assert stored(storage, addresses(1), SIZE) == [OK]
    assert fetched(storage, addresses(1), SIZE) == [OK]
    with pytest.raises(OSError, match=r"^http://127.0.0.1:1/get_all_keys: .*; start the master"):
        store.stats()
    assert storage.close()
