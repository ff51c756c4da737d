"""Busy replays: every tier is short, requests wait, are retracted and given up.

`sessions` is write-through with namespaces that look alike and users who lose interest; `stored`
is write-back, with a store behind HOST and a choice between loading and computing; `windows` has no
states, so that pages between resume points are left behind. `drawn` is many small caches of any
settings, on which every legal call is made at any time; `strained` the same with one part of each
busier than the rest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from kvgraft.cache import Cache
from kvgraft.config import parse_config
from kvgraft.errors import ContractViolation
from kvgraft.requests.request import Request
from kvgraft_replay.arrivals import ClosedLoop
from kvgraft_replay.engine import EngineModel, ReplayEngine
from kvgraft_replay.meter import Meter
from kvgraft_replay.payload import Verify
from kvgraft_replay.running import Job, Player
from kvgraft_replay.workload import Addresses, TraceRequest, Workload, join_spans

from ..guard.busy import STRAINS, Busy

__all__ = ["REPLAYS", "play"]

NAMESPACES = (None, None, "", 0, "tenant")
"""Told apart although some are falsy."""

PAGE = 4
"""Tokens."""

AGAIN = 3
"""How many users ask the same again in the end, with a prompt of whole pages."""

DRAWN = 40
"""Caches of drawn settings."""

STRAINED = 12
"""Caches of every strain."""

MOVES = 250
"""Calls on each of them."""

LOSES_INTEREST = 11
"""Every so many admitted requests one is aborted while its load-back may be in flight."""


def sessions(seed: int, n_sessions: int) -> Workload:
    """Short conversations over a few system prompts, some of which fork."""
    random, addresses = Random(seed), Addresses(f"sessions {seed}")
    preambles = [addresses.take(random.randint(20, 70)) for _ in range(3)]
    requests: list[TraceRequest] = []

    def ask(session: int, think_s: float, context: tuple[Any, ...], output: Any) -> None:
        prompt = sum(span.length for span in context)
        content = join_spans((*context, output))
        number = len(requests)
        requests.append(
            TraceRequest(number, session, number / 4, think_s, prompt, output.length, content)
        )

    def speak(session: int, context: tuple[Any, ...], turns: int) -> None:
        for turn in range(turns):
            context = join_spans((*context, addresses.take(random.randint(3, 50))))
            output = addresses.take(random.randint(2, 40))
            ask(session, random.random() if turn else 0.0, context, output)
            if random.random() < 0.7:
                context = requests[-1].content

    for session in range(n_sessions):
        preamble = random.choices(preambles, (4, 2, 1))[0]
        opening = addresses.take(random.randint(4, 60))
        speak(2 * session, (preamble, opening), random.randint(1, 4))
        if random.random() < 0.3:
            speak(2 * session + 1, (preamble, opening), random.randint(1, 2))
    for session in range(2 * n_sessions, 2 * n_sessions + AGAIN):
        prompt = (preambles[0], addresses.take(PAGE - preambles[0].length % PAGE))
        for think_s in (0.0, 0.5):
            ask(session, think_s, prompt, addresses.take(5))
    return Workload.of(
        requests, name="sessions", format="synthetic", has_absolute_time=True, block_tokens=1
    )


class _Tenants(Player):
    """Requests of several namespaces, by session."""

    def job(self, trace: TraceRequest) -> Job:
        job = super().job(trace)
        job.key.namespace = NAMESPACES[trace.session // 2 % len(NAMESPACES)]
        return job


class _Impatient(ReplayEngine):
    """Some requests are given up once they were admitted, loads in flight or not."""

    def _admitted(self, job: Job, request: Request) -> None:
        super()._admitted(job, request)
        if self.totals.admissions % LOSES_INTEREST == 0 and job in self.loading:
            self.loading.remove(job)
            self.cache.abort(request)
            job.request = None
            self._end(job)


def _play(cache: Cache, workload: Workload, users: int, player: type[Player]) -> str:
    """Replay; return faults noticed by the replay itself, such as wrong bytes."""
    meter = Meter()
    playing = player(cache, meter, Verify.FULL, 0)
    model = EngineModel(
        prefill_tokens_s=4000.0, decode_tokens_s=60.0, chunk_tokens=48, reserve_tokens=16
    )
    engine = _Impatient(
        cache,
        ClosedLoop(workload.sessions, users),
        model,
        playing,
        meter,
        on_count=lambda job: None,
        on_end=lambda: None,
    )
    try:
        engine.run()
        cache.drain()
    finally:
        cache.close()
    return playing.checks.first or engine.totals.first_problem


COMPONENTS: dict[str, dict[str, Any]] = {
    "full": {},
    "swa": {"window": 24, "device_tokens": 320, "host_tokens": 480},
    "mamba": {"states": 22, "host_states": 30, "checkpoint_interval_tokens": 32},
}


def _sessions(guard: str) -> str:
    cache = Cache(
        parse_config(
            {
                "components": COMPONENTS,
                "page_size": PAGE,
                "device_tokens": 800,
                "host_tokens": 1200,
                "write_policy": "write-through",
                "load": None,
                "guard": guard,
            }
        )
    )
    return _play(cache, sessions(1, 45), 10, _Tenants)


def _stored(guard: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(
            parse_config(
                {
                    "components": COMPONENTS,
                    "page_size": PAGE,
                    "device_tokens": 800,
                    "host_tokens": 1000,
                    "write_policy": "write-back",
                    "load": {
                        "bandwidth_bytes_s": 1e8,
                        "latency_s": 2e-3,
                        "prefill_tokens_s": 20_000,
                    },
                    "storage": {
                        "url": f"file:{folder}?capacity=64MiB",
                        "model": "tiny",
                        "weights": "1",
                        "store": "host-eviction",
                        "prefetch": "wait-complete",
                        "threshold_tokens": 8,
                    },
                    "guard": guard,
                }
            )
        )
        return _play(cache, sessions(2, 40), 10, Player)


def _windows(guard: str) -> str:
    cache = Cache(
        parse_config(
            {
                "components": {name: COMPONENTS[name] for name in ("full", "swa")},
                "page_size": PAGE,
                "device_tokens": 800,
                "load": None,
                "guard": guard,
            }
        )
    )
    return _play(cache, sessions(3, 30), 8, Player)


def _drawn(guard: str) -> str:
    return _busy(guard, [(seed, "") for seed in range(DRAWN)])


def _strained(guard: str) -> str:
    return _busy(guard, [(seed, strain) for seed in range(STRAINED) for strain in STRAINS])


def _busy(guard: str, caches: Iterable[tuple[int, str]]) -> str:
    """An error that is no violation ends one cache, and the next is opened."""
    noticed = ""
    for seed, strain in caches:
        try:
            Busy(seed, strain, guard=guard).run(MOVES)
        except ContractViolation:
            raise
        except Exception as error:  # noqa: BLE001 - the cache's defect, or what the engine notices
            noticed = noticed or f"{type(error).__name__} of cache {strain} {seed}: {error}"
    return noticed


REPLAYS: dict[str, Callable[[str], str]] = {
    "sessions": _sessions,
    "stored": _stored,
    "windows": _windows,
    "drawn": _drawn,
    "strained": _strained,
}
"""By name; each is given the guard's mode and returns faults noticed by the replay itself."""


def play(name: str, guard: str = "on") -> str:
    """Play one of them."""
    return REPLAYS[name](guard)
