"""The report's tables as values, so that terminal and page agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from kvgraft import WritePolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgraft_replay.report.schema import CandidateClass, Quantiles, ReplayResult

__all__ = [
    "ABSENT",
    "Check",
    "SummaryTable",
    "checks",
    "count",
    "cpu_table",
    "has_storage",
    "has_unserved",
    "headline",
    "micros",
    "percent",
    "result_tables",
    "seconds",
    "served_nothing",
    "settings_rows",
    "token_parts",
    "token_table",
]

ABSENT = "–"


class SummaryTable(NamedTuple):
    """A table of formatted cells; the first `n_labels` columns are words, the rest numbers.

    `last_is_words`: the last column is words too, and may wrap.
    """

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    n_labels: int = 1
    last_is_words: bool = False


class Check(NamedTuple):
    """A number that must be zero. `verdict` is `"ok"`, `"FAIL"` or `"not checked"`."""

    name: str
    value: int
    verdict: str


def count(value: int, noun: str = "") -> str:
    """A count with thousands separators, and its noun in singular or plural."""
    counted = f"{value:,} {noun}" if noun else f"{value:,}"
    return counted if value == 1 or not noun else f"{counted}s"


def percent(part: float, whole: float) -> str:
    """A share with one decimal; a dash if the whole is 0."""
    return f"{100 * part / whole:.1f} %" if whole else ABSENT


def seconds(value: float) -> str:
    """A duration with one decimal, two below ten seconds."""
    return f"{value:,.2f} s" if value < 10 else f"{value:,.1f} s"


def micros(value: float) -> str:
    """Microseconds with one decimal."""
    return f"{value:,.1f}"


def checks(result: ReplayResult) -> tuple[Check, ...]:
    """The counters that must be zero; unverified payloads are not reported as correct."""

    def verdict(value: int, *, checked: bool = True) -> str:
        return "FAIL" if value else "ok" if checked else "not checked"

    mismatches, verified = result["payload_mismatches"], result["payloads_verified"]
    return (
        Check("out of memory", result["out_of_memory"], verdict(result["out_of_memory"])),
        Check("payload mismatches", mismatches, verdict(mismatches, checked=verified > 0)),
        Check(
            "ledger violations", result["ledger_violations"], verdict(result["ledger_violations"])
        ),
    )


def token_parts(result: ReplayResult) -> tuple[tuple[str, str, int], ...]:
    """The sources of all input tokens: `(label, tone, tokens)`."""
    hits = result["hit_tokens"]
    parts = [
        ("cached on device", "device", hits["device"]),
        ("cached on host", "host", hits["host"]),
    ]
    if has_storage(result):
        parts.append(("fetched from storage", "storage", hits["storage"]))
    parts.append(("computed", "computed", result["computed_tokens"]))
    if has_unserved(result):
        parts.append(("not served", "unserved", result["unserved_tokens"]))
    return tuple(parts)


def has_storage(result: ReplayResult) -> bool:
    """Whether there was a storage tier; a result of an older version does not say."""
    return result.get("storage") is not None


def has_unserved(result: ReplayResult) -> bool:
    """Whether requests were not served; a result of an older version does not count them."""
    return result.get("unserved_tokens", 0) > 0


def served_nothing(result: ReplayResult) -> bool:
    """Whether there were requests and none was served; an older version does not count them."""
    return bool(result["requests"]) and not result.get("served", result["requests"])


def headline(result: ReplayResult) -> str:
    """The number of replayed requests, and of served ones if fewer."""
    of, requests = result["workload"]["requests"], result["requests"]
    served = result.get("served", requests)
    text = f"{count(requests)} of {count(of, 'request')}"
    return text if served == requests else f"{text}, {count(served)} served"


def token_table(result: ReplayResult) -> SummaryTable:
    """Where the input tokens came from."""
    whole = result["input_tokens"]
    parts = (
        *((label, tokens) for label, _, tokens in token_parts(result)),
        ("saved by the cache", result["saved_tokens"]),
        ("all", whole),
    )
    return SummaryTable(
        "Input tokens",
        "",
        ("source", "tokens", "share"),
        tuple((name, count(value), percent(value, whole)) for name, value in parts),
    )


def result_tables(result: ReplayResult) -> tuple[SummaryTable, ...]:
    """Components, transfers, evictions and scheduling, in reading order."""
    return (
        *_namespace_tables(result),
        _component_table(result),
        _transfer_table(result),
        _eviction_table(result),
        *_candidate_tables(result),
        _scheduling_table(result),
    )


HIT_COLUMNS: tuple[Literal["device_slots", "host_slots", "storage_slots"], ...] = (
    "device_slots",
    "host_slots",
    "storage_slots",
)


def _component_table(result: ReplayResult) -> SummaryTable:
    loaded, backed_up = result["load_backs"]["slots"], result["backups"]["slots"]
    hits = result["component_hits"]
    names = list(dict.fromkeys([*hits, *loaded, *backed_up]))
    columns = HIT_COLUMNS if has_storage(result) else HIT_COLUMNS[:2]
    rows = []
    for name in names:
        of = hits.get(name)
        found = [0 if of is None else of.get(column, 0) for column in columns]
        numbers = (*found, loaded.get(name, 0), backed_up.get(name, 0))
        rows.append((name, *map(count, numbers)))
    return SummaryTable(
        "Components",
        "in slots",
        (
            "component",
            *(column.replace("_slots", " hits") for column in columns),
            "loaded back",
            "backed up",
        ),
        tuple(rows),
    )


def _namespace_tables(result: ReplayResult) -> list[SummaryTable]:
    """Counts by namespace, if there are any."""
    rows = [
        (
            name,
            count(each["requests"]),
            count(each["input_tokens"]),
            count(each["saved_tokens"]),
            percent(each["saved_tokens"], each["input_tokens"]),
        )
        for name, each in result.get("namespaces", {}).items()
    ]
    if not rows:
        return []
    columns = ("namespace", "requests", "input tokens", "saved", "share")
    return [SummaryTable("Namespaces", "", columns, tuple(rows))]


def _transfer_table(result: ReplayResult) -> SummaryTable:
    load, back = result["load_backs"], result["backups"]
    up = (load["started"], load["completed"], load["failed"])
    down = (back["started"], back["completed"], back["failed"])
    return SummaryTable(
        "Transfers",
        "skipped: computing was estimated cheaper than loading",
        ("direction", "started", "completed", "failed", "shared", "skipped"),
        (
            (
                "load-back, host to device",
                *map(count, (*up, load["shared"], load["skipped_recompute"])),
            ),
            ("backup, device to host", *map(count, down), ABSENT, ABSENT),
        ),
    )


def _eviction_table(result: ReplayResult) -> SummaryTable:
    rows = []
    for name, tiers in result["evictions"].items():
        by_tier: tuple[tuple[str, Mapping[str, int]], ...] = (
            ("device", tiers["device"]),
            ("host", tiers["host"]),
        )
        for tier, causes in by_tier:
            ranked = sorted(causes.items(), key=lambda item: (-item[1], item[0]))
            # No-break spaces keep a cause and its number on one line.
            text = ", ".join(f"{cause}\u00a0{count(slots)}" for cause, slots in ranked if slots)
            rows.append((name, tier, count(sum(causes.values())), text or ABSENT))
    note = "in slots"
    waits = result["backups"]["waits"]
    settings = result["settings"]
    write_back = settings.get("write_policy") == WritePolicy.WRITE_BACK.value
    if waits or (write_back and settings.get("host_tokens")):
        note += f"; {count(waits)} wait{'' if waits == 1 else 's'} for copies"
    return SummaryTable(
        "Evictions",
        note,
        ("component", "tier", "evicted", "by cause"),
        tuple(rows),
        n_labels=2,
        last_is_words=True,
    )


def _candidate_tables(result: ReplayResult) -> list[SummaryTable]:
    """The classes of the eviction policy, if it has several, by the first part of their words.

    A policy may have dozens; the JSON has each.
    """
    alike: dict[tuple[str, str, str], list[CandidateClass]] = {}
    for each in result.get("candidates", []):
        if each["words"]:
            first = each["words"].partition(", ")[0]
            alike.setdefault((each["component"], each["tier"], first), []).append(each)
    if not alike:
        return []
    rows = [
        (
            *labels,
            count(sum(each["slots"] for each in classes)),
            _score(min((each["lowest_score"] for each in classes), key=_or_zero)),
            _score(max((each["highest_score"] for each in classes), key=_or_zero)),
        )
        for labels, classes in alike.items()
    ]
    return [
        SummaryTable(
            f"Eviction candidates under {result['settings']['eviction_policy']}",
            "in slots, at the end; the lowest score leaves first; --json has every class",
            ("component", "tier", "request", "slots", "score from", "to"),
            tuple(rows),
            n_labels=3,
        )
    ]


def _or_zero(score: float | None) -> float:
    return score or 0.0


def _score(score: float | None) -> str:
    return ABSENT if score is None else f"{score:.3f}"


def _scheduling_table(result: ReplayResult) -> SummaryTable:
    numbers = (
        ("admitted", result["admissions"]),
        ("deferred", result["deferrals"]),
        ("retracted", result["retractions"]),
        ("recomputed", result.get("recomputed_tokens", 0)),
        ("computed, p90", result.get("computed_tokens_p90", 0)),
        ("rejected", result["rejections"]),
        ("checkpoints", result["checkpoints"]),
        ("copies on write", result["copies_on_write"]),
    )
    return SummaryTable(
        "Scheduling",
        "number of times; recomputed: tokens, after retractions; computed, p90: prompt tokens of a "
        "request that nine of ten do not exceed",
        tuple(name for name, _ in numbers),
        (tuple(count(value) for _, value in numbers),),
        n_labels=0,
    )


def _quantiles(of: Quantiles) -> tuple[str, str]:
    """p50 and p99; dashes if only a mean is known, which is equal for all requests."""
    if of["p50"] == of["p99"]:
        return ABSENT, ABSENT
    return micros(of["p50"]), micros(of["p99"])


def cpu_table(result: ReplayResult) -> SummaryTable:
    """CPU time per request by operation, `total` first."""
    cpu = result["cpu_us_per_request"]
    order = sorted(cpu, key=lambda name: name != "total")
    return SummaryTable(
        "CPU per request",
        "in µs",
        ("operation", "p50", "p99", "mean"),
        tuple(
            (name.replace("_", " "), *_quantiles(of), micros(of["mean"]))
            for name in order
            for of in (cpu[name],)
        ),
    )


def settings_rows(settings: Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as `(dotted name, value)` rows."""
    rows: list[tuple[str, str]] = []
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            rows += settings_rows(value, f"{name}.")
        elif isinstance(value, dict):
            rows.append((name, "defaults"))
        elif isinstance(value, int) and not isinstance(value, bool):
            rows.append((name, count(value)))
        else:
            rows.append((name, ABSENT if value is None else str(value)))
    return rows
