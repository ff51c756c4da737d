"""A store that is full: apart from the other checks, because it evicts data they rely on."""

from __future__ import annotations

from kvgraft_storage import Status, Storage, SupervisionLimits, open_storage
from kvgraft_testing.storage import STORAGE_CLAUSES
from kvgraft_testing.storage.checking import check_clause
from kvgraft_testing.storage.subject import StorageSubject, opener_of
from kvgraft_testing.storage.traffic import (
    FINGERPRINT,
    addresses,
    fetched,
    payload,
    settled,
    stored,
)

SEGMENT = "32MiB"
OK, MISS = Status.OK, Status.MISS
SIZE = 9000


def test_the_clause_about_capacity_holds_when_the_store_is_small() -> None:
    opener = opener_of("mooncake:127.0.0.1/capacity{directory}")
    result = check_clause(StorageSubject("full", opener, 10.0), STORAGE_CLAUSES["S10-capacity"])
    assert not result.bad, result.evidence


def test_a_value_that_fits_nowhere_is_full_and_its_neighbour_is_stored() -> None:
    small, large = addresses(2)
    limits = SupervisionLimits(batch_nbytes=128 << 20)
    storage = Storage(FINGERPRINT, open_storage("mooncake:127.0.0.1/full"), limits)
    told = settled(storage.set([large, small], [bytes(64 << 20), payload(small, SIZE)]))
    assert told == [Status.FULL, OK]
    assert fetched(storage, [small], SIZE)[0] in (OK, MISS), "it may have had to make room"
    assert storage.state is not None
    assert storage.state.value == "closed", "a full store is no failure"
    assert storage.close()


def test_values_that_are_touched_outlive_others() -> None:
    storage = Storage(FINGERPRINT, open_storage("mooncake:127.0.0.1/touched"))
    old, new = addresses(8), addresses(60, 8)
    assert set(stored(storage, old, 1 << 20)) == {OK}
    for place in new:
        assert settled(storage.touch(old[:4])) == [OK] * 4
        stored(storage, [place], 1 << 20)
    told = fetched(storage, old, 1 << 20)
    assert told[:4] == [OK] * 4
    assert MISS in told[4:]
    assert storage.close()
