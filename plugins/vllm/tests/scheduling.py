"""A trace through vLLM's scheduler without a model: vLLM's cache manager, and kvgraft's.

    PYTHONPATH=FILES python -m plugins.vllm.tests.scheduling TRACE --tokens 1M 3M

FILES are vLLM's Python files as `make engine-files` fetches them. A pool's tokens are those of all
its blocks, which KV cache groups share. Requests come by the trace's
clock, or as `--users` come back after every answer, with the outputs that the trace lets guess, all
as in `kvgraft replay`. A step lasts as long as its tokens take at the rate at which `kvgraft
replay` computes prompts, and at least as long as it lets an output token take.

Each manager runs in a process of its own, one after the other. Hits are vLLM's own count. Times
are CPU time of `schedule()` and `update_from_output()`, in microseconds a step, and of adding a
request, with vLLM's hashes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from pathlib import Path
from time import thread_time
from typing import Any

from plugins.vllm.tests.schedulers import Engine, Sizes
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.outputs import ModelRunnerOutput

from kvgraft.sizes import parse_tokens
from kvgraft_replay.arrivals import Arrivals, ClosedLoop, OpenLoop
from kvgraft_replay.detect import open_workload
from kvgraft_replay.engine import EngineModel
from kvgraft_replay.limit import choose_sessions
from kvgraft_replay.workload import TraceRequest, Workload
from kvgraft_vllm.block_layout import STATE, LooksBack
from kvgraft_vllm.manager import put_in
from kvgraft_vllm.manager_settings import ManagerSettings

BLOCK_SIZE = 16
STEP_TOKENS = 8192
MAX_MODEL_LEN = 262_144
MAX_NUM_SEQS = 256
MODEL = EngineModel()


def requests_of(
    workload: Workload, users: int | None, most: int | None
) -> tuple[list[TraceRequest], Arrivals]:
    """The requests that vLLM takes, those of the longest context left out, and their source."""
    chosen = [workload.requests[:most]]
    if users is not None:
        chosen = list(choose_sessions(workload, users, most).chosen)
    sessions = [
        [each for each in session if each.prompt_tokens + each.output_tokens < MAX_MODEL_LEN]
        for session in chosen
    ]
    requests = [each for session in sessions for each in session]
    if users is None:
        return requests, OpenLoop(requests)
    return requests, ClosedLoop([session for session in sessions if session], users)


class Playing:
    """A scheduler, and the requests that it was given: what each computes is known before."""

    def __init__(self, sizes: Sizes) -> None:
        self.engine = Engine(sizes)
        self.tokens: dict[str, tuple[TraceRequest, list[int]]] = {}
        self.adding = 0.0

    def add(self, request: TraceRequest) -> None:
        """Give the scheduler a request."""
        name, tokens = str(request.index), request.token_ids().tolist()
        self.tokens[name] = request, tokens
        started = thread_time()
        self.engine.add(name, tokens[: request.prompt_tokens], max(1, request.output_tokens))
        self.adding += thread_time() - started
        self.engine.worker.texts.clear()  # no worker here

    def computed(self, output: Any) -> ModelRunnerOutput:
        """The tokens that a model would have sampled."""
        sampled: list[list[int]] = []
        for name in output.num_scheduled_tokens:
            request = self.engine.scheduler.requests[name]
            tokens = self.tokens[name][1]
            following = tokens[request.num_tokens : request.num_tokens + 1] or [0]
            sampled.append([] if request.is_prefill_chunk else following)
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
        )


def run(arrivals: Arrivals, sizes: Sizes) -> dict[str, Any]:
    """Serve all requests; what was hit, and how long it took."""
    playing, stats = Playing(sizes), PrefixCacheStats()
    scheduler = playing.engine.scheduler
    scheduling = updating = now_s = 0.0
    n_steps = n_preempted = n_added = n_running = 0
    while True:
        for arrived in arrivals.take(now_s):
            playing.add(arrived)
            n_added += 1
        if not scheduler.has_requests():
            due = arrivals.next_s()
            if due is None:
                break
            now_s = due
            continue
        started = thread_time()
        output = scheduler.schedule()
        scheduling += thread_time() - started
        n_preempted += len(output.preempted_req_ids)
        n_running += len(scheduler.running)
        n_steps += 1
        done = playing.computed(output)
        started = thread_time()
        told = scheduler.update_from_output(output, done)
        updating += thread_time() - started
        of_tokens = output.total_num_scheduled_tokens / MODEL.prefill_tokens_s
        now_s += max(of_tokens, 1 / MODEL.decode_tokens_s)
        for of_client in told.values():
            for said in of_client.outputs:
                if said.finished:
                    arrivals.ended(playing.tokens.pop(said.request_id)[0], now_s)
            if of_client.scheduler_stats is not None:
                new = of_client.scheduler_stats.prefix_cache_stats
                stats.queries += new.queries
                stats.hits += new.hits
    return {
        "manager": type(playing.engine.manager).__name__,
        "hit %": 100 * stats.hits / stats.queries,
        "schedule us": 1e6 * scheduling / n_steps,
        "update us": 1e6 * updating / n_steps,
        "add us": 1e6 * playing.adding / n_added,
        "preemptions": n_preempted,
        "steps": n_steps,
        "running": n_running / n_steps,
    }


def forked(arrivals: Arrivals, sizes: Sizes, settings: ManagerSettings | None) -> Any:
    """The same in a process of its own; with vLLM's own manager where no settings are given."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        if settings is not None:
            put_in(settings)
        gc.collect()
        gc.freeze()
        with os.fdopen(writer, "w") as told:
            json.dump(run(arrivals, sizes), told)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        found = told.read()
    os.waitpid(child, 0)
    return json.loads(found)


