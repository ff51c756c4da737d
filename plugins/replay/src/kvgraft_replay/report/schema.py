"""The replay result: the stable shape of `--json` and the only input of every report.

Plain dictionaries, lists, strings and finite numbers, so that `json.dumps` needs no encoder.
Fields are added within a major version, never renamed or removed. Token counts are tokens;
pool figures are slots, in each component's own unit (a page, or one state). Times in seconds are
on the replay's virtual clock, from the first arrival, unless named `wall_s`.
"""

from __future__ import annotations

from typing import Literal, TypedDict

__all__ = [
    "Backups",
    "CacheCounts",
    "ComponentHits",
    "HitTokens",
    "LoadBacks",
    "NamespaceCounts",
    "Occupancy",
    "PointCounts",
    "PointSlots",
    "Quantiles",
    "ReplayResult",
    "Residency",
    "Source",
    "StorageCounts",
    "StoreContents",
    "TierEvictions",
    "TierOccupancy",
    "TimelinePoint",
    "TreeNode",
    "TreeSnapshot",
    "Workload",
]

Residency = Literal["device", "host", "both", "none"]


class Workload(TypedDict):
    """The trace as read, before anything is cut off by a limit on the number of requests."""

    name: str
    format: str
    requests: int
    input_tokens: int
    output_tokens: int


class HitTokens(TypedDict):
    """Input tokens that were not computed, by tier at the match.

    `storage`: tokens that HOST had only because of the request's own prefetch; `host` excludes
    them.
    """

    device: int
    host: int
    storage: int


class ComponentHits(TypedDict):
    """Slots of one component that admitted requests resume from, by tier; each admission counts.

    `storage_slots`: slots of pages that the request's prefetch made resumable; `host_slots`
    excludes them, and both are loaded back.
    """

    device_slots: int
    host_slots: int
    storage_slots: int


class LoadBacks(TypedDict):
    """Copies HOST to DEVICE; `slots` counts the slots of completed ones by component.

    `shared`: requests that waited for another request's transfer (R6). `skipped_recompute`: loads
    skipped because computing was estimated cheaper (R8).
    """

    started: int
    completed: int
    failed: int
    shared: int
    skipped_recompute: int
    slots: dict[str, int]


class Backups(TypedDict):
    """Copies DEVICE to HOST; `slots` counts the slots of completed ones by component.

    `waits`: how often making room on DEVICE waited for copies of victims.
    """

    started: int
    completed: int
    failed: int
    slots: dict[str, int]
    waits: int


class TierEvictions(TypedDict):
    """Slots given up per tier, by cause (`"demoted"`, `"deleted"`, `"cascade"`, `"leaf"`, ...)."""

    device: dict[str, int]
    host: dict[str, int]


class StoreContents(TypedDict):
    """A store's content; `bytes` with its overhead, `capacity_bytes` None without a limit.

    `details`: its other counts since it was opened, such as records it `evicted`.
    """

    records: int
    bytes: int
    capacity_bytes: int | None
    details: dict[str, int]


class StorageCounts(TypedDict):
    """Data to and from a store; the inner dictionaries have open key sets.

    `prefetches`: how many were `started`, `shared` with another request's, `delivered` something or
    were `in vain`, and `shrunk` for want of HOST memory (S3); and the `tokens` they made resumable.
    `in_vain`: why, with how often; numbers are replaced by N. `stores`: `nodes` sent, their `slots`
    that the store has, `slots failed`, and those `dropped`, with reasons. `calls`: per verb, the
    number of keys by outcome (`known`: of those stored, there already), besides of calls that met
    `errors` or `timeouts`. `breaker`: `closed` while the store is used. `before` and `after` are
    None if the store did not answer.
    """

    prefetches: dict[str, int]
    in_vain: dict[str, int]
    stores: dict[str, int]
    calls: dict[str, dict[str, int]]
    breaker: str
    abandoned_threads: int
    last_error: str
    before: StoreContents | None
    after: StoreContents | None


class Quantiles(TypedDict):
    """CPU time per request of one operation, in microseconds."""

    p50: float
    p99: float
    mean: float


class TierOccupancy(TypedDict):
    """One pool's ledger, in slots; the last five add up to `capacity` (T8)."""

    capacity: int
    free: int
    evictable: int
    pinned: int
    private: int
    in_flight: int


class Occupancy(TypedDict):
    """A component's pools at one moment; `host` is None where it has no host mirror."""

    device: TierOccupancy
    host: TierOccupancy | None


class TimelinePoint(TypedDict):
    """The cache at one moment; `requests` and two of the rates are for the interval before it.

    Moments are equidistant on the virtual clock; the last one is the replay's end. Rates are 0 in
    an interval without requests. `storage_hit_rate` is the part of `token_hit_rate` that came from
    STORAGE.
    """

    time_s: float
    requests: int
    token_hit_rate: float
    storage_hit_rate: float
    cumulative_hit_rate: float
    running: int
    waiting: int
    occupancy: dict[str, Occupancy]


