"""Replays a workload through a cache: from settings to the result that reports read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import kvgraft
from kvgraft.cache import Cache
from kvgraft.config import CacheConfig, parse_config
from kvgraft.devices import SIMULATED
from kvgraft.errors import ConfigError
from kvgraft.optional import load_part
from kvgraft.types import Tier
from kvgraft_replay.arrivals import Arrivals, ClosedLoop, OpenLoop
from kvgraft_replay.engine import EngineModel, ReplayEngine
from kvgraft_replay.identity import identity
from kvgraft_replay.limit import choose_sessions
from kvgraft_replay.meter import Meter
from kvgraft_replay.payload import Verify
from kvgraft_replay.report.counts import cache_counts, storage_counts, store_contents
from kvgraft_replay.report.schema import ReplayResult, StorageCounts
from kvgraft_replay.report.summary import count
from kvgraft_replay.running import Player
from kvgraft_replay.tenants import unused_tenants
from kvgraft_replay.timeline import Timeline
from kvgraft_replay.totals import Totals
from kvgraft_replay.workload import Workload
from kvgraft_storage.settings import StorageSettings

__all__ = ["ReplaySettings", "replay"]


@dataclass(slots=True)
class ReplaySettings:
    """Settings of a replay.

    Attributes:
        cache: settings of the cache, as for `Cache.open`; the identity of stored data is filled in.
        users: closed loop with that many users; None replays at the trace's times.
        model: the speed of the simulated engine.
        verify: how much reused data is compared.
        seed: seed of all randomness.
        limit: replay at most this many requests: the trace's first, or in a closed loop sessions
            of all users.
        meter: makes the meter of operations' CPU time; `Unmetered` leaves it at 0.
        ranks: the process group of `torch.distributed` whose ranks all run this replay; None for
            one rank alone.
        checks: full recomputations of the books, spread over the replay, the last one at its end;
            ledgers are checked every step.
    """

    cache: dict[str, Any]
    users: int | None = None
    model: EngineModel = field(default_factory=EngineModel)
    verify: Verify = Verify.FULL
    seed: int = 0
    limit: int | None = None
    meter: Callable[[], Meter] = Meter
    ranks: Any = None
    checks: int = 20


def replay(
    workload: Workload,
    settings: ReplaySettings,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> ReplayResult:
    """Replay a workload; `progress` is called with `(ended, expected)` requests.

    Raises:
        ConfigError: a workload without absolute times needs `users`, or the host cannot access the
            pools' memory.
        KvgraftError: the cache cannot be opened.
    """
    arrivals: Arrivals
    notices: tuple[str, ...] = ()
    if settings.users is not None:
        sessions, notices = choose_sessions(workload, settings.users, settings.limit)
        expected = sum(map(len, sessions))
        arrivals = ClosedLoop(sessions, settings.users)
    elif workload.has_absolute_time:
        requests = list(workload.requests[: settings.limit])
        expected = len(requests)
        arrivals = OpenLoop(requests)
    else:
        raise ConfigError(
            f"{workload.name}: its times count from each session's start; "
            "replay it closed loop, for example --users 8"
        )
    config = _config(workload, settings)
    if config.payload and config.device == SIMULATED:
        raise ConfigError(
            f"device {SIMULATED!r}: a replay writes and reads pools from the host, which does not "
            "reach this device's memory; use cpu"
        )
    cache: Cache = (
        Cache(config)
        if settings.ranks is None
        else load_part("ranks")(Cache, settings.ranks, config)
    )
    try:
        result = _run(cache, arrivals, expected, workload, settings, progress)
    finally:
        cache.close()
    unused = unused_tenants(list(cache.config.tenants), workload)
    result["notices"] = [*workload.notices, *notices, *unused, *result["notices"]]
    return result


def _config(workload: Workload, settings: ReplaySettings) -> CacheConfig:
    """The cache's settings, with the identity of a replay's data in a store."""
    given = settings.cache
    if given.get("storage") is None:
        return parse_config({"payload": settings.verify is not Verify.OFF, **given})
    unnamed = parse_config({**given, "storage": None})
    owner = identity(workload, unnamed.components, settings.verify)
    return parse_config({**given, "storage": {**given["storage"], **owner}})


def _run(
    cache: Cache,
    arrivals: Arrivals,
    expected: int,
    workload: Workload,
    settings: ReplaySettings,
    progress: Callable[[int, int], None] | None,
) -> ReplayResult:
    meter = settings.meter()
    player = Player(cache, meter, settings.verify, settings.seed)
    timeline = Timeline(cache, expected)
    check_every = max(1, expected // settings.checks)
    ended = 0

    def on_end() -> None:
        nonlocal ended
        ended += 1
        timeline.ended(ended)
        if progress is not None:
            progress(ended, expected)
        due.append(ended % check_every == 0 and ended < expected)

    due: list[bool] = []
    engine = ReplayEngine(
        cache,
        arrivals,
        settings.model,
        player,
        meter,
        on_count=lambda job: timeline.counted(job, engine.now_s),
        on_end=on_end,
    )
    engine.before_clock = lambda to_s: timeline.move(engine, to_s)
    engine.after_step = lambda: engine.check_integrity() if _take_due(due) else None
    before = store_contents(cache)
    started = time.perf_counter()
    engine.run()
    cache.drain()
    engine.check_integrity()
    wall_s = time.perf_counter() - started
    storage = storage_counts(cache, before)
    return _result(engine, timeline, workload, settings, wall_s, storage)


def _take_due(due: list[bool]) -> bool:
    """Whether a full check is due since the last call."""
    wanted = any(due)
    due.clear()
    return wanted


def _result(
    engine: ReplayEngine,
    timeline: Timeline,
    workload: Workload,
    settings: ReplaySettings,
    wall_s: float,
    storage: StorageCounts | None,
) -> ReplayResult:
    cache, meter, totals = engine.cache, engine.meter, engine.totals
    hits = totals.hits
    return {
        "kvgraft": kvgraft.__version__,
        "workload": {
            "name": workload.name,
            "format": workload.format,
            "requests": workload.totals.requests,
            "input_tokens": workload.totals.input_tokens,
            "output_tokens": workload.totals.output_tokens,
        },
        "settings": _settings(cache, settings),
        "notices": _notices(totals),
        "requests": totals.requests,
        "served": totals.served,
        "input_tokens": totals.input_tokens,
        "output_tokens": totals.output_tokens,
        "token_hit_rate": hits / totals.input_tokens if totals.input_tokens else 0.0,
        "hit_tokens": {
            "device": totals.device_hits,
            "host": totals.host_hits,
            "storage": totals.storage_hits,
        },
        "saved_tokens": hits,
        "computed_tokens": totals.input_tokens - hits - totals.unserved_tokens,
        "computed_tokens_p90": totals.computed_p90,
        "unserved_tokens": totals.unserved_tokens,
        "recomputed_tokens": totals.recomputed_tokens,
        "namespaces": totals.by_namespace,
        **cache_counts(cache),
        "storage": storage,
        "admissions": totals.admissions,
        "deferrals": totals.deferrals,
        "retractions": totals.retractions,
        "rejections": totals.rejections,
        "out_of_memory": totals.out_of_memory,
        "payload_mismatches": engine.player.checks.mismatches,
        "payloads_verified": engine.player.checks.verified,
        "ledger_violations": totals.ledger_violations,
        "first_problem": engine.player.checks.first or totals.first_problem,
        "cpu_us_per_request": meter.quantiles(),
        "wall_s": wall_s,
        "virtual_s": engine.now_s,
        "timeline": timeline.points(engine),
        "sources": timeline.sources,
        "tree": timeline.tree,
    }


def _notices(totals: Totals) -> list[str]:
    """Notes for readers of the results."""
    if not totals.rejections:
        return []
    return [
        f"{totals.rejections} of {count(totals.requests, 'request')} "
        f"{'was' if totals.requests == 1 else 'were'} rejected, no pool has room even if it is "
        f"empty ({totals.first_rejection}); their tokens count as misses"
    ]


def _settings(cache: Cache, settings: ReplaySettings) -> dict[str, object]:
    config = cache.config
    return {
        "components": {name: dict(options) for name, options in config.components.items()},
        "page_size": config.page_size,
        "device": config.device,
        "payload": config.payload,
        "device_tokens": config.device_tokens,
        "host_tokens": config.host_tokens,
        "device_memory": config.device_memory,
        "host_memory": config.host_memory,
        "write_policy": config.write_policy.value,
        "cut_tokens": config.cut_tokens,
        "eviction_policy": config.policy,
        "hints": settings.model.hints,
        "announce": settings.model.announce,
        "tenants": {
            name: each.model_dump(exclude={"namespaces", "prefixes"}, exclude_none=True)
            for name, each in config.tenants.items()
        },
        "storage": _storage_settings(config.storage),
        "concurrency": f"users:{settings.users}" if settings.users else "open",
        "verify": settings.verify.value,
        "seed": settings.seed,
        "limit": settings.limit,
        "prefill_tokens_s": settings.model.prefill_tokens_s,
        "decode_tokens_s": settings.model.decode_tokens_s,
        "chunk_tokens": settings.model.chunk_tokens,
        "max_running": settings.model.max_running,
        "reserve_tokens": settings.model.reserve_tokens,
        "slots": {
            component.name: {
                Tier.DEVICE.value: component.device.capacity,
                Tier.HOST.value: component.host.capacity if component.host is not None else 0,
            }
            for component in cache.tree.components
        },
    }


def _storage_settings(storage: StorageSettings | None) -> dict[str, object] | None:
    return None if storage is None else storage.model_dump(mode="json")
