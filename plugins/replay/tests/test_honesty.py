"""The numbers of a replay have their plain meaning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from kvgraft_replay.engine import EngineModel
from kvgraft_replay.meter import Meter
from kvgraft_replay.payload import Verify
from kvgraft_replay.replay import ReplaySettings, replay
from kvgraft_replay.report import ReplayResult
from kvgraft_replay.workload import Addresses, Span, TraceRequest, Workload

LARGE, SMALL = 4096, 256

T = TypeVar("T")


class Calls(Meter):
    """Counts a request's calls of the cache, by operation and request."""

    counts: Counter[tuple[str, int | None]]

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter()

    def run(self, operation: str, request: int | None, call: Callable[..., T], *args: object) -> T:
        self.counts[operation, request] += 1
        return call(*args)


def workload(*requests: tuple[float, int, int], output_tokens: int = 16) -> Workload:
    """Requests `(arrival_s, session, prompt_tokens)`; a session's prompts share their beginning."""
    addresses = Addresses("test")
    space = {session: addresses.take(2 * LARGE).first for _, session, _ in requests}
    return Workload.of(
        (
            TraceRequest(
                index=index,
                session=session,
                arrival_s=arrival_s,
                think_s=0.0,
                prompt_tokens=prompt,
                output_tokens=output_tokens,
                content=(Span(space[session], prompt + output_tokens),),
            )
            for index, (arrival_s, session, prompt) in enumerate(requests)
        ),
        name="test",
        format="synthetic",
        has_absolute_time=True,
        block_tokens=1,
    )


def replayed(load: Workload, *, model: EngineModel | None = None, **settings: Any) -> ReplayResult:
    users, limit = settings.pop("users", None), settings.pop("limit", None)
    cache = {"components": ["full"], "page_size": 16, "device_tokens": 2048, **settings}
    return replay(
        load,
        ReplaySettings(
            cache, users=users, limit=limit, verify=Verify.OFF, model=model or EngineModel()
        ),
    )


def test_a_rejected_request_is_a_miss() -> None:
    # each small prompt is served twice, each large one fits no pool
    sizes = [(SMALL, 0), (LARGE, 1), (SMALL, 0), (LARGE, 1)]
    result = replayed(workload(*((i, session, n) for i, (n, session) in enumerate(sizes))))
    assert (result["requests"], result["served"], result["rejections"]) == (4, 2, 2)
    assert result["input_tokens"] == 2 * (SMALL + LARGE)
    assert result["unserved_tokens"] == 2 * LARGE
    assert result["saved_tokens"] == SMALL - 16
    assert result["token_hit_rate"] == (SMALL - 16) / (2 * (SMALL + LARGE))
    assert result["computed_tokens"] == SMALL + 16
    assert result["timeline"][-1]["cumulative_hit_rate"] == result["token_hit_rate"]
    assert [source["unserved"] for source in result["sources"]] == [0, LARGE, 0, LARGE]
    (notice,) = result["notices"]
    assert notice.startswith("2 of 4 requests were rejected")
    assert "needs 25" in notice, "it says of which pool how much was needed"


def test_a_notice_about_one_request_speaks_of_one() -> None:
    (notice,) = replayed(workload((0, 0, LARGE)))["notices"]
    assert notice.startswith("1 of 1 request was rejected, no pool has room")


def test_times_of_rejected_requests_do_not_lower_those_of_the_served_ones() -> None:
    result = replayed(workload((0, 0, SMALL), *((1 + i, 1, LARGE) for i in range(20))))
    cpu = result["cpu_us_per_request"]
    assert result["served"] == 1
    assert cpu["allocate"]["p50"] == cpu["allocate"]["p99"] > 0


@pytest.fixture(scope="module")
def crowded() -> ReplayResult:
    """Requests that are retracted for one another, and lose their data."""
    first = [(0.0, session, SMALL) for session in range(2)]
    later = [(30.0, session, SMALL + 64) for session in range(6)]
    return replayed(
        workload(*first, *later, (60.0, 9, LARGE), output_tokens=600),
        device_tokens=1600,
        model=EngineModel(reserve_tokens=0, chunk_tokens=512),
    )


def test_saved_computed_and_unserved_tokens_are_the_input(crowded: ReplayResult) -> None:
    parts = ("saved_tokens", "computed_tokens", "unserved_tokens")
    assert sum(crowded[part] for part in parts) == crowded["input_tokens"]  # type: ignore[literal-required]
    assert sum(crowded["hit_tokens"].values()) == crowded["saved_tokens"]  # type: ignore[arg-type]
    for kind in ("device", "host", "storage"):
        told = sum(source[kind] for source in crowded["sources"])
        assert told == crowded["hit_tokens"][kind]
    assert crowded["served"] + crowded["rejections"] == crowded["requests"]


def test_tokens_computed_again_after_a_retraction_are_reported(crowded: ReplayResult) -> None:
    assert crowded["retractions"] > 0
    assert crowded["recomputed_tokens"] > 0


