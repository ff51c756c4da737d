"""Masters that die or hang, and memory that is gone with its owner."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvgraft import ConfigError
from kvgraft_storage import Status, Storage, SupervisionLimits, open_storage
from kvgraft_testing.storage.traffic import FINGERPRINT, addresses, fetched, settled, stored, until

from .donor import Donor
from .master import Master

OK, MISS, DOWN, TIMEOUT = Status.OK, Status.MISS, Status.DOWN, Status.TIMEOUT
SIZE = 9000
URL = "mooncake:127.0.0.1/faults"
DEADLINE_S = 0.5
SLACK_S = 30.0
"""Seconds that a busy machine may add to a deadline."""


@pytest.fixture(autouse=True)
def master_runs_again(master: Master) -> Iterator[None]:
    yield
    master.go_on()


def supervised() -> Storage:
    limits = SupervisionLimits(deadline_s=DEADLINE_S, cooldown_s=0.05, cooldown_limit_s=0.2)
    return Storage(FINGERPRINT, open_storage(URL), limits)


def timed(storage: Storage) -> set[Status | None]:
    """Statuses of a fetch and a store, which must be there by their deadline."""
    start = time.monotonic()
    places = addresses(4)
    told = {*fetched(storage, places, SIZE), *stored(storage, places, SIZE)}
    assert time.monotonic() - start < 2 * DEADLINE_S + SLACK_S
    return told


def test_a_master_that_is_killed_is_down_and_used_again_once_it_is_back(master: Master) -> None:
    storage = supervised()
    assert stored(storage, addresses(4), SIZE) == [OK] * 4
    master.kill()
    seen: set[Status | None] = set()

    def refused() -> bool:
        seen.update(timed(storage))
        return storage.state is not None and storage.state.value == "open"

    until(refused)
    assert seen <= {DOWN, TIMEOUT}
    assert storage.last_error is not None
    assert "RPC_FAIL (-900)" in storage.last_error
    master.go_on()
    until(lambda: fetched(storage, addresses(4), SIZE) == [MISS] * 4, 60)
    until(lambda: stored(storage, addresses(4), SIZE) == [OK] * 4, 60)
    assert fetched(storage, addresses(4), SIZE) == [OK] * 4
    until(lambda: storage.n_abandoned == 0)
    assert storage.close()


def test_a_master_that_hangs_costs_no_more_than_the_deadline(master: Master) -> None:
    storage = supervised()
    until(lambda: stored(storage, addresses(4), SIZE) == [OK] * 4, 60)
    master.stop()
    seen: set[Status | None] = set()

    def is_down() -> bool:
        seen.update(timed(storage))
        return DOWN in seen

    until(is_down)
    assert seen <= {DOWN, TIMEOUT}
    master.go_on()
    until(lambda: fetched(storage, addresses(4), SIZE) == [OK] * 4, 60)
    until(lambda: storage.n_abandoned == 0, 60)
    assert storage.close()


def test_closing_while_a_call_hangs_ends_well(master: Master) -> None:
    storage = supervised()
    until(lambda: stored(storage, addresses(4), SIZE) == [OK] * 4, 60)
    master.stop()
    assert settled(storage.get(addresses(1), [bytearray(SIZE)])) == [TIMEOUT]
    start = time.monotonic()
    storage.close(1.0)
    assert time.monotonic() - start < 2.0 + SLACK_S
    master.go_on()
    until(lambda: storage.n_abandoned == 0, 60)


def test_values_lost_with_their_owner_are_never_read(master: Master) -> None:
    owner = Donor("64MiB")
    storage = supervised()
    places = addresses(40, first=100)
    until(lambda: stored(storage, places, SIZE) == [OK] * 40, 60)
    owner.kill()
    seen: set[Status | None] = set()

    def forgotten() -> bool:
        told = fetched(storage, places, SIZE)
        seen.update(told)
        return set(told) <= {OK, MISS} and MISS in told

    until(forgotten, 90)
    assert seen <= {OK, MISS, DOWN, TIMEOUT}
    until(lambda: stored(storage, places, SIZE) == [OK] * 40, 60)
    assert fetched(storage, places, SIZE) == [OK] * 40
    assert storage.close()


def test_a_master_that_is_not_there_is_refused_in_time() -> None:
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"master 127.0.0.1:1: .*refused; start mooncake_master"):
        open_storage("mooncake:127.0.0.1:1/x?segment=1MiB")
    assert time.monotonic() - start < SLACK_S


def test_rdma_without_a_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="protocol rdma with devices mlx5_99; this machine has"):
        open_storage("mooncake:127.0.0.1?protocol=rdma&devices=mlx5_99")
