"""Objects in a bucket: damaged, foreign, of others, and many."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvgraft import ConfigError
from kvgraft_s3.location import path_of
from kvgraft_storage import Address, Status, Storage, StorageBackend, open_storage
from kvgraft_testing.storage.traffic import FINGERPRINT, addresses, fetched, record, settled, stored
from tests.commands import storage_command

from .moto_server import MotoServer

OK, MISS = Status.OK, Status.MISS
SIZE = 9000
STIRRING = [sys.executable, "-m", "kvgraft_testing.storage.stirring"]


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"tests/{request.node.name.partition('[')[0]}"


@pytest.fixture
def store(moto: MotoServer, prefix: str) -> Iterator[StorageBackend]:
    opened = open_storage(moto.url(prefix))
    yield opened
    opened.close()


def plant(moto: MotoServer, prefix: str, address: Address, content: bytes) -> None:
    moto.request("PUT", f"{prefix}/{path_of(address.key)}", content)


def test_a_value_is_one_object_named_by_its_key_in_hex(
    moto: MotoServer, prefix: str, store: StorageBackend
) -> None:
    (place,) = addresses(1)
    storage = Storage(FINGERPRINT, store)
    stored(storage, [place], SIZE)
    name = place.key.hex()
    path = f"{prefix}/{name[:2]}/{name[2:4]}/{name}"
    assert moto.request("GET", path) == record(place, SIZE)
    assert storage.close()


def test_kinds_of_damage_are_told_apart_found_by_verify_and_removed(
    moto: MotoServer, prefix: str, store: StorageBackend
) -> None:
    places = addresses(7)
    right = [record(each, SIZE) for each in places]
    flipped = right[4][:5000] + bytes([right[4][5000] ^ 1]) + right[4][5001:]
    planted = [right[0], right[1] + b"x", right[2][:-1], right[3][:100], flipped, right[6], b""]
    for place, content in zip(places, planted):
        plant(moto, prefix, place, content)
    report = store.verify()
    assert (report.n_records, report.nbytes) == (7, sum(map(len, planted)))
    assert {each.key for each in report.damaged} == {each.key.hex() for each in places[1:]}
    assert all(each.where.startswith(f"s3:pages/{prefix}/") for each in report.damaged)
    assert store.stats().n_records == 7, "verify changes nothing"
    storage = Storage(FINGERPRINT, store)
    corrupt, stale, large = Status.CORRUPT, Status.STALE, Status.TOO_LARGE
    wanted = [OK, large, corrupt, corrupt, corrupt, stale, corrupt]
    assert fetched(storage, places, SIZE) == wanted
    assert fetched(storage, places, SIZE) == [OK] + [MISS] * 6
    assert stored(storage, places, SIZE) == [OK] * 7
    assert store.verify().damaged == ()
    assert storage.close()


def test_objects_of_others_are_left_alone(
    moto: MotoServer, prefix: str, store: StorageBackend
) -> None:
    (place,) = addresses(1)
    name = place.key.hex()
    theirs = [
        f"{prefix}/notes.txt",
        f"{prefix}/{name}",
        f"{prefix}/00/00/{name}",
        f"{prefix}/{name[:2]}/{name[2:4]}/{name.upper()}",
        f"{prefix}/below/{path_of(place.key)}",
        f"{prefix}-beside/{path_of(place.key)}",
    ]
    for path in theirs:
        moto.request("PUT", path, b"theirs")
    storage = Storage(FINGERPRINT, store)
    stored(storage, addresses(3), SIZE)
    found = store.stats()
    assert (found.n_records, found.nbytes) == (3, 3 * (256 + SIZE))
    assert dict(found.details) == {"foreign_objects": 5}
    assert store.verify().damaged == ()
    store.clear()
    assert store.stats().n_records == 0
    assert [moto.request("GET", path) for path in theirs] == [b"theirs"] * 6
    assert storage.close()


def test_a_store_at_the_root_of_a_bucket_leaves_its_neighbours_alone(moto: MotoServer) -> None:
    (place,) = addresses(1)
    moto.request("PUT", f"neighbour/{path_of(place.key)}", b"theirs")
    storage = Storage(FINGERPRINT, open_storage(moto.url("")))
    assert stored(storage, addresses(2), SIZE) == [OK] * 2
    assert settled(storage.ask("clear", lambda store: store.clear())) == []
    assert fetched(storage, addresses(2), SIZE) == [MISS] * 2
    assert moto.request("GET", f"neighbour/{path_of(place.key)}") == b"theirs"
    assert storage.close()


def test_another_processs_records_are_read_whole_or_missed(moto: MotoServer, prefix: str) -> None:
    url = moto.url(prefix)
    writers = [subprocess.Popen([*STIRRING, url, str(SIZE)]) for _ in range(2)]
    storage = Storage(FINGERPRINT, open_storage(url))
    places = addresses(8)
    while any(writer.poll() is None for writer in writers):
        assert set(fetched(storage, places, SIZE)) <= {OK, MISS}
    assert [writer.returncode for writer in writers] == [0, 0]
    assert fetched(storage, places, SIZE) == [OK] * 8
    assert storage.close()


@pytest.mark.long
def test_a_listing_of_several_requests_is_counted_and_cleared(
    moto: MotoServer, prefix: str, store: StorageBackend
) -> None:
    keys = [number.to_bytes(2, "big") * 16 for number in range(2100)]
    with ThreadPoolExecutor(8) as threads:
        list(
            threads.map(
                lambda key: moto.request("PUT", f"{prefix}/{path_of(key)}", bytes(10)), keys
            )
        )
    assert store.stats().n_records == 2100
    assert len(store.verify().damaged) == 2100
    store.clear()
    assert store.stats().n_records == 0


def test_a_store_that_was_closed_says_so(moto: MotoServer, prefix: str) -> None:
    store = open_storage(moto.url(prefix))
    store.close()
    store.close()
    assert not store.healthy()
    with pytest.raises(ConfigError, match="was closed; open it again"):
        store.exists([bytes(32)])


def test_the_command_shows_verifies_and_clears(moto: MotoServer, prefix: str) -> None:
    url = moto.url(prefix)
    places = addresses(3)
    for place in places:
        plant(moto, prefix, place, record(place, SIZE))
    status, told = storage_command("stats", "--json", url)
    assert (status, json.loads(told)["records"]) == (0, 3)
    assert storage_command("verify", url)[0] == 0
    plant(moto, prefix, places[0], record(places[1], SIZE))
    status, told = storage_command("verify", url)
    assert (status, "is stored under another key" in told) == (1, True)
    nbytes = 3 * (256 + SIZE)
    assert storage_command("clear", "--yes", url) == (0, f"removed 3 records, {nbytes:,} bytes\n")
    assert json.loads(storage_command("stats", "--json", url)[1])["records"] == 0
