"""What a replay looked like over time: samples, sources, a snapshot of the tree."""

from __future__ import annotations

from kvgraft.cache import Cache
from kvgraft.replay.engine import ReplayEngine
from kvgraft.replay.hits import Hits
from kvgraft.replay.running import Job
from kvgraft.report.schema import (
    Occupancy,
    Residency,
    Source,
    TierOccupancy,
    TimelinePoint,
    TreeNode,
    TreeSnapshot,
)
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.node import Cell, Node
from kvgraft.types import Tier

__all__ = ["Timeline", "occupancy", "snapshot"]

MAX_POINTS = 120
MAX_TREE_NODES = 600


class Timeline:
    """Collects points while a replay runs.

    Args:
        cache: what is watched.
        expected: how many requests will end, to space the points.
    """

    def __init__(self, cache: Cache, expected: int) -> None:
        self.cache = cache
        self.points: list[TimelinePoint] = []
        self.sources: list[Source] = []
        self.tree: TreeSnapshot = {"nodes": [], "truncated": 0}
        self._every = max(1, expected // MAX_POINTS)
        self._fullest = -1
        self._last = (0, 0, 0, 0)

    def matched(self, job: Job, now_s: float, hits: Hits) -> None:
        """A request was matched and admitted."""
        found = hits.device + hits.host + hits.storage
        self.sources.append(
            {
                "index": job.trace.index,
                "time_s": now_s,
                "device": hits.device,
                "host": hits.host,
                "storage": hits.storage,
                "computed": job.trace.prompt_tokens - found,
            }
        )

    def ended(self, engine: ReplayEngine, n_ended: int) -> None:
        """A request ended; now and then that makes a point."""
        if n_ended % self._every:
            return
        totals = engine.totals
        now = (totals.requests, totals.input_tokens, totals.hits, totals.storage_hits)
        requests, new_tokens, hits, stored = (a - b for a, b in zip(now, self._last))
        self._last = now
        self.points.append(
            {
                "time_s": engine.now_s,
                "requests": requests,
                "token_hit_rate": _share(hits, new_tokens),
                "storage_hit_rate": _share(stored, new_tokens),
                "cumulative_hit_rate": _share(totals.hits, totals.input_tokens),
                "running": engine.n_running,
                "waiting": len(engine.waiting) + len(engine.fetching),
                "occupancy": occupancy(self.cache),
            }
        )
        fullness = self.cache.tree.n_nodes
        if fullness > self._fullest:
            self._fullest = fullness
            self.tree = snapshot(self.cache)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _tier(ledger: Ledger) -> TierOccupancy:
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
        track.name: {
            Tier.DEVICE.value: _tier(track.device),
            Tier.HOST.value: _tier(track.host) if track.host is not None else None,
        }
        for track in cache.tree.tracks
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
                        track.name: _residency(node.cells[track.index])
                        for track in cache.tree.tracks
                    },
                    "hits": node.hits,
                    "pinned": any(cell.device_pins for cell in node.cells),
                }
            )
            below += node.each_child()
        level = sorted(below, key=lambda node: (-node.hits, node.ident))
    total = cache.tree.n_nodes + len(cache.tree.roots)
    return {"nodes": nodes, "truncated": total - len(nodes)}
