"""A replay result as a real run leaves it: multi-turn chats over two system prompts.

Three components of different reach (full, window, state), a host tier for the first two, and a
store that failed now and then. Sums agree with each other as the schema promises: sources add up to
the totals, ledgers to capacity.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvgraft_replay.report.schema import (
        Occupancy,
        ReplayResult,
        Residency,
        Source,
        TierOccupancy,
        TimelinePoint,
        TreeNode,
    )

N_REQUESTS = 640
END_S = 1_893.5
PAGE = 64


@pytest.fixture
def result() -> ReplayResult:
    """The same numbers each time, in a dictionary of the test's own."""
    rng = random.Random(7)
    sources = _sources(rng)
    device = sum(one["device"] for one in sources)
    host = sum(one["host"] for one in sources)
    storage = sum(one["storage"] for one in sources)
    computed = sum(one["computed"] for one in sources)
    unserved = sum(one["unserved"] for one in sources)
    saved = device + host + storage
    whole = saved + computed + unserved
    return {
        "kvgraft": "0.1.0",
        "computed_tokens_p90": 1_900,
        "workload": {
            "name": "chat-two-system-prompts.jsonl",
            "format": "mooncake",
            "requests": 655,
            "input_tokens": whole + 61_237,
            "output_tokens": 268_411,
        },
        "settings": {
            "page_size": PAGE,
            "device_tokens": 262_144,
            "host_tokens": 1_048_576,
            "write_policy": "write_through",
            "eviction_policy": "lru",
            "components": {
                "full": {},
                "swa": {"window": 4_096},
                "mamba": {"states": 192, "checkpoint_tokens": 1_024},
            },
            "device": "cpu",
            "verify": "full",
            "seed": 0,
            "concurrency": "users:8",
        },
        "notices": ["2 of 653 requests were rejected"],
        "requests": N_REQUESTS,
        "served": N_REQUESTS - 2,
        "input_tokens": whole,
        "output_tokens": 261_903,
        "token_hit_rate": saved / whole,
        "hit_tokens": {"device": device, "host": host, "storage": storage},
        "saved_tokens": saved,
        "computed_tokens": computed,
        "unserved_tokens": unserved,
        "recomputed_tokens": 5_303,
        "namespaces": {},
        "component_hits": {
            "full": {
                "device_slots": device // PAGE,
                "host_slots": host // PAGE,
                "storage_slots": storage // PAGE,
            },
            "swa": {"device_slots": 27_911, "host_slots": 4_417, "storage_slots": 1_009},
            "mamba": {"device_slots": 571, "host_slots": 0, "storage_slots": 0},
        },
        "storage": {
            "prefetches": {
                "started": 655,
                "shared": 31,
                "delivered": 83,
                "in vain": 572,
                "shrunk": 5,
                "tokens": storage + 4_288,
            },
            "in_vain": {
                "N tokens to look for are below the threshold of N": 467,
                "nothing of full, swa is stored": 97,
                "the store did not answer in time or is down": 8,
            },
            "stores": {
                "nodes": 1_289,
                "slots": 13_619,
                "slots failed": 64,
                "dropped, too many in flight": 3,
            },
            "calls": {
                "exists": {"ok": 2_203, "miss": 40_127, "timeout": 512, "timeouts": 2},
                "get": {"ok": 2_161, "corrupt": 7, "timeout": 36},
                "set": {"ok": 13_613, "known": 1_747, "down": 62, "errors": 4},
                "breaker": {"trials": 9},
            },
            "breaker": "half-open",
            "abandoned_threads": 1,
            "last_error": "set: OSError: [Errno 28] No space left on device",
            "before": {
                "records": 811,
                "bytes": 53_477_377,
                "capacity_bytes": 1_073_741_827,
                "details": {},
            },
            "after": {
                "records": 12_677,
                "bytes": 831_520_771,
                "capacity_bytes": 1_073_741_829,
                "details": {},
            },
        },
        "load_backs": {
            "started": 187,
            "completed": 183,
            "failed": 4,
            "shared": 23,
            "skipped_recompute": 17,
            "slots": {"full": host // PAGE, "swa": 4_409},
        },
        "backups": {
            "started": 1_307,
            "completed": 1_301,
            "failed": 6,
            "slots": {"full": 12_703, "swa": 9_839},
            "waits": 29,
        },
        "evictions": {
            "full": {"device": {"demoted": 8_231, "deleted": 97}, "host": {"leaf": 1_213}},
            "swa": {
                "device": {"demoted": 5_113, "deleted": 347, "cascade": 1_033},
                "host": {"leaf": 811, "cascade": 409},
            },
            "mamba": {"device": {"deleted": 433, "cascade": 59}, "host": {}},
        },
        "admissions": 653,
        "deferrals": 1_289,
        "retractions": 13,
        "rejections": 2,
        "copies_on_write": 569,
        "checkpoints": 1_847,
        "candidates": [
            {
                "component": "full",
                "tier": "device",
                "use_class": 2,
                "words": "half of it seen before",
                "slots": 1234,
                "lowest_score": 0.125,
                "highest_score": 0.5,
            }
        ],
        "resume_points": {
            "made": {"repeat": 633, "branch": 41, "end": 640, "grid": 219},
            "skipped": {"repeat": 0, "branch": 3, "end": 0, "grid": 17},
            "used": {"repeat": 27, "branch": 88, "end": 402, "grid": 12},
            "lost": {"repeat": 310, "branch": 4, "end": 129, "grid": 73},
            "slots": {
                "swa": {"kept": 1_311, "left_behind": 742},
                "mamba": {"kept": 151, "left_behind": 38},
            },
        },
        "out_of_memory": 0,
        "payload_mismatches": 0,
        "payloads_verified": 48_823,
        "ledger_violations": 0,
        "first_problem": "",
        "cpu_us_per_request": {
            "total": {"p50": 96.4, "p99": 412.7, "mean": 118.9},
            "match": {"p50": 17.3, "p99": 52.1, "mean": 19.8},
            "admit": {"p50": 8.2, "p99": 21.6, "mean": 9.1},
            "load_back": {"p50": 0.0, "p99": 88.5, "mean": 7.4},
            "allocate": {"p50": 11.7, "p99": 37.9, "mean": 13.2},
            "checkpoint": {"p50": 23.1, "p99": 71.3, "mean": 26.6},
            "finish": {"p50": 14.9, "p99": 46.8, "mean": 17.1},
            "evict": {"p50": 6.1, "p99": 143.2, "mean": 15.3},
            "poll": {"p50": 1.8, "p99": 9.7, "mean": 2.3},
        },
        "wall_s": 4.37,
        "virtual_s": END_S,
        "timeline": _timeline(rng, sources),
        "sources": sources,
        "tree": {"nodes": _tree(rng), "truncated": 41},
    }


def _sources(rng: random.Random) -> list[Source]:
    turns = [0] * 96
    context = [2_048 if chat % 3 else 1_536 for chat in range(96)]
    found: list[Source] = []
    for index in range(N_REQUESTS):
        chat = rng.randrange(max(0, index // 8 - 12), min(96, index // 8 + 10))
        new = rng.randrange(90, 900)
        cached = context[chat] // PAGE * PAGE if index > 3 else 0
        if cached and turns[chat] == 0:
            cached = 2_048 if chat % 3 else 1_536
        host = 0
        if turns[chat] > 1 and rng.random() < 0.28:
            host = (cached - 1_536) // PAGE * PAGE
        if turns[chat] > 2 and rng.random() < 0.07:
            cached, host = 1_536, 0
        storage = host // 3 // PAGE * PAGE if chat % 5 == 0 else 0
        whole = context[chat] + new
        rejected = index in (311, 499)
        if rejected:
            cached = host = storage = 0
        found.append(
            {
                "index": index,
                "time_s": round(END_S * (index / N_REQUESTS) ** 1.05, 3),
                "device": cached - host,
                "host": host - storage,
                "storage": storage,
                "computed": 0 if rejected else whole - cached,
                "unserved": whole if rejected else 0,
            }
        )
        context[chat] = whole + rng.randrange(50, 700)
        turns[chat] += 1
        if turns[chat] > 9:
            turns[chat], context[chat] = 0, 1_536
    return found


def _pool(rng: random.Random, capacity: int, fill: float, pinned: float) -> TierOccupancy:
    used = int(capacity * min(fill + rng.uniform(-0.008, 0.008), 0.995))
    used = max(used, 0)
    held = min(int(capacity * pinned * rng.uniform(0.8, 1.2)), used)
    private = min(int(capacity * pinned * rng.uniform(0.2, 0.5)), used - held)
    in_flight = min(int(capacity * rng.choice([0, 0, 0.01, 0.04])), used - held - private)
    return {
        "capacity": capacity,
        "free": capacity - used,
        "evictable": used - held - private - in_flight,
        "pinned": held,
        "private": private,
        "in_flight": in_flight,
    }


def _timeline(rng: random.Random, sources: list[Source]) -> list[TimelinePoint]:
    points: list[TimelinePoint] = []
    n_points, hit, whole = 160, 0, 0
    per_point = N_REQUESTS // n_points
    for step in range(n_points):
        share = (step + 1) / n_points
        some = sources[step * per_point : (step + 1) * per_point]
        hit_here = sum(one["device"] + one["host"] + one["storage"] for one in some)
        whole_here = hit_here + sum(one["computed"] + one["unserved"] for one in some)
        hit, whole = hit + hit_here, whole + whole_here
        busy = 0.16 + 0.09 * math.sin(9 * share) + rng.gauss(0, 0.015)
        filled = 1 - math.exp(-7 * share)
        waiting = max(0, int(6 * math.sin(9 * share) + rng.gauss(0, 1.4)))
        occupancy: dict[str, Occupancy] = {
            "full": {
                "device": _pool(rng, 4_096, 1.03 * filled, busy),
                "host": _pool(rng, 16_384, 0.9 * share**1.3, 0.02),
            },
            "swa": {
                "device": _pool(rng, 2_048, 1.1 * filled, 1.3 * busy),
                "host": _pool(rng, 8_192, 1.2 * share, 0.015),
            },
            "mamba": {"device": _pool(rng, 192, 1.08 * filled, 0.3 * busy), "host": None},
        }
        points.append(
            {
                "time_s": some[-1]["time_s"],
                "requests": per_point,
                "token_hit_rate": hit_here / whole_here,
                "storage_hit_rate": sum(one["storage"] for one in some) / whole_here,
                "cumulative_hit_rate": hit / whole,
                "running": 8 if waiting else rng.randrange(5, 9),
                "waiting": waiting,
                "occupancy": occupancy,
            }
        )
    return points


def _tree(rng: random.Random) -> list[TreeNode]:
    nodes: list[TreeNode] = [_node(0, None, 0, 0, ("both", "none", "none"), 0)]

    def add(parent: TreeNode, n_tokens: int, cold: float, hits: int, *, leaf: bool) -> TreeNode:
        full: Residency = "both" if rng.random() > cold else "host"
        if leaf and full == "both" and rng.random() < 0.3:
            full = "device"
        window: Residency = "none"
        if leaf or rng.random() < 0.25:
            window = full
        elif rng.random() < 0.3:
            window = "host"
        state: Residency = "device" if full != "host" and rng.random() < 0.5 else "none"
        start = parent["end"]
        kinds = (full, window, state)
        node = _node(len(nodes), parent["id"], start, start + n_tokens, kinds, hits)
        nodes.append(node)
        return node

    for prompt in (2_048, 1_536):
        system = add(nodes[0], prompt, 0.0, 300, leaf=False)
        for chat in range(44):
            cold = 0.75 if chat < 18 else 0.12
            tip = system
            n_turns = min(10, 1 + int(rng.expovariate(0.28)))
            for turn in range(n_turns):
                size = rng.randrange(3, 22) * PAGE
                tip = add(tip, size, cold, n_turns - turn, leaf=turn == n_turns - 1)
                if turn and rng.random() < 0.12:
                    add(tip, rng.randrange(2, 9) * PAGE, 0.5, 1, leaf=True)
    by_id = {node["id"]: node for node in nodes}
    for node in nodes[-1:-60:-9]:
        above: TreeNode | None = node
        while above is not None:
            above["pinned"] = True
            for name, held in above["residency"].items():
                if held == "host" and name == "full":
                    above["residency"][name] = "both"
            above = None if above["parent"] is None else by_id[above["parent"]]
    return nodes


def _node(
    number: int,
    parent: int | None,
    start: int,
    end: int,
    held: tuple[Residency, Residency, Residency],
    hits: int,
) -> TreeNode:
    residency = dict(zip(("full", "swa", "mamba"), held, strict=True))
    return {
        "id": number,
        "parent": parent,
        "start": start,
        "end": end,
        "residency": residency,
        "hits": hits,
        "pinned": False,
    }
