"""A plan's tables, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvgraft.sizes import format_nbytes
from kvgraft_replay.report.summary import ABSENT, SummaryTable, count, percent, seconds
from kvgraft_replay.report.tables import print_table, writer

if TYPE_CHECKING:
    from rich.console import Console

    from kvgraft_replay.planning.schema import PlanResult, SizeResult

__all__ = ["plan_tables", "print_plan"]


def print_plan(plan: PlanResult, console: Console) -> None:
    """Print the whole plan."""
    text = writer(console)
    workload = plan["workload"]
    console.print(text(f"Plan for {workload['name']} ({workload['format']})", "bold"))
    first = plan["sizes"][0]
    console.print(
        text(
            f"{count(first['requests'])} requests, {count(first['input_tokens'])} input tokens, "
            f"{len(plan['sizes'])} sizes"
        )
    )
    console.print(text(f"{seconds(plan['wall_s'])}, {seconds(plan['cpu_s'])} of CPU time", "dim"))
    for notice in plan["notices"]:
        console.print(text(f"note: {notice}", "yellow"), soft_wrap=True)
    console.print()
    for table in plan_tables(plan):
        print_table(table, console)


def plan_tables(plan: PlanResult) -> tuple[SummaryTable, ...]:
    """All tables, in reading order."""
    tables = [_hit_table(plan), _saving_table(plan)]
    if any(size["growth"] for size in plan["sizes"]):
        tables.append(_growth_table(plan))
    return tuple(tables)


def _names(size: SizeResult) -> tuple[str, str]:
    return size["device"], size["host"]


def _hit_table(plan: PlanResult) -> SummaryTable:
    has_curve = any(size["lru_hit_rate"] is not None for size in plan["sizes"])
    rows = []
    for size in plan["sizes"]:
        whole, hits = size["input_tokens"], size["hit_tokens"]
        exact = size["lru_hit_rate"]
        rows.append(
            (
                *_names(size),
                count(size["device_tokens"]),
                percent(size["saved_tokens"], whole),
                percent(hits["device"], whole),
                percent(hits["host"], whole),
                *((ABSENT if exact is None else percent(exact, 1),) if has_curve else ()),
            )
        )
    return SummaryTable(
        "Hit rates",
        "of input tokens; LRU: of DEVICE alone, exact" if has_curve else "of input tokens",
        (
            *("device", "host", "device tokens", "hit rate", "on device", "on host"),
            *(("LRU",) if has_curve else ()),
        ),
        tuple(rows),
        n_labels=2,
    )


def _saving_table(plan: PlanResult) -> SummaryTable:
    return SummaryTable(
        "Savings and waiting",
        f"prefill at {count(int(plan['settings']['prefill_tokens_s']))} tokens/s",  # type: ignore[call-overload]
        ("device", "host", "tokens saved", "prefill saved", "loaded back", "deferred", "rejected"),
        tuple(
            (
                *_names(size),
                count(size["saved_tokens"]),
                seconds(size["prefill_s_saved"]),
                format_nbytes(size["load_back_nbytes"]),
                count(size["deferrals"]),
                count(size["rejections"]),
            )
            for size in plan["sizes"]
        ),
        n_labels=2,
    )


def _growth_table(plan: PlanResult) -> SummaryTable:
    return SummaryTable(
        "A tenth more of one pool",
        "the most telling first",
        ("device", "host", "pool", "more", "hit rate", "points", "points per GB"),
        tuple(row for size in plan["sizes"] for row in _growth_rows(size)),
        n_labels=3,
    )


def _growth_rows(size: SizeResult) -> Iterator[tuple[str, ...]]:
    for pool in sorted(size["growth"], key=lambda each: -each["gained_tokens"]):
        points = 100 * (pool["token_hit_rate"] - size["token_hit_rate"])
        yield (
            *_names(size),
            f"{pool['component']}, {pool['tier']}",
            format_nbytes(pool["extra_nbytes"]),
            percent(pool["token_hit_rate"], 1),
            f"{points:+.2f}",
            f"{points / (pool['extra_nbytes'] / 1e9):+.2g}",
        )
