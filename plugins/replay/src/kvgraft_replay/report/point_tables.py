"""The report's tables about resume points; none if requests can resume at every boundary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft_replay.report.summary import SummaryTable, count

if TYPE_CHECKING:
    from kvgraft_replay.report.schema import PointCounts, ReplayResult

__all__ = ["point_tables"]

COUNTS = ("made", "skipped", "used", "lost")


def point_tables(result: ReplayResult) -> tuple[SummaryTable, ...]:
    """Points by kind, and their slots beside evict-first data."""
    points = result.get("resume_points")  # a result of an older version has none
    return () if points is None else (_kind_table(points), _slot_table(points))


def _kind_table(points: PointCounts) -> SummaryTable:
    by_count = [points["made"], points["skipped"], points["used"], points["lost"]]
    kinds = list(dict.fromkeys(kind for counts in by_count for kind in counts))
    numbers = {kind: [counts.get(kind, 0) for counts in by_count] for kind in kinds}
    return SummaryTable(
        "Resume points",
        "skipped: no slot; used: requests resumed there; lost: evicted",
        ("kind", *COUNTS),
        tuple((kind, *map(count, of)) for kind, of in numbers.items() if any(of)),
    )


def _slot_table(points: PointCounts) -> SummaryTable:
    return SummaryTable(
        "Kept and left behind",
        "slots at the end; kept: of points, or used again",
        ("component", "kept", "left behind"),
        tuple(
            (name, count(of["kept"]), count(of["left_behind"]))
            for name, of in points["slots"].items()
        ),
    )
