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
"""A pool is limiting if a tenth more of it gains at least this share of the input tokens."""


class PoolName(TypedDict):
    """A pool by its component and tier."""

    component: str
    tier: str


class PoolUse(TypedDict):
    """One component's pool on one tier, at the end: in a budget its size follows its use.

    `tokens`: capacity of its slots; 0 for states. `evicted`: slots evicted to make room.
    """

    component: str
    tier: str
    slots: int
    tokens: int
    nbytes: int
    evicted: int


class ReachUse(TypedDict):
    """Bytes that the layers of one component keep on DEVICE.

    `keeps`: its reach, in words. `per`: the unit, `"token"` or `"state"`; one takes `nbytes` in all
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
    """How bytes were split among pools: the best split, and those that it was compared with.

    `points`: those of the best split, for which all other numbers hold; 1 is the rule's.
    `gained_tokens`: prompt tokens saved beyond the rule's. `tried`: all, by `points`.
    """

    points: float
    gained_tokens: int
    tried: list[SplitTried]


class Growth(TypedDict):
    """The gain of a replay with one pool a tenth larger and all others equal.

    `extra_nbytes`: bytes of the tenth. `gained_tokens`: additional prompt tokens saved; negative if
    it saved fewer.
    """

    component: str
    tier: str
    extra_nbytes: int
    gained_tokens: int
    token_hit_rate: float


class SizeResult(TypedDict):
    """A replay with one pair of sizes and one policy.

    `device` and `host` are the sizes as given, `_tokens` and `_nbytes` their values. `policy`: the
    eviction policy. `prefill_s_saved`: `saved_tokens` at the rate of the settings.
    `load_back_nbytes`: bytes copied from HOST to DEVICE instead. `lru_hit_rate`: the exact curve's
    rate at the size of DEVICE alone; None without a curve. `split`: None if the pools have equal
    tokens or follow their use. `growth`: empty if not asked for. `limiting`: the pool whose tenth
    gains most; None if none gains a tenth of a percentage point.
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

    `points` is empty, and `reason` says why, if components or arrivals allow no such curve.
    `needed_tokens`: the smallest size with the highest rate, which is `highest_hit_rate`.
    """

    reason: str
    needed_tokens: int
    highest_hit_rate: float
    points: list[CurvePoint]


class Target(TypedDict):
    """The sizes that reach a hit rate.

    `cheapest`: indices in `sizes` of sizes that reach it and that no other such size undercuts on
    one tier without being larger on the other. `lru_device_tokens`: tokens on DEVICE alone that
    reach it under LRU by the exact curve; None without a curve, or if no size does.
    """

    token_hit_rate: float
    cheapest: list[int]
    lru_device_tokens: int | None


class PlanResult(TypedDict):
    """Everything `kvgraft plan` reports.

    `sizes`: those asked for, then those that the search for a target tried. `target`: None if none
    was given. `model`: its name; None if components were given. `components`: options by component.
    `reaches`: bytes that they keep. `cpu_s`: CPU time of all processes.
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
