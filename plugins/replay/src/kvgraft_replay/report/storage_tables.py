"""The report's tables about the storage tier; none without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft_replay.report.summary import ABSENT, SummaryTable, count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgraft_replay.report.schema import ReplayResult, StorageCounts, StoreContents

__all__ = ["storage_tables"]


def storage_tables(result: ReplayResult) -> tuple[SummaryTable, ...]:
    """Prefetches, stores, calls and the store itself, in reading order."""
    storage = result.get("storage")  # a result of an older version has none
    if storage is None:
        return ()
    return (
        _prefetch_table(storage),
        _reason_table(storage),
        _stores_table(storage),
        _call_table(storage),
        _store_table(storage),
    )


def _prefetch_table(storage: StorageCounts) -> SummaryTable:
    counts = storage["prefetches"]
    return SummaryTable(
        "Prefetches",
        "tokens: made resumable",
        tuple(counts),
        (tuple(map(count, counts.values())),),
        n_labels=0,
    )


def _reason_table(storage: StorageCounts) -> SummaryTable:
    return SummaryTable(
        "Prefetches in vain", "N: a number", ("because", "times"), _ranked(storage["in_vain"])
    )


def _stores_table(storage: StorageCounts) -> SummaryTable:
    rows = tuple((name, count(n)) for name, n in storage["stores"].items())
    return SummaryTable("Stores", "host to storage", ("what", "number"), rows)


def _call_table(storage: StorageCounts) -> SummaryTable:
    rows = []
    for verb, outcomes in storage["calls"].items():
        rows.append((verb, _listed(outcomes)))
    return SummaryTable(
        "Storage calls", "in keys", ("call", "by outcome"), tuple(rows), last_is_words=True
    )


def _store_table(storage: StorageCounts) -> SummaryTable:
    after = storage["after"]
    facts = (
        ("before", _contents(storage["before"])),
        ("after", _contents(after)),
        ("it counts", ABSENT if after is None else _listed(after.get("details", {}))),
        ("breaker", storage["breaker"]),
        ("abandoned threads", count(storage["abandoned_threads"])),
        ("last error", storage["last_error"] or "none"),
    )
    return SummaryTable("Store", "", ("what", "found"), facts, last_is_words=True)


def _contents(contents: StoreContents | None) -> str:
    if contents is None:
        return ABSENT
    limit = contents["capacity_bytes"]
    text = f"{count(contents['records'])} records, {count(contents['bytes'])} bytes"
    return text if limit is None else f"{text} of {count(limit)}"


def _listed(counts: Mapping[str, int]) -> str:
    """Names with their numbers on one line; `ABSENT` without any."""
    told = (f"{name.replace('_', ' ')}\u00a0{number}" for name, number in _ranked(counts))
    return ", ".join(told) or ABSENT


def _ranked(counts: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    """The most frequent first."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple((name, count(n)) for name, n in ranked)
