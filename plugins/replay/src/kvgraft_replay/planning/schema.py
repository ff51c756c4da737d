"""The result of a plan as a plain dictionary: what `--json` writes and the reports read.

Fields are added within a major version, never renamed or removed.
"""

from __future__ import annotations

from typing import TypedDict

from kvgraft_replay.report.schema import HitTokens, Workload

__all__ = [
    "NOTICEABLE",
    "Curve",
    "CurvePoint",
    "Growth",
    "PlanResult",
    "PoolName",
    "PoolUse",
    "ReachUse",
    "SizeResult",
    "Split",
    "SplitTried",
    "Target",
]

NOTICEABLE = 0.001
"""A pool limits if a tenth more of it gains at least this share of the input tokens."""


class PoolName(TypedDict):
    """A pool by its component and tier."""

    component: str
    tier: str


class PoolUse(TypedDict):
    """One component's pool on one tier, at the end: in a budget its size follows its use.

    `tokens`: what its slots hold; 0 of states. `evicted`: slots that made room for others.
    """

    component: str
    tier: str
    slots: int
    tokens: int
    nbytes: int
    evicted: int


class ReachUse(TypedDict):
    """Bytes that the layers of one component keep on DEVICE.

    `keeps`: its reach, in words. `per`: `"token"` or `"state"`, of which one takes `nbytes` in all
    layers.
    """

    component: str
    n_layers: int
    keeps: str
    per: str
    nbytes: int


class SplitTried(TypedDict):
    """A split of the same bytes, with `points` times the resume points of the rule."""

    points: float
    token_hit_rate: float
    saved_tokens: int
    rejections: int


class Split(TypedDict):
    """How bytes were split among pools: the best split found, and those it was compared with.

    `points`: of the best one, which was replayed for all other numbers; 1 is the rule's.
    `gained_tokens`: prompt tokens saved beyond the rule's. `tried`: all, by `points`.
    """

    points: float
    gained_tokens: int
    tried: list[SplitTried]


class Growth(TypedDict):
    """One pool, a tenth larger: what a replay with it gains, all other pools as they were.

    `extra_nbytes`: what the tenth takes. `gained_tokens`: prompt tokens saved in addition; negative
    where it saved fewer.
    """

    component: str
    tier: str
    extra_nbytes: int
    gained_tokens: int
    token_hit_rate: float


class SizeResult(TypedDict):
    """A replay with one pair of sizes and one policy.

    `device` and `host` are the sizes as they were asked for, `_tokens` and `_nbytes` what they
    come to. `policy`: the eviction policy. `prefill_s_saved`: `saved_tokens` at the rate of the
    settings. `load_back_nbytes`: bytes copied from HOST to DEVICE instead. `lru_hit_rate`: of the
    exact curve at the size of DEVICE alone; None where there is none. `split`: None where the pools
    have equal tokens, or follow their use. `growth`: empty where it was
    not asked for. `limiting`: the pool whose tenth gains most; None where none gains a tenth of a
    point.
    """

    device: str
    host: str
    policy: str
    device_tokens: int
    host_tokens: int
    device_nbytes: int
    host_nbytes: int
    requests: int
    served: int
    input_tokens: int
    token_hit_rate: float
    hit_tokens: HitTokens
    saved_tokens: int
    prefill_s_saved: float
    load_back_nbytes: int
    deferrals: int
    retractions: int
    rejections: int
    lru_hit_rate: float | None
    pools: list[PoolUse]
    split: Split | None
    growth: list[Growth]
    limiting: PoolName | None
    out_of_memory: int
    ledger_violations: int
    first_problem: str


class CurvePoint(TypedDict):
    """A size of DEVICE alone and its token hit rate under LRU."""

    tokens: int
    nbytes: int
    token_hit_rate: float


class Curve(TypedDict):
    """The hit rate of every size of DEVICE alone under LRU, for requests one after another.

    `points` is empty, and `reason` says why, where components or arrivals allow no such curve.
    `needed_tokens`: the smallest size that forgets nothing of use; `highest_hit_rate` is its rate.
    """

    reason: str
    needed_tokens: int
    highest_hit_rate: float
    points: list[CurvePoint]


class Target(TypedDict):
    """The sizes that reach a hit rate.

    `cheapest`: places in `sizes` of those that reach it and of which none is smaller on one tier
    and no larger on the other. `lru_device_tokens`: tokens on DEVICE alone that reach it under LRU
    by the exact curve; None where there is no curve, or where no size does.
    """

    token_hit_rate: float
    cheapest: list[int]
    lru_device_tokens: int | None


class PlanResult(TypedDict):
    """Everything `kvgraft plan` reports.

    `sizes`: those asked for, then those that the search for a target tried. `target`: None where
    none was given. `model`: its name; None where components were given. `components`: options by
    component. `reaches`: what they keep. `cpu_s`: CPU time of all processes.
    """

    kvgraft: str
    workload: Workload
    model: str | None
    reaches: list[ReachUse]
    components: dict[str, dict[str, object]]
    settings: dict[str, object]
    notices: list[str]
    sizes: list[SizeResult]
    curve: Curve
    target: Target | None
    cpu_s: float
    wall_s: float