class Source(TypedDict):
    """The sources of one request's input tokens; `index` is its place in arrival order.

    `unserved`: all input tokens of a request that was rejected or ran out of memory.
    """

    index: int
    time_s: float
    device: int
    host: int
    storage: int
    computed: int
    unserved: int


class TreeNode(TypedDict):
    """A node of the prefix tree, covering tokens `[start, end)` of the sequences through it.

    `parent` is None at a root. `residency` says where each component holds data for it.
    """

    id: int
    parent: int | None
    start: int
    end: int
    residency: dict[str, Residency]
    hits: int
    pinned: bool


class TreeSnapshot(TypedDict):
    """The tree when it was fullest; `truncated` nodes were left out to bound the size."""

    nodes: list[TreeNode]
    truncated: int


class PointSlots(TypedDict):
    """DEVICE slots of one component in the tree when the replay ended.

    `left_behind`: evict-first slots: requests that continue no longer need them, and nobody used
    them since. `kept`: all other slots, of resume points and of reused data.
    """

    kept: int
    left_behind: int


class PointCounts(TypedDict):
    """Resume points by kind (`"repeat"`, `"branch"`, `"grid"`, ...); kinds may be added.

    `made`: published in the tree. `skipped`: not made because a state found no slot. `used`: how
    often an admitted request resumed from one. `lost`: points of which some data left its last
    tier. `slots` is by component, for those that do not need every page.
    """

    made: dict[str, int]
    skipped: dict[str, int]
    used: dict[str, int]
    lost: dict[str, int]
    slots: dict[str, PointSlots]


class CandidateClass(TypedDict):
    """Eviction candidates of one class at the end, as the eviction policy ranks them.

    Evict-first data leaves before them, under every policy, and is not included. `words` describes
    the class. It is empty, and the scores are None, if the policy has only one class and uses only
    recency. The lowest score is evicted first.
    """

    component: str
    tier: str
    use_class: int
    words: str
    slots: int
    lowest_score: float | None
    highest_score: float | None


class CacheCounts(TypedDict):
    """The cache's own counts; `evictions` may gain causes.

    `resume_points` is None if every component needs every page, so that requests can resume at any
    boundary.
    """

    component_hits: dict[str, ComponentHits]
    load_backs: LoadBacks
    backups: Backups
    evictions: dict[str, TierEvictions]
    copies_on_write: int
    checkpoints: int
    resume_points: PointCounts | None
    candidates: list[CandidateClass]


class NamespaceCounts(TypedDict):
    """Requests of one namespace, their prompt tokens, and the saved ones."""

    requests: int
    input_tokens: int
    saved_tokens: int


class ReplayResult(CacheCounts):
    """Everything `kvgraft replay` reports.

    `requests` and `input_tokens` count replayed requests, served or not; `workload` describes the
    trace. `served` and `output_tokens` count requests that ended with all of their output.
    `notices` are notes for readers of the headline. `storage` is None without a storage tier.

    `token_hit_rate` is `saved_tokens` over `input_tokens`, between 0 and 1. A request saves the
    prompt tokens that it never computed, not even after a retraction; an unserved one saves none.
    `saved_tokens`, `computed_tokens` and `unserved_tokens` (prompts of requests not served) add up
    to `input_tokens`. `recomputed_tokens` were computed again after a retraction and are in none of
    these. Nine of ten served requests computed at most `computed_tokens_p90` prompt tokens. Warm-up
    is included.

    `namespaces` has the counts of requests with a namespace; it is empty without a scanner.

    `cpu_us_per_request` is over served requests; the others' time is divided among them.
    `evictions` and `cpu_us_per_request` have open key sets: causes and operations may be added.
    `out_of_memory`, `payload_mismatches` and `ledger_violations` are 0 unless something is broken.
    """

    kvgraft: str
    workload: Workload
    settings: dict[str, object]
    notices: list[str]
    requests: int
    served: int
    input_tokens: int
    output_tokens: int
    token_hit_rate: float
    hit_tokens: HitTokens
    saved_tokens: int
    computed_tokens: int
    computed_tokens_p90: int
    unserved_tokens: int
    recomputed_tokens: int
    namespaces: dict[str, NamespaceCounts]
    storage: StorageCounts | None
    admissions: int
    deferrals: int
    retractions: int
    rejections: int
    out_of_memory: int
    payload_mismatches: int
    payloads_verified: int
    ledger_violations: int
    first_problem: str
    cpu_us_per_request: dict[str, Quantiles]
    wall_s: float
    virtual_s: float
    timeline: list[TimelinePoint]
    sources: list[Source]
    tree: TreeSnapshot
