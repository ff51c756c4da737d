"""A cluster whose servers die, hang, fail over and hand slots to each other."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvgraft_storage import TRANSIENT, Status, SupervisionLimits
from kvgraft_testing.storage.traffic import addresses, fetched, stored, supervised, until
from kvgraft_valkey.records import Names

from .servers import HOST, Cluster, needs_server

pytestmark = needs_server

OK = Status.OK
SIZE = 4000
PLACES = addresses(30)
PREFIX = "slots:"
QUICK = SupervisionLimits(deadline_s=0.5, failure_limit=2, cooldown_s=0.05, cooldown_limit_s=0.2)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster(n_replicas=1)
    yield made
    made.close()


def url(cluster: Cluster) -> str:
    return f"{cluster.url}&prefix={PREFIX}&timeout_s=0.5"


def test_keys_spread_and_are_counted_once(cluster: Cluster) -> None:
    with supervised(url(cluster)) as storage:
        assert stored(storage, PLACES, SIZE) == [OK] * 30
        owners = {
            cluster.owner(Names.of(PREFIX.encode(), place.key).payload).port for place in PLACES
        }
        assert len(owners) == 3
        ticket = storage.ask("stats", lambda store: store.stats())
        assert ticket.wait(20)
        assert (ticket.value.n_records, ticket.value.details["servers"]) == (30, 3)  # type: ignore[attr-defined]
        name = Names.of(PREFIX.encode(), PLACES[3].key).payload
        whole = cluster.ask("GET", name)
        assert isinstance(whole, bytes)
        cluster.ask("SET", name, whole[:-1])
        ticket = storage.ask("verify", lambda store: store.verify())
        assert ticket.wait(20)
        assert [each.key for each in ticket.value.damaged] == [PLACES[3].key.hex()]  # type: ignore[attr-defined]
        assert fetched(storage, PLACES, SIZE).count(Status.CORRUPT) == 1


def test_a_slot_that_moves_is_followed(cluster: Cluster) -> None:
    with supervised(url(cluster)) as storage:
        assert stored(storage, PLACES, SIZE) == [OK] * 30
        names = Names.of(PREFIX.encode(), PLACES[0].key)
        source = cluster.owner(names.payload)
        target = next(each for each in cluster.primaries if each is not source)
        slot = source.ask("CLUSTER", "KEYSLOT", names.payload)
        assert slot == source.ask("CLUSTER", "KEYSLOT", names.header)
        assert isinstance(slot, int)
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.id_of(source))
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.id_of(target))
        source.ask("MIGRATE", HOST, target.port, "", 0, 5000, "KEYS", *names)
        assert fetched(storage, PLACES, SIZE) == [OK] * 30, "asked where the key went"
        for each in (target, source):
            each.ask("CLUSTER", "SETSLOT", slot, "NODE", cluster.id_of(target))
        assert fetched(storage, PLACES, SIZE) == [OK] * 30, "moved for good"
        assert stored(storage, PLACES, SIZE) == [OK] * 30
        assert cluster.owner(names.payload) is target


def test_a_replica_that_takes_over_is_found(cluster: Cluster) -> None:
    with supervised(url(cluster), QUICK) as storage:
        assert stored(storage, PLACES, SIZE) == [OK] * 30
        primary, replica = cluster.primaries[0], cluster.servers[3]
        until(lambda: primary.ask("WAIT", 1, 100) == 1)
        until(lambda: replica.ask("DBSIZE") == primary.ask("DBSIZE"))
        primary.kill()
        replica.ask("CLUSTER", "FAILOVER", "TAKEOVER")

        def works() -> bool:
            storage.poll()
            return fetched(storage, PLACES, SIZE) == [OK] * 30

        until(works)
        until(lambda: stored(storage, PLACES, SIZE) == [OK] * 30)


@pytest.mark.parametrize("fault", ["hangs", "dies"])
def test_one_server_that_hangs_or_stops_costs_no_more_than_the_deadline(
    cluster: Cluster, fault: str
) -> None:
    cluster.servers[3].kill()  # nobody takes over
    with supervised(url(cluster), QUICK) as storage:
        assert stored(storage, PLACES, SIZE) == [OK] * 30
        victim = cluster.primaries[0]
        victim.stop() if fault == "hangs" else victim.kill()

        def failed() -> bool:
            begin = time.monotonic()
            told = fetched(storage, PLACES, SIZE)
            assert time.monotonic() - begin < 30
            assert set(told) <= {OK, *TRANSIENT}
            return set(told) <= TRANSIENT

        until(failed)
        victim.resume() if fault == "hangs" else victim.start()

        def works() -> bool:
            storage.poll()
            return set(stored(storage, PLACES, SIZE)) == {OK}

        until(works)
        assert fetched(storage, PLACES, SIZE) == [OK] * 30
