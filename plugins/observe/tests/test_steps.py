"""Durations are those between an engine's calls, and every token of a prompt has one outcome."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from kvgraft import Cache, ConfigError, LoadModel, Request, TokenKey
from kvgraft_observe.metrics import ADMISSION_WAIT, LOAD_BACK, MATCH, PREFETCH, Metric
from kvgraft_observe.steps import Outcome, Steps, outcomes
from tests.serving import life


class Seen:
    """All measurements, in their order."""

    def __init__(self) -> None:
        self.durations: list[tuple[Metric, float, tuple[str, ...]]] = []
        self.outcomes: list[Outcome] = []

    def record(self, metric: Metric, seconds: float, *labels: str) -> None:
        self.durations.append((metric, seconds, labels))

    def count(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def of(self, metric: Metric) -> list[float]:
        return [seconds for each, seconds, _ in self.durations if each is metric]


def begin(cache: Cache, key: TokenKey) -> Request:
    """A request that is admitted, and whose prefix is there."""
    request = cache.begin(key)
    assert cache.admit(request).admitted
    cache.load_back(request)
    cache.drain()
    assert request.ready
    return request


def serve(cache: Cache, key: TokenKey) -> None:
    """One request, to its end."""
    request = begin(cache, key)
    life.prefill(cache, request)
    cache.finish(request)
    cache.drain()


@pytest.fixture(name="seen")
def made_seen() -> Seen:
    return Seen()


@pytest.fixture(name="ticks")
def made_ticks() -> Iterator[float]:
    """A clock that goes on by one whenever it is read."""
    return map(float, itertools.count())


def test_a_wait_lasts_from_the_first_match_through_every_attempt(
    seen: Seen, ticks: Iterator[float]
) -> None:
    with Cache.open(["full"], page_size=16, device_tokens=80, host_tokens=0) as cache:
        steps = Steps(cache, seen, explain_every=0, clock=lambda: next(ticks))
        first, second = TokenKey(range(60)), TokenKey(range(100, 160))
        holder = cache.begin(first)  # reads the clock at 0 and 1
        assert cache.admit(holder).admitted  # at 2
        waiting = cache.begin(second)  # at 3 and 4
        assert not cache.admit(waiting).admitted
        cache.abort(waiting)
        cache.abort(holder)
        again = cache.begin(second)  # at 5 and 6
        assert cache.admit(again).admitted  # at 7
        assert seen.of(MATCH) == [1, 1, 1]
        assert seen.of(ADMISSION_WAIT) == [2, 7 - 3]
        assert seen.outcomes == []
        cache.abort(again)
        steps.close()
        cache.abort(cache.begin(first))
        assert len(seen.of(MATCH)) == 3


def test_a_key_that_grew_waits_anew(seen: Seen, ticks: Iterator[float]) -> None:
    with Cache.open(["full"], page_size=16, device_tokens=256, host_tokens=0) as cache:
        Steps(cache, seen, explain_every=0, clock=lambda: next(ticks))
        key = TokenKey(range(60))
        cache.abort(cache.begin(key))  # its client is gone
        key.extend(range(60, 100))
        cache.abort(begin(cache, key))
        assert seen.of(ADMISSION_WAIT) == [2]


def test_a_load_back_lasts_until_the_poll_that_finds_it_ready(
    seen: Seen, ticks: Iterator[float]
) -> None:
    with Cache.open(["full"], page_size=16, device_tokens=256, host_tokens=512) as cache:
        key = TokenKey(range(100))
        serve(cache, key)
        cache.evict("full", 16)
        Steps(cache, seen, explain_every=0, clock=lambda: next(ticks))
        request = cache.begin(key)
        assert cache.admit(request).admitted
        assert cache.load_back(request)
        cache.drain()
        cache.poll()
        assert seen.of(LOAD_BACK) == [1]
        cache.finish(request)
        cache.evict("full", 16)
        request = cache.begin(key)
        assert cache.admit(request).admitted
        assert cache.load_back(request)
        cache.abort(request)
        cache.drain()
        assert seen.of(LOAD_BACK) == [1]


def test_prefetches_are_told_apart_by_their_result(seen: Seen, ticks: Iterator[float]) -> None:
    pytest.importorskip("kvgraft_file")
    with tempfile.TemporaryDirectory() as directory:
        storage = {
            "url": f"file:{directory}",
            "model": "m",
            "weights": "w",
            "store": "write-through",
            "prefetch": "wait-complete",
            "threshold_tokens": 16,
        }
        sizes: dict[str, Any] = {"page_size": 16, "device_tokens": 256, "host_tokens": 256}
        key = TokenKey(range(100))
        with Cache.open(["full"], **sizes, storage=storage) as cache:
            serve(cache, key)
        with Cache.open(["full"], **sizes, storage=storage) as cache:
            Steps(cache, seen, explain_every=0, clock=lambda: next(ticks))
            assert cache.storage
            found = cache.storage.prefetch(key)
            none = cache.storage.prefetch(TokenKey(range(500, 600)))
            assert cache.drain()
            assert found.gained_tokens == 96
            assert none.gained_tokens == 0
    told = {labels for metric, seconds, labels in seen.durations if metric is PREFETCH}
    assert told == {("delivered",), ("in vain",)}
    assert all(seconds > 0 for seconds in seen.of(PREFETCH))


def explained(cache: Cache, key: TokenKey) -> list[Outcome]:
    """The outcomes of a request of that key."""
    request = begin(cache, key)
    found = list(outcomes(cache, request))
    cache.abort(request)
    return found


def test_tokens_are_reused_unknown_or_lack_a_components_data() -> None:
    components = {"full": {}, "swa": {"window": 32}}
    with Cache.open(components, page_size=16, device_tokens=1024, host_tokens=0) as cache:
        serve(cache, TokenKey(range(100)))
        longer = TokenKey(range(200))
        assert explained(cache, longer) == [
            Outcome("reused", "", 96),
            Outcome("unknown", "", 192 - 96),
        ]
        cache.evict("swa", 64)  # and with it the leaf, as a whole
        assert explained(cache, longer) == [
            Outcome("unknown", "", 192 - 64),
            Outcome("incomplete", "swa", 64),
        ]


def test_a_prefix_that_is_slower_to_load_is_to_be_recomputed() -> None:
    slow = LoadModel(prefill_tokens_s=1e9, bandwidth_bytes_s=1.0)
    sizes: dict[str, Any] = {"page_size": 16, "device_tokens": 256, "host_tokens": 512}
    with Cache.open(["full"], **sizes, load=slow) as cache:
        key = TokenKey(range(100))
        serve(cache, key)
        cache.evict("full", 16)
        assert explained(cache, key) == [Outcome("recompute", "", 96)]


def test_a_prefix_whose_slots_are_promised_is_crowded_out() -> None:
    with Cache.open(["full"], page_size=16, device_tokens=128, host_tokens=0) as cache:
        key = TokenKey(range(65))
        serve(cache, key)
        running = cache.begin(TokenKey(range(500, 600)), reserve=12)
        assert cache.admit(running).admitted
        crowded = cache.begin(key)
        assert crowded.limited is not None
        assert list(outcomes(cache, crowded)) == [Outcome("crowded", "", 64)]


def test_the_first_of_every_so_many_requests_is_explained(seen: Seen) -> None:
    with Cache.open(["full"], page_size=16, device_tokens=1024) as cache:
        with pytest.raises(ConfigError, match="explain_every=-1; give 0 for never"):
            Steps(cache, seen, explain_every=-1)
        Steps(cache, seen, explain_every=3)
        for _ in range(7):
            cache.abort(begin(cache, TokenKey(range(100))))
        assert seen.outcomes == [Outcome("unknown", "", 96)] * 3
