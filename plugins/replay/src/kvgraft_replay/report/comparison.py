"""Replays of one workload under several policies, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from kvgraft_replay.report.summary import SummaryTable, count, micros, percent
from kvgraft_replay.report.tables import print_headline, print_notices, print_table

if TYPE_CHECKING:
    from rich.console import Console

    from kvgraft_replay.report.schema import ReplayResult

__all__ = ["comparison_table", "print_comparison"]


def print_comparison(results: Sequence[ReplayResult], console: Console) -> None:
    """Print replays that differ only in their policy."""
    print_headline(results[0], console)
    print_notices(dict.fromkeys(n for one in results for n in one["notices"]), console)
    print_table(comparison_table(results), console)


def comparison_table(results: Sequence[ReplayResult]) -> SummaryTable:
    """A column for each replay, named after its policy."""
    rows: tuple[tuple[str, Callable[[ReplayResult], str]], ...] = (
        ("token hit rate", lambda one: percent(one["saved_tokens"], one["input_tokens"])),
        ("on device", lambda one: percent(one["hit_tokens"]["device"], one["input_tokens"])),
        ("on host", lambda one: percent(one["hit_tokens"]["host"], one["input_tokens"])),
        ("tokens saved", lambda one: count(one["saved_tokens"])),
        ("computed tokens, p90", lambda one: count(one["computed_tokens_p90"])),
        ("tokens computed again", lambda one: count(one["recomputed_tokens"])),
        ("slots evicted from device", lambda one: count(_evicted(one, "device"))),
        ("slots evicted from host", lambda one: count(_evicted(one, "host"))),
        ("slots loaded back", lambda one: count(sum(one["load_backs"]["slots"].values()))),
        ("deferrals", lambda one: count(one["deferrals"])),
        ("retractions", lambda one: count(one["retractions"])),
        ("rejections", lambda one: count(one["rejections"])),
        (
            "CPU per request, mean µs",
            lambda one: micros(one["cpu_us_per_request"]["total"]["mean"]),
        ),
    )
    return SummaryTable(
        "Policies",
        "",
        ("", *(str(one["settings"]["eviction_policy"]) for one in results)),
        tuple((name, *map(cell, results)) for name, cell in rows),
    )


def _evicted(result: ReplayResult, tier: Literal["device", "host"]) -> int:
    return sum(n for tiers in result["evictions"].values() for n in tiers[tier].values())
