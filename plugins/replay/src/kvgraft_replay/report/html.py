"""The replay result as one HTML page: no other file, no network, readable on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvgraft_replay.report.charts import (
    LEDGER_TONES,
    hit_rate_plot,
    load_plot,
    pool_plots,
    source_plot,
    source_tones,
)
from kvgraft_replay.report.icicle import RESIDENCIES, icicle
from kvgraft_replay.report.output import write_whole
from kvgraft_replay.report.plot import SIZE
from kvgraft_replay.report.point_tables import point_tables
from kvgraft_replay.report.storage_tables import storage_tables
from kvgraft_replay.report.summary import (
    checks,
    count,
    cpu_table,
    has_storage,
    has_unserved,
    headline,
    percent,
    result_tables,
    seconds,
    settings_rows,
    token_parts,
    token_table,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvgraft_replay.report.icicle import Icicle
    from kvgraft_replay.report.plot import Plot
    from kvgraft_replay.report.schema import ReplayResult

__all__ = ["plot_context", "render_html", "render_page", "write_html"]

TREE_HEIGHT_PX = (140, 560)
LEAF_PX = 5


def write_html(result: ReplayResult, path: str | Path) -> None:
    """Write the page to `path` as UTF-8, replacing its content; whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(path, render_html(result))


def render_html(result: ReplayResult) -> str:
    """The page as text. Names from traces and plugins are escaped."""
    return render_page("report/report.html.j2", _context(result))


def render_page(template: str, context: Mapping[str, object]) -> str:
    """Render a template of this package; values are escaped."""
    environment = Environment(
        loader=PackageLoader("kvgraft_replay", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(context)


def plot_context(plots: Sequence[Plot]) -> dict[str, object]:
    """The part of a page's context that its charts need.

    Args:
        plots: all plots of the page.
    """
    return {
        "size": SIZE,
        "plot_index": {id(plot): index for index, plot in enumerate(plots)},
        "id": id,
        "data": {"plots": [_hover(plot) for plot in plots], "tree": None},
    }


def _context(result: ReplayResult) -> dict[str, object]:
    requests_plot, per_bar = source_plot(result)
    pools = pool_plots(result)
    tree = icicle(result["tree"])
    rate, load = hit_rate_plot(result), load_plot(result)
    plots = [plot for plot in (rate, load, requests_plot, *(pool.plot for pool in pools)) if plot]
    cpu = cpu_table(result)
    return {
        **plot_context(plots),
        "title": result["workload"]["name"],
        "result": result,
        "checks": checks(result),
        "rate": percent(result["token_hit_rate"], 1 if result["input_tokens"] else 0),
        "parts": token_parts(result),
        "has_storage": has_storage(result),
        "has_unserved": has_unserved(result),
        "headline": headline(result),
        "notices": result.get("notices", ()),
        "source_tones": source_tones(result),
        "ledger_tones": LEDGER_TONES,
        "residencies": RESIDENCIES,
        "rate_plot": rate,
        "load_plot": load,
        "source_plot": requests_plot,
        "per_bar": per_bar,
        "pools": pools,
        "tree": tree,
        "tree_height": _tree_height(tree),
        "tables": (
            token_table(result),
            *result_tables(result),
            *point_tables(result),
            *storage_tables(result),
        ),
        "cpu": cpu,
        "cpu_bars": _cpu_bars(result, [row[0] for row in cpu.rows]),
        "settings": settings_rows(result["settings"]),
        "data": {"plots": [_hover(plot) for plot in plots], "tree": _tree_hover(tree)},
        "count": count,
        "percent": percent,
        "seconds": seconds,
    }


def _tree_height(tree: Icicle | None) -> int:
    low, high = TREE_HEIGHT_PX
    return min(max(tree.n_leaves * LEAF_PX, low), high) if tree else low


def _cpu_bars(result: ReplayResult, names: list[str]) -> list[tuple[float, float]]:
    """Per operation, p50 and p99 as a percentage of the slowest p99."""
    cpu = {name.replace("_", " "): of for name, of in result["cpu_us_per_request"].items()}
    longest = max((of["p99"] for of in cpu.values()), default=0.0) or 1.0
    return [
        (round(100 * cpu[name]["p50"] / longest, 2), round(100 * cpu[name]["p99"] / longest, 2))
        for name in names
    ]


def _hover(plot: Plot) -> dict[str, object]:
    return {
        "at": list(plot.at),
        "labels": list(plot.labels),
        "rows": [
            {
                "name": row.name,
                "tone": row.tone,
                "unit": row.unit,
                "values": [round(value, 4) for value in row.values],
            }
            for row in plot.rows
        ],
    }


def _tree_hover(tree: Icicle | None) -> dict[str, object] | None:
    if tree is None:
        return None
    return {
        "components": list(tree.components),
        "residencies": list(RESIDENCIES),
        "nodes": [
            [
                node["start"],
                node["end"],
                node["hits"],
                [
                    RESIDENCIES.index(node["residency"].get(name, "none"))
                    for name in tree.components
                ],
            ]
            for node in tree.nodes
        ],
    }
