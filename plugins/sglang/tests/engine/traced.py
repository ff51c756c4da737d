"""A trace through SGLang's scheduling without a model: SGLang's own trees, and kvgraft's.

    PYTHONPATH=FILES python -m plugins.sglang.tests.engine.traced TRACE --tokens 1M 3M

FILES are SGLang's Python files as `make test-sglang` fetches them. Requests come by the trace's
clock, or as `--users` come back after every answer, with the outputs that the trace lets guess; a
step lasts as long as its tokens take. All of that is as in `kvgraft replay`.

Each tree runs in a process of its own, one after the other. Hits are in percent of the prompts'
tokens, as SGLang counts them. Times are CPU time of all that SGLang's scheduler does for its
requests: matches, admission, slots, rows and publication, in microseconds a request.
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

from plugins.sglang.tests.engine.scheduling import Scheduler

from kvgraft.sizes import parse_tokens
from kvgraft_replay.arrivals import ClosedLoop, OpenLoop
from kvgraft_replay.detect import open_workload
from kvgraft_replay.engine import EngineModel
from kvgraft_replay.limit import choose_sessions

MODEL = EngineModel()
TREES = {
    "density": ("kvgraft", '{"policy": "density"}', None),
    "lru": ("kvgraft", '{"policy": "lru"}', None),
    "rust": (None, "", "rust"),
    "python": (None, "", "python"),
}


def run(trace: Path, tree: str, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """Serve all requests of a trace; what was hit, and how long it took."""
    backend, settings, core = TREES[tree]
    os.environ["KVGRAFT_SGLANG"] = settings
    workload = open_workload(trace)
    most = options.max_context - 1
    chosen = [workload.requests[: options.requests]]
    if options.users:
        chosen = list(choose_sessions(workload, options.users, options.requests).chosen)
    sessions = [
        [each for each in session if each.prompt_tokens + each.output_tokens < most]
        for session in chosen
    ]
    requests = [each for session in sessions for each in session]
    arrivals: Any = OpenLoop(requests)
    if options.users:
        arrivals = ClosedLoop([session for session in sessions if session], options.users)
    scheduler = Scheduler(
        backend,
        tokens,
        page_size=options.page_size,
        window=options.window,
        window_tokens=options.window_tokens or 0,
        chunk=8192,
        most_running=options.running,
        max_context=options.max_context,
        checks=False,
        core=core,
    )
    known, spent, now_s, n_steps = {}, 0.0, 0.0, 0
    while True:
        for arrived in arrivals.take(now_s):
            name, ids = str(arrived.index), arrived.token_ids()
            prompt, n_new = arrived.prompt_tokens, max(1, arrived.output_tokens)
            answer = [*ids[prompt:].tolist(), 0]
            started = thread_time()
            scheduler.add(name, ids[:prompt].tolist(), n_new, answer)
            spent += thread_time() - started
            known[name] = arrived
        if not (scheduler.waiting or scheduler.running or scheduler.chunked):
            due = arrivals.next_s()
            if due is None:
                break
            now_s = due
            continue
        before = scheduler.computed
        started = thread_time()
        scheduler.step()
        spent += thread_time() - started
        n_steps += 1
        of_tokens = (scheduler.computed - before) / MODEL.prefill_tokens_s
        now_s += max(of_tokens, 1 / MODEL.decode_tokens_s)
        for req in scheduler.ended:
            scheduler.answers.pop(req.rid)
            arrivals.ended(known.pop(req.rid), now_s)
        scheduler.ended.clear()
    return {
        "tree": tree,
        "tokens": tokens,
        "hit %": round(100 * scheduler.hits / scheduler.asked, 2),
        "CPU us a request": round(1e6 * spent / len(requests)),
        "retractions": scheduler.retractions,
        "steps": n_steps,
        "requests": len(requests),
    }


def forked(*given: Any) -> dict[str, Any]:
    """`run` in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        gc.collect()
        gc.freeze()
        with os.fdopen(write, "w") as out:
            json.dump(run(*given), out)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        text = said.read()
    os.waitpid(child, 0)
    if not text:
        sys.exit("a tree failed")
    found: dict[str, Any] = json.loads(text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--tokens", nargs="+", type=parse_tokens, default=[1_000_000])
    parser.add_argument("--trees", nargs="+", choices=TREES, default=[*TREES])
    parser.add_argument("--requests", type=int)
    parser.add_argument("--users", type=int)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--window", type=int)
    parser.add_argument("--window-tokens", type=parse_tokens)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--max-context", type=int, default=1 << 18)
    options = parser.parse_args()
    for tokens in options.tokens:
        for tree in options.trees:
            print(json.dumps(forked(options.trace, tree, tokens, options)), flush=True)


if __name__ == "__main__":
    main()
