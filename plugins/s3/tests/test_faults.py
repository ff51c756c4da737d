"""Servers that are gone, hang, refuse or cut their answers short."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kvgraft import ConfigError
from kvgraft_s3.failure import S3Error
from kvgraft_storage import Status, Storage, SupervisionLimits, Value, open_storage
from kvgraft_testing.storage.traffic import (
    FINGERPRINT,
    addresses,
    fetched,
    payload,
    record,
    room,
    settled,
    stored,
    until,
)

from .moto_server import MotoServer
from .scripted_server import NO_SUCH_KEY, Answer, ScriptedServer, refusal

OK, MISS, DOWN, TIMEOUT = Status.OK, Status.MISS, Status.DOWN, Status.TIMEOUT
SIZE = 9000
SLACK_S = 30.0
"""Seconds that a busy machine may add to a deadline."""

Scripted = Callable[[Callable[[str, str], Answer | None]], ScriptedServer]


def supervised(url: str) -> Storage:
    limits = SupervisionLimits(deadline_s=2.0, cooldown_s=0.05, cooldown_limit_s=0.2)
    return Storage(FINGERPRINT, open_storage(url), limits)


def test_a_server_that_is_killed_is_down_and_used_again_once_it_is_back(
    mortal: MotoServer,
) -> None:
    storage = supervised(mortal.url())
    places = addresses(8)
    assert stored(storage, places, SIZE) == [OK] * 8
    mortal.kill()
    seen: set[Status | None] = set()

    def refused() -> bool:
        seen.update(fetched(storage, places, SIZE), stored(storage, places, SIZE))
        return storage.state is not None and storage.state.value == "open"

    until(refused)
    assert seen <= {DOWN, TIMEOUT}
    assert storage.last_error is not None
    assert "Connection refused" in storage.last_error or "trial" in storage.last_error
    mortal.start()
    until(lambda: fetched(storage, places, SIZE) == [MISS] * 8)
    assert stored(storage, places, SIZE) == [OK] * 8
    assert fetched(storage, places, SIZE) == [OK] * 8
    assert storage.close()


def test_traffic_while_a_server_stops_and_comes_back_gets_nothing_wrong(mortal: MotoServer) -> None:
    storage = supervised(mortal.url())
    places = addresses(4)
    stored(storage, places, SIZE)
    reads = [storage.get(places, [bytearray(SIZE) for _ in places]) for _ in range(30)]
    mortal.kill()
    for ticket in reads:
        assert set(settled(ticket)) <= {OK, DOWN, TIMEOUT}
    mortal.start()
    until(lambda: stored(storage, places, SIZE) == [OK] * 4)
    until(lambda: fetched(storage, places, SIZE) == [OK] * 4)
    assert storage.close()


def test_a_server_that_hangs_costs_no_more_than_the_deadline(mortal: MotoServer) -> None:
    store = open_storage(mortal.url(options="&timeout_s=1"))
    places = addresses(3)
    keys = [each.key for each in places]
    values = [Value(memoryview(bytes(256)), memoryview(payload(each, SIZE))) for each in places]
    assert list(store.set_from(keys, values, 5)) == [OK] * 3
    mortal.stop()
    start = time.monotonic()
    assert list(store.get_into(keys, [room(SIZE) for _ in keys], 0.2)) == [TIMEOUT] * 3
    assert list(store.set_from(keys, values, 0.2)) == [TIMEOUT] * 3
    assert time.monotonic() - start < 0.4 + SLACK_S
    assert not store.healthy()
    with pytest.raises(S3Error, match=r"in time|TimedOut"):
        store.exists(keys)
    with pytest.raises(S3Error, match=r"in time|TimedOut"):
        store.remove(keys)
    assert time.monotonic() - start < 3.4 + SLACK_S
    mortal.go_on()
    until(store.healthy)
    assert list(store.get_into(keys, [room(SIZE) for _ in keys], 5)) == [OK] * 3
    store.close()


def test_a_server_that_hangs_is_a_miss_for_the_supervised_store(mortal: MotoServer) -> None:
    storage = supervised(mortal.url(options="&timeout_s=0.5"))
    places = addresses(4)
    stored(storage, places, SIZE)
    mortal.stop()
    until(lambda: fetched(storage, places, SIZE)[0] is DOWN)
    mortal.go_on()
    until(lambda: fetched(storage, places, SIZE) == [OK] * 4)
    until(lambda: storage.n_abandoned == 0)
    assert storage.close()


def test_a_server_that_never_answers_is_refused_in_time(scripted: Scripted) -> None:
    silent = scripted(lambda verb, path: None)
    start = time.monotonic()
    with pytest.raises(
        ConfigError, match=r"GET http://.*/pages/here/kvgraft-probe: .*TimedOut|in time"
    ):
        open_storage(silent.url("&timeout_s=0.3"))
    assert time.monotonic() - start < 0.6 + SLACK_S
    until(lambda: silent.n_gone)


def test_statuses_of_a_call_are_each_requests_own(scripted: Scripted) -> None:
    a, b, c, d, e = addresses(5)
    answers = {
        a.key.hex(): Answer(200, record(a, SIZE)),
        b.key.hex(): refusal(503, "SlowDown"),
        c.key.hex(): Answer(200, record(c, SIZE)[:-1], length=256 + SIZE),
        d.key.hex(): None,
    }
    server = scripted(lambda verb, path: answers.get(path.rpartition("/")[2], NO_SUCH_KEY))
    store = open_storage(server.url("&retries=0&timeout_s=1"))
    keys = [each.key for each in (a, b, c, d, e)]
    told = store.get_into(keys, [room(SIZE) for _ in keys], 5.0)
    assert list(told) == [OK, DOWN, DOWN, TIMEOUT, MISS]
    store.close()


def test_data_that_came_by_the_deadline_counts_if_its_neighbour_did_not(scripted: Scripted) -> None:
    here, late = addresses(2)
    answers = {here.key.hex(): Answer(200, record(here, SIZE)), late.key.hex(): None}
    server = scripted(lambda verb, path: answers.get(path.rpartition("/")[2], NO_SUCH_KEY))
    storage = supervised(server.url())
    until(lambda: fetched(storage, [here, late], SIZE) == [OK, TIMEOUT])
    assert storage.close()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (refusal(503, "SlowDown"), "503 Service Unavailable, SlowDown: because of the test"),
        (refusal(403, "AccessDenied"), "403 Forbidden, AccessDenied: because of the test"),
        (refusal(404, "NoSuchBucket"), "404 Not Found, NoSuchBucket: because of the test"),
        (Answer(500), "500 Internal Server Error"),
        (Answer(200, b"x", length=256 + SIZE), "error"),
    ],
)
def test_a_call_of_which_nothing_comes_says_why_in_one_line(
    scripted: Scripted, answer: Answer, said: str
) -> None:
    server = scripted(lambda verb, path: NO_SUCH_KEY)
    store = open_storage(server.url("&retries=0"))
    server.script = lambda verb, path: answer
    keys = [each.key for each in addresses(2)]
    with pytest.raises(S3Error) as failed:
        store.get_into(keys, [room(SIZE) for _ in keys], 5.0)
    assert said in str(failed.value)
    assert "\n" not in str(failed.value)
    assert len(str(failed.value)) <= 300
    assert not store.healthy()
    store.close()


def test_a_quota_that_is_used_up_is_full(scripted: Scripted) -> None:
    full = refusal(403, "QuotaExceeded")
    server = scripted(lambda verb, path: full if verb == "PUT" else NO_SUCH_KEY)
    storage = Storage(FINGERPRINT, open_storage(server.url()))
    assert stored(storage, addresses(2), SIZE) == [Status.FULL] * 2
    assert storage.close()


def test_a_refused_request_is_sent_again_as_often_as_allowed(scripted: Scripted) -> None:
    (place,) = addresses(1)
    asked: list[str] = []

    def script(verb: str, path: str) -> Answer:
        if "probe" in path:
            return NO_SUCH_KEY
        asked.append(verb)
        return refusal(503, "SlowDown") if len(asked) == 1 else Answer(200, record(place, SIZE))

    storage = Storage(FINGERPRINT, open_storage(scripted(script).url("&retries=1")))
    assert fetched(storage, [place], SIZE) == [OK]
    assert asked == ["GET", "GET"]
    assert storage.close()


def test_of_an_object_that_is_too_large_little_is_received(scripted: Scripted) -> None:
    huge = Answer(200, length=1 << 30, sent=1 << 30)
    server = scripted(lambda verb, path: NO_SUCH_KEY if "probe" in path else huge)
    store = open_storage(server.url())
    told = store.get_into([bytes(32)], [room(SIZE)], 10.0)
    assert list(told) == [Status.TOO_LARGE]
    store.close()
    assert server.n_sent < 32 << 20, "socket buffers' worth"