def test_the_timeline_samples_the_clock_at_equal_intervals() -> None:
    burst = [(0.01 * i, i, SMALL) for i in range(8)]
    late = [(100 + 0.01 * i, i, SMALL) for i in range(8)]
    result = replayed(workload(*burst, *late))
    times = [point["time_s"] for point in result["timeline"]]
    interval = times[0]
    assert 100 / 240 < interval < 1
    assert times[:-1] == [interval * (i + 1) for i in range(len(times) - 1)]
    assert times[-1] == result["virtual_s"]
    assert times[-1] - times[-2] <= interval
    requests = [point["requests"] for point in result["timeline"]]
    assert sum(requests) == 16
    gap = [point for point in result["timeline"] if 5 < point["time_s"] < 100]
    assert len(gap) > 50, "nothing happens there, and that shows"
    assert all(point["requests"] == point["running"] == 0 for point in gap)


def test_a_long_replay_has_no_more_samples_than_a_short_one() -> None:
    for end_s in (1, 60, 1e5):
        points = replayed(workload((0, 0, SMALL), (end_s, 0, SMALL)))["timeline"]
        assert 60 < len(points) <= 241


def sessions_of(result: ReplayResult, calls: int) -> dict[int, int]:
    """Requests that were replayed, per session."""
    counts: dict[int, int] = {}
    for source in result["sources"]:
        counts[source["index"] // calls] = counts.get(source["index"] // calls, 0) + 1
    return counts


def closed(*, users: int, limit: int | None, sessions: int = 6, calls: int = 4) -> ReplayResult:
    load = workload(*((0, s, SMALL + 16 * c) for s in range(sessions) for c in range(calls)))
    return replayed(load, users=users, limit=limit, device_tokens=8192)


def test_a_limit_takes_whole_sessions_of_all_users() -> None:
    result = closed(users=3, limit=14)
    assert sessions_of(result, 4) == {0: 4, 1: 4, 2: 4}
    assert result["notices"] == []


def test_a_limit_too_small_for_whole_sessions_cuts_all_users_alike_and_says_so() -> None:
    result = closed(users=3, limit=7)
    assert sessions_of(result, 4) == {0: 3, 1: 2, 2: 2}
    (notice,) = result["notices"]
    assert notice.startswith("limit 7 leaves only the beginning of 3 of 3 sessions; ")
    assert "give a limit of 12 or more" in notice


@pytest.mark.parametrize(
    ("users", "limit", "idle"),
    [(5, 3, 2), (9, None, 3), (8, 24, 2), (10**14, None, 10**14 - 6), (10**14, 3, 10**14 - 3)],
)
def test_users_without_a_session_are_reported(users: int, limit: int | None, idle: int) -> None:
    notices = closed(users=users, limit=limit)["notices"]
    assert any(notice.startswith(f"{idle} of {users} users have no session") for notice in notices)


@pytest.mark.parametrize(
    ("users", "limit", "said"),
    [
        (3, 12, []),
        (
            3,
            7,
            ["limit 7 leaves only the beginning of 3 of 3 sessions; give a limit of 12 or more"],
        ),
        (
            *(5, 3),
            [
                "limit 3 leaves only the beginning of 3 of 3 sessions; give a limit of 20 or more",
                "2 of 5 users have no session: limit 3 is one request for each of 3 sessions; "
                "give a limit of 20 or more",
            ],
        ),
        (
            *(1, 1),
            ["limit 1 leaves only the beginning of 1 of 1 session; give a limit of 4 or more"],
        ),
        (
            *(9, 3),
            [
                "limit 3 leaves only the beginning of 3 of 3 sessions; give at most 6 users and a "
                "limit of 24 or more",
                "6 of 9 users have no session: the workload has 6 sessions and limit 3 is one "
                "request for each of 3 sessions; give at most 6 users and a limit of 24 or more",
            ],
        ),
        (
            9,
            None,
            ["3 of 9 users have no session: the workload has 6 sessions; give at most 6 users"],
        ),
    ],
)
def test_notices_of_users_and_a_limit_agree(users: int, limit: int | None, said: list[str]) -> None:
    assert closed(users=users, limit=limit)["notices"] == said


def test_a_decode_tells_the_cache_of_a_page_at_its_first_tokens_and_when_it_is_full() -> None:
    # each that arrives ends a step: the first has decoded a token more by then
    load = workload(*((n / 100, n, 20) for n in range(80)), output_tokens=64)
    meter = Calls()
    cache = {"components": ["full"], "page_size": 16, "device_tokens": 8192}
    result = replay(load, ReplaySettings(cache, verify=Verify.OFF, meter=lambda: meter))
    assert (result["served"], result["output_tokens"]) == (80, 80 * 64)
    prefill, rest_of_the_prompt_s_page, n_begun = 1, 1, 4
    assert meter.counts["computed", 0] == prefill + rest_of_the_prompt_s_page + 2 * n_begun
