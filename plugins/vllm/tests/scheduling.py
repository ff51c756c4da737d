"""A trace through vLLM's scheduler without a model: vLLM's cache manager, and kvgraft's.

    PYTHONPATH=FILES python -m plugins.vllm.tests.scheduling TRACE --tokens 1M 3M

FILES are vLLM's Python files as `make engine-files` fetches them. Requests come in the order of the
trace, and some always wait. Each manager runs in a process of its own, one after the other. Hits
are vLLM's own count. Times are CPU time of `schedule()` and `update_from_output()`, in microseconds
a step, and of adding a request, with vLLM's hashes.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from time import thread_time
from typing import Any, NamedTuple

import numpy as np
from plugins.vllm.tests.schedulers import Engine, Sizes
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.outputs import ModelRunnerOutput

from kvgraft.sizes import parse_tokens
from kvgraft_vllm.manager import put_in
from kvgraft_vllm.manager_settings import ManagerSettings

HASH_TOKENS = 512
"""Tokens of a block of the trace."""

BLOCK_SIZE = 16
STEP_TOKENS = 8192
MAX_MODEL_LEN = 131_072
MAX_NUM_SEQS = 256
MOST_WAITING = 64


class Asked(NamedTuple):
    """A request of the trace: its prompt, and how many tokens follow."""

    prompt: list[int]
    n_decoded: int


def requests_of(path: Path, most: int | None) -> Iterable[Asked]:
    with gzip.open(path, "rt") as lines:
        for number, line in enumerate(lines):
            if number == most:
                return
            entry = json.loads(line)
            first = np.array(entry["hash_ids"], np.int64) * HASH_TOKENS
            tokens = (first[:, None] + np.arange(HASH_TOKENS)).reshape(-1)[: entry["input_length"]]
            yield Asked(tokens.tolist(), max(1, entry["output_length"]))


def run(requests: Iterable[Asked], sizes: Sizes) -> dict[str, Any]:
    """Serve all requests; what was hit, and how long it took."""
    engine = Engine(sizes)
    scheduler, stats = engine.scheduler, PrefixCacheStats()
    gc.collect()
    gc.freeze()
    scheduling = updating = adding = 0.0
    n_steps = n_preempted = n_added = token = 0
    ahead = iter(requests)
    while True:
        while len(scheduler.waiting) < MOST_WAITING and (asked := next(ahead, None)) is not None:
            started = thread_time()
            engine.add(str(n_added), *asked)
            adding += thread_time() - started
            engine.worker.texts.clear()  # no worker here
            n_added += 1
        if not scheduler.has_requests():
            break
        started = thread_time()
        output = scheduler.schedule()
        scheduling += thread_time() - started
        n_preempted += len(output.preempted_req_ids)
        sampled: list[list[int]] = []
        for name in output.num_scheduled_tokens:
            request = scheduler.requests[name]
            token += 1
            sampled.append([] if request.is_prefill_chunk else [1 << 30 | token % (1 << 29)])
        done = ModelRunnerOutput(
            req_ids=list(output.num_scheduled_tokens),
            req_id_to_index={name: at for at, name in enumerate(output.num_scheduled_tokens)},
            sampled_token_ids=sampled,
        )
        started = thread_time()
        told = scheduler.update_from_output(output, done)
        updating += thread_time() - started
        n_steps += 1
        for of_client in told.values():
            if of_client.scheduler_stats is not None:
                new = of_client.scheduler_stats.prefix_cache_stats
                stats.queries += new.queries
                stats.hits += new.hits
    return {
        "manager": type(engine.manager).__name__,
        "hit %": 100 * stats.hits / stats.queries,
        "schedule us": 1e6 * scheduling / n_steps,
        "update us": 1e6 * updating / n_steps,
        "add us": 1e6 * adding / n_added,
        "preemptions": n_preempted,
        "steps": n_steps,
    }


def forked(given: argparse.Namespace, sizes: Sizes, settings: ManagerSettings | None) -> Any:
    """The same in a process of its own; with vLLM's own manager where no settings are given."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        if settings is not None:
            put_in(settings)
        with os.fdopen(writer, "w") as told:
            json.dump(run(requests_of(given.trace, given.requests), sizes), told)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        found = told.read()
    os.waitpid(child, 0)
    return json.loads(found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m plugins.vllm.tests.scheduling")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--tokens", nargs="+", default=["1M"], help="tokens of the pool")
    parser.add_argument("--managers", nargs="+", default=["vllm", "lru", "density"])
    parser.add_argument("--requests", type=int, help="at most so many of the trace")
    parser.add_argument("--reserve", type=int, default=ManagerSettings().reserve)
    parser.add_argument("--window", type=int, help="of a second group, with a quarter more blocks")
    given = parser.parse_args()
    print(
        f"{given.trace.name}, {given.requests or 'all'} requests, blocks of {BLOCK_SIZE}, steps of "
        f"{STEP_TOKENS} tokens, window {given.window}, reserve {given.reserve}, "
        f"Python {sys.version.split()[0]}"
    )
    print("| pool | manager | hit % | schedule | update | add | preemptions | steps |")
    print("|---|---|---|---|---|---|---|---|")
    for tokens in given.tokens:
        n_blocks = parse_tokens(tokens) // BLOCK_SIZE
        sizes = Sizes(
            n_blocks=1 + n_blocks + (n_blocks // 4 if given.window else 0),
            windows=(None, given.window) if given.window else (None,),
            block_size=BLOCK_SIZE,
            step_tokens=STEP_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
        )
        for name in given.managers:
            own = name == "vllm"
            settings = None if own else ManagerSettings(policy=name, reserve=given.reserve)
            found = forked(given, sizes, settings)
            if own is (found["manager"] == "KvgraftCacheManager"):
                raise SystemExit(f"{name}: vLLM made a {found['manager']}")
            print(
                f"| {tokens} | {'vLLM' if own else f'kvgraft `{name}`'} | {found['hit %']:.2f} "
                f"| {found['schedule us']:.0f} | {found['update us']:.0f} | {found['add us']:.0f} "
                f"| {found['preemptions']} | {found['steps']} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
