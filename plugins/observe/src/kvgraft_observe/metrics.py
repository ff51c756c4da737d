"""The metrics of a cache, in one table that every exporter reads.

Names are OpenTelemetry's, with dots. Prometheus' names have underscores instead, and counters end
in `_total`, as OpenTelemetry's own exporter writes them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvgraft.stats import CacheStats, PoolStats, TransferStats

if TYPE_CHECKING:
    from kvgraft_storage.stats import StorageStats

__all__ = [
    "ADMISSION_WAIT",
    "EXPLAINED",
    "LOAD_BACK",
    "MATCH",
    "METRICS",
    "PREFETCH",
    "Kind",
    "Metric",
    "Sample",
]


class Kind(enum.Enum):
    """Kinds of metrics."""

    COUNTER = "counter"
    """A counter: it only grows."""
    GAUGE = "gauge"
    """The current value; samples can be added up."""
    HISTOGRAM = "histogram"
    """A histogram of durations."""


class Sample(NamedTuple):
    """One number of a metric.

    Attributes:
        labels: the values of the metric's labels, in their order.
        value: the number.
    """

    labels: tuple[str, ...]
    value: float


Read = Callable[[CacheStats], Iterable[Sample]]
"""Reads the samples of a metric."""


class Metric(NamedTuple):
    """One metric of a cache.

    Attributes:
        name: its name with dots.
        kind: its kind.
        unit: unit of its numbers, as UCUM writes it.
        text: its description.
        labels: names of its labels.
        read: reads its samples from a cache's counts; None if the metric is measured step by step.
        bounds: upper bounds of a histogram's buckets, in seconds.
    """

    name: str
    kind: Kind
    unit: str
    text: str
    labels: tuple[str, ...]
    read: Read | None = None
    bounds: tuple[float, ...] = ()


def _tokens(stats: CacheStats) -> Iterator[Sample]:
    tokens = stats.tokens
    yield Sample(("device",), tokens.device)
    yield Sample(("host",), tokens.host)
    yield Sample(("storage",), tokens.storage)
    yield Sample(("none",), tokens.asked - tokens.reused)


def _hits(stats: CacheStats) -> Iterator[Sample]:
    for name, component in stats.components.items():
        for tier, slots in component.hits._asdict().items():
            yield Sample((name, tier), slots)


def _pools(stats: CacheStats) -> Iterator[tuple[str, str, PoolStats]]:
    """Component, tier and ledger of every pool; private pools are numbered."""
    for name, component in stats.components.items():
        yield name, "device", component.device
        if component.host is not None:
            yield name, "host", component.host
        for number, pool in enumerate(component.private):
            yield name, f"private {number}", pool


def _owners(stats: CacheStats) -> Iterator[Sample]:
    for name, tier, pool in _pools(stats):
        for owner, slots in pool.owners.items():
            yield Sample((name, tier, owner), slots)


def _promised(stats: CacheStats) -> Iterator[Sample]:
    for name, tier, pool in _pools(stats):
        yield Sample((name, tier), pool.promised)


def _closing(stats: CacheStats) -> Iterator[Sample]:
    for name, tier, pool in _pools(stats):
        yield Sample((name, tier), pool.closing)


def _evicted(stats: CacheStats) -> Iterator[Sample]:
    for name, tier, pool in _pools(stats):
        for cause, slots in pool.evicted.items():
            yield Sample((name, tier, cause), slots)


def _requests(stats: CacheStats) -> Iterator[Sample]:
    yield Sample(("leased",), stats.requests.leased)
    yield Sample(("running",), stats.requests.running)


def _checkpoints(stats: CacheStats) -> Iterator[Sample]:
    yield Sample(("shared",), stats.requests.checkpoints)
    yield Sample(("declined",), stats.requests.declined_checkpoints)


def _directions(stats: CacheStats) -> Iterator[tuple[str, TransferStats]]:
    yield "load_back", stats.load_backs
    yield "backup", stats.backups


def _transfers(stats: CacheStats) -> Iterator[Sample]:
    for direction, transfers in _directions(stats):
        yield Sample((direction, "completed"), transfers.completed)
        yield Sample((direction, "failed"), transfers.failed)


def _transfers_in_flight(stats: CacheStats) -> Iterator[Sample]:
    for direction, transfers in _directions(stats):
        yield Sample((direction,), transfers.in_flight)


def _transfer_waits(stats: CacheStats) -> Iterator[Sample]:
    for direction, transfers in _directions(stats):
        yield Sample((direction,), transfers.waits)


def _transferred(stats: CacheStats) -> Iterator[Sample]:
    for direction, transfers in _directions(stats):
        for component, slots in transfers.slots.items():
            yield Sample((direction, component), slots)


def _points(stats: CacheStats) -> Iterator[Sample]:
    for kind, points in stats.points.items():
        for event, count in points._asdict().items():
            yield Sample((kind.value, event), count)


def _by_event(counts: Callable[[StorageStats], Mapping[str, int]]) -> Read:
    """Reads counts of the storage tier that have one label."""

    def read(stats: CacheStats) -> Iterator[Sample]:
        if stats.storage is not None:
            for event, count in counts(stats.storage).items():
                yield Sample((event,), count)

    return read


def _abandoned(stats: CacheStats) -> Iterator[Sample]:
    if stats.storage is not None:
        yield Sample((), stats.storage.abandoned_threads)


def _storage_keys(stats: CacheStats) -> Iterator[Sample]:
    if stats.storage is not None:
        for verb, by_status in stats.storage.keys.items():
            for status, count in by_status.items():
                yield Sample((verb, status), count)


def _storage_in_flight(stats: CacheStats) -> Iterator[Sample]:
    if stats.storage is not None:
        yield Sample(("prefetch",), stats.storage.prefetches_in_flight)
        yield Sample(("store",), stats.storage.stores_in_flight)


def _breaker(stats: CacheStats) -> Iterator[Sample]:
    if stats.storage is not None:
        from kvgraft_storage import BreakerState

        for state in BreakerState:
            yield Sample((state.value,), stats.storage.breaker == state.value)


def _tenant_tokens(stats: CacheStats) -> Iterator[Sample]:
    for name, tenant in stats.tenants.items():
        tokens = tenant.tokens
        yield Sample((name, "device"), tokens.device)
        yield Sample((name, "host"), tokens.host)
        yield Sample((name, "storage"), tokens.storage)
        yield Sample((name, "none"), tokens.asked - tokens.reused)


def _tenant_admissions(stats: CacheStats) -> Iterator[Sample]:
    for name, tenant in stats.tenants.items():
        yield Sample((name,), tenant.tokens.admitted)


def _shares(stats: CacheStats) -> Iterator[tuple[tuple[str, str, str], Any]]:
    """Tenant, component and tier of every share, and the share."""
    for name, tenant in stats.tenants.items():
        for tier, shares in (("device", tenant.device), ("host", tenant.host)):
            for component, share in shares.items():
                yield (name, component, tier), share


def _tenant_slots(stats: CacheStats) -> Iterator[Sample]:
    for labels, share in _shares(stats):
        yield Sample((*labels, "evictable"), share.evictable)
        yield Sample((*labels, "pinned"), share.pinned)
        yield Sample((*labels, "private"), share.private)
        yield Sample((*labels, "in_flight"), share.in_flight)


def _tenant_promised(stats: CacheStats) -> Iterator[Sample]:
    for labels, share in _shares(stats):
        yield Sample(labels, share.promised)


def _tenant_bounds(stats: CacheStats) -> Iterator[Sample]:
    for labels, share in _shares(stats):
        yield Sample((*labels, "guarantee"), share.guarantee)
        yield Sample((*labels, "limit"), share.limit)


def _tenant_lost(stats: CacheStats) -> Iterator[Sample]:
    for labels, share in _shares(stats):
        yield Sample(labels, share.lost)


def _pins(stats: CacheStats) -> Iterator[Sample]:
    for owner, pins in stats.pins.items():
        yield Sample((owner,), pins.pins)


def _pin_tokens(stats: CacheStats) -> Iterator[Sample]:
    for owner, pins in stats.pins.items():
        yield Sample((owner,), pins.tokens)


def _pin_slots(stats: CacheStats) -> Iterator[Sample]:
    for owner, pins in stats.pins.items():
        for tier, slots in (("device", pins.device), ("host", pins.host)):
            for component, count in slots.items():
                yield Sample((owner, component, tier), count)


def _bounds(least: float, decades: int) -> tuple[float, ...]:
    """Bucket bounds 1, 2.5, 5 and so on from `least` over some powers of ten."""
    steps = [
        float(f"{least * 10**decade * step:.3g}") for decade in range(decades) for step in STEPS
    ]
    return (*steps, least * 10**decades)


STEPS = (1, 2.5, 5)

MATCH = Metric(
    "kvgraft.match_duration",
    Kind.HISTOGRAM,
    "s",
    "time to match and pin a prompt's prefix",
    (),
    bounds=_bounds(1e-5, 4),
)
ADMISSION_WAIT = Metric(
    "kvgraft.admission_wait",
    Kind.HISTOGRAM,
    "s",
    "time from a prompt's first match to its request's admission",
    (),
    bounds=_bounds(1e-4, 6),
)
LOAD_BACK = Metric(
    "kvgraft.load_back_duration",
    Kind.HISTOGRAM,
    "s",
    "time that a request waited for copies from the host",
    (),
    bounds=_bounds(1e-4, 5),
)
PREFETCH = Metric(
    "kvgraft.prefetch_duration",
    Kind.HISTOGRAM,
    "s",
    "time to bring a queued request's data from storage, or to find that there is none",
    ("result",),
    bounds=_bounds(1e-3, 5),
)
EXPLAINED = Metric(
    "kvgraft.explained_tokens",
    Kind.COUNTER,
    "{token}",
    "prompt tokens of a sample of requests that were reused, and the rest by the reason",
    ("outcome", "component"),
)

METRICS: tuple[Metric, ...] = (
    Metric(
        "kvgraft.tokens",
        Kind.COUNTER,
        "{token}",
        "prompt tokens of requests, each once, by the tier that had them; none: to be computed",
        ("tier",),
        _tokens,
    ),
    Metric(
        "kvgraft.computed_tokens",
        Kind.COUNTER,
        "{token}",
        "tokens computed, of prompts and decoded",
        (),
        lambda stats: [Sample((), stats.tokens.computed)],
    ),
    Metric(
        "kvgraft.recomputed_tokens",
        Kind.COUNTER,
        "{token}",
        "tokens computed again after their request was retracted or restarted",
        (),
        lambda stats: [Sample((), stats.tokens.recomputed)],
    ),
    Metric(
        "kvgraft.hit_slots",
        Kind.COUNTER,
        "{slot}",
        "slots that admitted requests resume from, by the tier that had them",
        ("component", "tier"),
        _hits,
    ),
    Metric(
        "kvgraft.slots",
        Kind.GAUGE,
        "{slot}",
        "slots of each pool by owner; together they are its capacity",
        ("component", "tier", "owner"),
        _owners,
    ),
    Metric(
        "kvgraft.promised_slots",
        Kind.GAUGE,
        "{slot}",
        "slots promised to admitted requests that have not taken them yet",
        ("component", "tier"),
        _promised,
    ),
    Metric(
        "kvgraft.closing_slots",
        Kind.GAUGE,
        "{slot}",
        "slots in use that are about to leave the pool for another, under one budget",
        ("component", "tier"),
        _closing,
    ),
    Metric(
        "kvgraft.evicted_slots",
        Kind.COUNTER,
        "{slot}",
        "slots that left a tier, by cause",
        ("component", "tier", "cause"),
        _evicted,
    ),
    Metric(
        "kvgraft.cache_requests",
        Kind.GAUGE,
        "{request}",
        "requests that have begun and not ended, by stage",
        ("stage",),
        _requests,
    ),
    Metric(
        "kvgraft.admitted_requests",
        Kind.COUNTER,
        "{request}",
        "admissions of requests, those after a retraction included",
        (),
        lambda stats: [Sample((), stats.requests.admitted)],
    ),
    Metric(
        "kvgraft.checkpoints",
        Kind.COUNTER,
        "{checkpoint}",
        "checkpoints that shared data, and those declined for want of headroom",
        ("result",),
        _checkpoints,
    ),
    Metric(
        "kvgraft.copies_on_write",
        Kind.COUNTER,
        "{copy}",
        "states copied for a request that writes to them",
        (),
        lambda stats: [Sample((), stats.requests.copies_on_write)],
    ),
    Metric(
        "kvgraft.shared_loads",
        Kind.COUNTER,
        "{transfer}",
        "load-backs of others that requests waited for",
        (),
        lambda stats: [Sample((), stats.requests.shared_loads)],
    ),
    Metric(
        "kvgraft.skipped_loads",
        Kind.COUNTER,
        "{request}",
        "prefixes computed again because loading them was estimated slower",
        (),
        lambda stats: [Sample((), stats.requests.skipped_loads)],
    ),
    Metric(
        "kvgraft.transfers",
        Kind.COUNTER,
        "{transfer}",
        "transfers between device and host that ended",
        ("direction", "result"),
        _transfers,
    ),
    Metric(
        "kvgraft.transfers_in_flight",
        Kind.GAUGE,
        "{transfer}",
        "transfers between device and host under way",
        ("direction",),
        _transfers_in_flight,
    ),
    Metric(
        "kvgraft.transfer_waits",
        Kind.COUNTER,
        "{wait}",
        "times that room was made on the device by waiting for copies to the host",
        ("direction",),
        _transfer_waits,
    ),
    Metric(
        "kvgraft.transferred_slots",
        Kind.COUNTER,
        "{slot}",
        "slots whose copies between device and host were started",
        ("direction", "component"),
        _transferred,
    ),
    Metric(
        "kvgraft.resume_points",
        Kind.COUNTER,
        "{point}",
        "resume points made, used, skipped and lost, by kind",
        ("kind", "event"),
        _points,
    ),
    Metric(
        "kvgraft.tenant_tokens",
        Kind.COUNTER,
        "{token}",
        "a tenant's prompt tokens, each once, by the tier that had them; none: to be computed",
        ("tenant", "tier"),
        _tenant_tokens,
    ),
    Metric(
        "kvgraft.tenant_admitted_requests",
        Kind.COUNTER,
        "{request}",
        "admissions of a tenant's requests, those after a retraction included",
        ("tenant",),
        _tenant_admissions,
    ),
    Metric(
        "kvgraft.tenant_slots",
        Kind.GAUGE,
        "{slot}",
        "a tenant's slots by owner",
        ("tenant", "component", "tier", "owner"),
        _tenant_slots,
    ),
    Metric(
        "kvgraft.tenant_promised_slots",
        Kind.GAUGE,
        "{slot}",
        "slots promised to a tenant's requests that have not taken them yet",
        ("tenant", "component", "tier"),
        _tenant_promised,
    ),
    Metric(
        "kvgraft.tenant_bounds",
        Kind.GAUGE,
        "{slot}",
        "slots that a tenant is guaranteed, and the most that it has",
        ("tenant", "component", "tier", "bound"),
        _tenant_bounds,
    ),
    Metric(
        "kvgraft.tenant_lost_slots",
        Kind.COUNTER,
        "{slot}",
        "a tenant's slots that were evicted for other tenants' requests",
        ("tenant", "component", "tier"),
        _tenant_lost,
    ),
    Metric(
        "kvgraft.prefix_pins",
        Kind.GAUGE,
        "{pin}",
        "pinned prefixes by owner",
        ("owner",),
        _pins,
    ),
    Metric(
        "kvgraft.prefix_pin_tokens",
        Kind.GAUGE,
        "{token}",
        "tokens of pinned prefixes by owner",
        ("owner",),
        _pin_tokens,
    ),
    Metric(
        "kvgraft.prefix_pin_slots",
        Kind.GAUGE,
        "{slot}",
        "slots of pinned prefixes by owner",
        ("owner", "component", "tier"),
        _pin_slots,
    ),
    Metric(
        "kvgraft.prefetches",
        Kind.COUNTER,
        "{event}",
        "prefetches of queued requests by event, and the tokens they brought",
        ("event",),
        _by_event(lambda storage: storage.prefetches),
    ),
    Metric(
        "kvgraft.prefetches_in_vain",
        Kind.COUNTER,
        "{prefetch}",
        "prefetches that brought nothing, by reason",
        ("reason",),
        _by_event(lambda storage: storage.in_vain),
    ),
    Metric(
        "kvgraft.stores",
        Kind.COUNTER,
        "{event}",
        "nodes, slots and bytes on their way to storage, by event",
        ("event",),
        _by_event(lambda storage: storage.stores),
    ),
    Metric(
        "kvgraft.touches",
        Kind.COUNTER,
        "{event}",
        "uses that storage was notified of, by event",
        ("event",),
        _by_event(lambda storage: storage.touches),
    ),
    Metric(
        "kvgraft.storage_keys",
        Kind.COUNTER,
        "{key}",
        "keys asked of storage",
        ("verb", "status"),
        _storage_keys,
    ),
    Metric(
        "kvgraft.storage_in_flight",
        Kind.GAUGE,
        "{operation}",
        "prefetches, and nodes to store, under way",
        ("direction",),
        _storage_in_flight,
    ),
    Metric(
        "kvgraft.storage_breaker",
        Kind.GAUGE,
        "1",
        "1 for the state of storage's circuit breaker",
        ("state",),
        _breaker,
    ),
    Metric(
        "kvgraft.storage_abandoned_threads",
        Kind.GAUGE,
        "{thread}",
        "threads that hang in a call of the store",
        (),
        _abandoned,
    ),
    EXPLAINED,
    MATCH,
    ADMISSION_WAIT,
    LOAD_BACK,
    PREFETCH,
)
"""All metrics."""