def group(text: str) -> LooksBack:
    """A KV cache group: `full`, `state`, or the tokens of a window."""
    return None if text == "full" else STATE if text == STATE else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m plugins.vllm.tests.scheduling")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--tokens", nargs="+", default=["1M"], help="tokens of the pool")
    parser.add_argument("--managers", nargs="+", default=["vllm", "lru", "density"])
    parser.add_argument("--users", type=int, help="a closed loop; by default the trace's clock")
    parser.add_argument("--requests", type=int, help="at most so many of the trace")
    parser.add_argument("--reserve", type=int, default=ManagerSettings().reserve)
    parser.add_argument(
        "--groups", nargs="+", default=["full"], help="full, state, or a window's tokens, each"
    )
    parser.add_argument("--block-size", type=int, default=BLOCK_SIZE)
    given = parser.parse_args()
    workload = open_workload(given.trace, limit=given.requests, users=given.users)
    requests, arrivals = requests_of(workload, given.users, given.requests)
    print(
        f"{given.trace.name}, {len(requests)} requests, users {given.users}, blocks of "
        f"{given.block_size}, steps of {STEP_TOKENS} tokens, groups {given.groups}, reserve "
        f"{given.reserve}, Python {sys.version.split()[0]}"
    )
    print("| pool | manager | hit % | schedule | update | add | preemptions | steps | running |")
    print("|---|---|---|---|---|---|---|---|---|")
    for tokens in given.tokens:
        sizes = Sizes(
            n_blocks=1 + parse_tokens(tokens) // given.block_size,
            windows=tuple(map(group, given.groups)),
            block_size=given.block_size,
            step_tokens=STEP_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
        )
        for name in given.managers:
            own = name == "vllm"
            settings = None if own else ManagerSettings(policy=name, reserve=given.reserve)
            found = forked(arrivals, sizes, settings)
            if own is (found["manager"] == "KvgraftCacheManager"):
                raise SystemExit(f"{name}: vLLM made a {found['manager']}")
            print(
                f"| {tokens} | {'vLLM' if own else f'kvgraft `{name}`'} | {found['hit %']:.2f} "
                f"| {found['schedule us']:.0f} | {found['update us']:.0f} | {found['add us']:.0f} "
                f"| {found['preemptions']} | {found['steps']} | {found['running']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
