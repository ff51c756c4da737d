"""One rank: `python -m tests.ranks.process RANK N_RANKS FOLDER`; jobs as JSON on its input.

A job opens a cache on all ranks, plays a schedule and closes it; its result is a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed

from kvgraft import Cache
from kvgraft.errors import ConfigError
from kvgraft_ranks import RanksDivergedError, RanksError
from kvgraft_storage import open_storage

from .playing import PAGE, Play
from .storing import storage_calls
from .troubles import DelayedEngine, TroubledStore

SETTINGS: dict[str, Any] = {
    "page_size": PAGE,
    "device_tokens": 480,
    "host_tokens": 960,
    "transfer_timeout_s": 60.0,
}

STORAGE: dict[str, Any] = {
    "model": "m",
    "weights": "1",
    "threshold_tokens": PAGE,
    "prefetch_timeout_s": 0.05,
    "store": "write-through",
}


def play(job: dict[str, Any], group: Any, folder: Path) -> dict[str, Any]:
    """Run a job on this rank."""
    rank: int = group.rank()
    settings = SETTINGS | job.get("settings", {}) | job.get("settings_of", {}).get(str(rank), {})
    if job.get("store"):
        (folder / job["store"]).mkdir(exist_ok=True)
        settings["storage"] = STORAGE | job.get("storage", {})
    if job.get("calls"):
        storage = STORAGE | {"prefetch": "wait-complete"}
        return storage_calls({**settings, "storage": storage}, group, folder)
    trouble = job.get("trouble", {})
    what = str(trouble.get("what", "")) if trouble.get("rank") == rank else ""
    seed = job["seed"] * 100 + rank
    delay_s = job.get("delay_s", 0.003)
    engine = DelayedEngine(seed, delay_s, 0.1 if what == "copies" else 0.0)
    result: dict[str, Any] = {"rank": rank, "error": "", "number": 0}
    try:
        cache = Cache.open(job["components"], transfers=engine, ranks=group, **settings)
    except ConfigError as error:
        return result | {"error": f"ConfigError: {error}"}
    agreement: Any = cast(Any, cache).ranks
    game = Play(cache, rank, job["seed"])
    store = None
    try:
        if job.get("store"):
            inner = open_storage(f"file:{folder / job['store']}?capacity=64MiB")
            store = TroubledStore(inner, seed, delay_s, what)
            cache.storage.attach(store)
        game.go(job["n_calls"], trouble)
        game.end()
        n_messages = agreement.n_messages
        for _ in range(10):
            cache.poll()
        result["messages_of_10_polls"] = agreement.n_messages - n_messages
    except RanksError as error:
        result["error"] = f"{type(error).__name__}: {error}"
        result["waited_s"] = time.monotonic() - game.since_s
        if isinstance(error, RanksDivergedError):
            result["number"], result["results"] = error.number, error.results
        result["after"] = _refused(cache)
    result |= {
        "digest": agreement.log.digest.hex(),
        "calls": agreement.log.number,
        "hits": game.hits,
        "from_storage": game.from_storage,
        "mismatches": game.mismatches,
        "troubles": engine.n_troubles + (store.n_troubles if store is not None else 0),
    }
    cache.close()
    return result


def _refused(cache: Cache) -> str:
    """The error of a call after the ranks broke."""
    try:
        cache.poll()
    except RanksError as error:
        return type(error).__name__
    return "served"


def main(rank: int, n_ranks: int, folder: Path) -> None:
    """Join the others and run jobs."""
    torch.set_num_threads(1)
    dist: Any = torch.distributed
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "meeting"), n_ranks),
        rank=rank,
        world_size=n_ranks,
        timeout=timedelta(seconds=300),
    )
    for line in sys.stdin:
        sys.stdout.write(json.dumps(play(json.loads(line), dist.group.WORLD, folder)) + "\n")
        sys.stdout.flush()
    os._exit(0)  # a group with a dead member may not end


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
