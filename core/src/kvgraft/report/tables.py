"""The replay result as terminal tables that hold at 80 columns and without colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from kvgraft.report.summary import (
    SummaryTable,
    checks,
    count,
    cpu_table,
    percent,
    result_tables,
    seconds,
    token_table,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from kvgraft.report.schema import ReplayResult

__all__ = ["print_tables"]

ASCII = str.maketrans({"–": "-", "µ": "u", "\u00a0": " "})
VERDICT_STYLES = {"ok": "green", "FAIL": "bold red", "not checked": "yellow"}


def print_tables(result: ReplayResult, console: Console) -> None:
    """Print the whole result; names from the trace or from plugins are never read as markup."""
    ascii_only = console.options.ascii_only

    def text(words: str, style: str = "") -> Text:
        return Text(words.translate(ASCII) if ascii_only else words, style=style)

    workload = result["workload"]
    console.print(text(f"Replay of {workload['name']} ({workload['format']})", "bold"))
    console.print(
        text(
            f"{count(result['requests'])} of {count(workload['requests'])} requests, "
            f"{count(result['input_tokens'])} input and {count(result['output_tokens'])} output "
            "tokens"
        )
    )
    console.print(
        text(f"{seconds(result['virtual_s'])} of traffic in {seconds(result['wall_s'])}", "dim")
    )
    rate = percent(result["token_hit_rate"], 1 if result["input_tokens"] else 0)
    console.print(text(f"token hit rate {rate}", "bold"))
    console.print()

    verdicts = checks(result)
    zero = Table()
    for heading in (*(check.name for check in verdicts), "payloads verified"):
        zero.add_column(text(heading), justify="right", no_wrap=True)
    zero.add_row(
        *(
            text(f"{count(check.value)} {check.verdict}", VERDICT_STYLES[check.verdict])
            for check in verdicts
        ),
        text(count(result["payloads_verified"])),
    )
    _print(console, zero, text("Must be zero", "bold"))
    for table in (token_table(result), *result_tables(result), cpu_table(result)):
        title = text(table.title, "bold")
        if table.note:
            title += text(f" ({table.note})", "dim")
        if table.rows:
            _print(console, _grid(table, text), title)
        else:
            console.print(title + text(": nothing to report"))
            console.print()


def _grid(table: SummaryTable, text: Callable[[str], Text]) -> Table:
    grid = Table()
    last = len(table.columns) - 1
    for index, heading in enumerate(table.columns):
        is_words = index < table.n_labels or (index == last and table.last_is_words)
        grid.add_column(
            text(heading),
            justify="left" if is_words else "right",
            no_wrap=not is_words,
            # Part of a number would be read as another number.
            overflow="fold" if is_words else "ellipsis",
        )
    for row in table.rows:
        grid.add_row(*map(text, row))
    return grid


def _print(console: Console, table: Table, title: Text) -> None:
    table.box = box.SIMPLE_HEAD
    table.show_edge = False
    table.pad_edge = False
    console.print(title)
    console.print(table)
    console.print()
