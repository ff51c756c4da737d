"""A replay over time: samples, sources, and a snapshot of the tree."""

from __future__ import annotations

from typing import NamedTuple

from kvgraft.cache import Cache
from kvgraft.tree.ledger import PoolBooks
from kvgraft.tree.node import Cell, Node
from kvgraft.types import Tier
from kvgraft_replay.engine import ReplayEngine
from kvgraft_replay.report.schema import (
    Occupancy,
    Residency,
    Source,
    TierOccupancy,
    TimelinePoint,
    TreeNode,
    TreeSnapshot,
)
from kvgraft_replay.running import Job

__all__ = ["Timeline", "occupancy", "snapshot"]

MAX_POINTS = 240
"""Most samples; at this number every other one is dropped, and the interval doubles."""

FIRST_INTERVAL_S = 2.0**-6
"""A power of two, so that multiples of it are exact."""

N_TREES = 120
"""How often the size of the tree is checked, over all requests that end."""

MAX_TREE_NODES = 600


class _Sample(NamedTuple):
    """The totals, the queues and the pools at one moment."""

    time_s: float
    requests: int
    input_tokens: int
    hits: int
    storage_hits: int
    running: int
    waiting: int
    occupancy: dict[str, Occupancy]


class Timeline:
    """Collects samples while a replay runs, at equal intervals of the virtual clock.

    Args:
        cache: the cache to sample.
        expected: how many requests will end, which spaces the checks of the tree.
    """

    def __init__(self, cache: Cache, expected: int) -> None:
        self.cache = cache
        self.tree: TreeSnapshot = {"nodes": [], "truncated": 0}
        self._sources: dict[int, Source] = {}
        self._samples: list[_Sample] = []
        self._interval_s = FIRST_INTERVAL_S
        self._every = max(1, expected // N_TREES)
        self._fullest = -1

    @property
    def sources(self) -> list[Source]:
        """The sources of each request's tokens, in the order of first admission."""
        return list(self._sources.values())

    def counted(self, job: Job, now_s: float) -> None:
        """A request's part of the totals began or changed."""
        index, prompt = job.trace.index, job.trace.prompt_tokens
        hits = job.hits
        device, host, storage = (hits.device, hits.host, hits.storage) if hits else (0, 0, 0)
        left = prompt - device - host - storage
        before = self._sources.get(index)
        self._sources[index] = {
            "index": index,
            "time_s": now_s if before is None else before["time_s"],
            "device": device,
            "host": host,
            "storage": storage,
            "computed": 0 if job.unserved else left,
            "unserved": left if job.unserved else 0,
        }

    def move(self, engine: ReplayEngine, to_s: float) -> None:
        """The clock is about to move to `to_s`; nothing changes until then."""
        while to_s >= (MAX_POINTS + 1) * self._interval_s:
            self._samples = self._samples[1::2]
            self._interval_s *= 2
        due = int(to_s / self._interval_s) - len(self._samples)
        if due > 0:
            now = self._sample(engine, 0.0)
            first = len(self._samples) + 1
            self._samples += [
                now._replace(time_s=number * self._interval_s)
                for number in range(first, first + due)
            ]

    def points(self, engine: ReplayEngine) -> list[TimelinePoint]:
        """One point per interval; the last one ends with the replay and may be shorter."""
        samples = [*self._samples, self._sample(engine, engine.now_s)]
        if len(samples) > 1 and samples[-1].time_s == samples[-2].time_s:
            del samples[-2]
        befores = [_Sample(0.0, 0, 0, 0, 0, 0, 0, {}), *samples]
        return [_point(before, now) for before, now in zip(befores, samples)]

    def _sample(self, engine: ReplayEngine, time_s: float) -> _Sample:
        totals = engine.totals
        return _Sample(
            time_s,
            totals.requests,
            totals.input_tokens,
            totals.hits,
            totals.storage_hits,
            engine.n_running,
            len(engine.waiting) + len(engine.fetching),
            occupancy(self.cache),
        )

    def ended(self, n_ended: int) -> None:
        """A request ended; sometimes checks the size of the tree."""
        if n_ended % self._every:
            return
        fullness = self.cache.tree.n_nodes
        if fullness > self._fullest:
            self._fullest = fullness
            self.tree = snapshot(self.cache)


def _point(before: _Sample, now: _Sample) -> TimelinePoint:
    new_tokens = now.input_tokens - before.input_tokens
    return {
        "time_s": now.time_s,
        "requests": now.requests - before.requests,
        "token_hit_rate": _share(now.hits - before.hits, new_tokens),
        "storage_hit_rate": _share(now.storage_hits - before.storage_hits, new_tokens),
        "cumulative_hit_rate": _share(now.hits, now.input_tokens),
        "running": now.running,
        "waiting": now.waiting,
        "occupancy": now.occupancy,
    }


def _share(part: int, whole: int) -> float:
    # A retracted request can lose more hits than the interval has.
    return max(0, part) / whole if whole else 0.0


def _tier(ledger: PoolBooks) -> TierOccupancy:
    counts = ledger.counts()
    return {
        "capacity": counts["capacity"],
        "free": counts["free"],
        "evictable": counts["evictable"],
        "pinned": counts["pinned"],
        "private": counts["private"],
        "in_flight": counts["in_flight"],
    }


def occupancy(cache: Cache) -> dict[str, Occupancy]:
    """Every pool's ledger now."""
    return {
        component.name: {
            Tier.DEVICE.value: _tier(component.device),
            Tier.HOST.value: _tier(component.host) if component.host is not None else None,
        }
        for component in cache.tree.components
    }


def _residency(cell: Cell) -> Residency:
    if cell.device is not None:
        return "both" if cell.host is not None else "device"
    return "host" if cell.host is not None else "none"


def snapshot(cache: Cache) -> TreeSnapshot:
    """The tree's upper part: roots first, busiest children first, a bounded number of nodes."""
    nodes: list[TreeNode] = []
    level: list[Node] = list(cache.tree.roots.values())
    known: set[int] = set()
    while level and len(nodes) < MAX_TREE_NODES:
        below: list[Node] = []
        for node in level:
            if len(nodes) == MAX_TREE_NODES:
                break
            parent = node.parent.ident if node.parent is not None else None
            known.add(node.ident)
            nodes.append(
                {
                    "id": node.ident,
                    "parent": parent,
                    "start": node.start * cache.tree.page_size,
                    "end": node.end * cache.tree.page_size,
                    "residency": {
                        component.name: _residency(node.cells[component.index])
                        for component in cache.tree.components
                    },
                    "hits": node.hits,
                    "pinned": any(cell.device_pins for cell in node.cells),
                }
            )
            below += node.each_child()
        level = sorted(below, key=lambda node: (-node.hits, node.ident))
    total = cache.tree.n_nodes + len(cache.tree.roots)
    return {"nodes": nodes, "truncated": total - len(nodes)}
