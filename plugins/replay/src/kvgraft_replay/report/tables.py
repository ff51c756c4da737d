"""The replay result as terminal tables that fit 80 columns and need no colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvgraft_replay.report.point_tables import point_tables
from kvgraft_replay.report.storage_tables import storage_tables
from kvgraft_replay.report.summary import (
    SummaryTable,
    checks,
    count,
    cpu_table,
    headline,
    percent,
    result_tables,
    seconds,
    served_nothing,
    token_table,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvgraft_replay.report.schema import ReplayResult

__all__ = ["print_headline", "print_notices", "print_table", "print_tables", "writer"]

GAP = 3
"""Spaces between two columns of a table."""

LEAST_LABEL = 12
"""Fewest letters of a label on a line."""

UNBOUNDED = 10_000
"""More columns than any table has."""

ASCII = str.maketrans({"–": "-", "µ": "u", "\u00a0": " "})
VERDICT_STYLES = {"ok": "green", "FAIL": "bold red", "not checked": "yellow"}


def print_tables(result: ReplayResult, console: Console) -> None:
    """Print the whole result; names from the trace or from plugins are never read as markup."""
    text = writer(console)
    print_headline(result, console)
    took = f"{seconds(result['virtual_s'])} of traffic in {seconds(result['wall_s'])}"
    policy = result["settings"]["eviction_policy"]
    console.print(text(f"{took}, eviction policy {policy}", "dim"))
    rate = percent(result["token_hit_rate"], 1 if result["input_tokens"] else 0)
    console.print(text(f"token hit rate {rate}", "bold"))
    print_notices(result.get("notices", ()), console)
    verdicts = checks(result)
    zero = Table()
    for heading in (*(check.name for check in verdicts), "payloads verified"):
        zero.add_column(text(heading), justify="right", overflow="fold")
    cells = [
        text(f"{count(check.value)} {check.verdict}", VERDICT_STYLES[check.verdict])
        for check in verdicts
    ]
    cells.append(text(count(result["payloads_verified"])))
    _keep_whole(cells)
    zero.add_row(*cells)
    _print(console, zero, text("Checks (errors must be 0)", "bold"))
    if served_nothing(result):
        return  # empty tables would hide the note
    found = (*result_tables(result), *point_tables(result), *storage_tables(result))
    for table in (token_table(result), *found, cpu_table(result)):
        print_table(table, console)


def print_headline(result: ReplayResult, console: Console) -> None:
    """Print what was replayed."""
    text = writer(console)
    workload = result["workload"]
    console.print(text(f"Replay of {workload['name']} ({workload['format']})", "bold"))
    console.print(
        text(
            f"{headline(result)}: "
            f"{count(result['input_tokens'])} input and {count(result['output_tokens'])} output "
            "tokens"
        )
    )


def print_notices(notices: Iterable[str], console: Console) -> None:
    """Print the notes to read beside a hit rate, and an empty line."""
    text = writer(console)
    for notice in notices:
        console.print(text(f"note: {notice}", "yellow"), soft_wrap=True)
    console.print()


def print_table(table: SummaryTable, console: Console) -> None:
    """Print one table under its title, or a note that it is empty."""
    text = writer(console)
    title = text(table.title, "bold")
    if table.note:
        title += text(f" ({table.note})", "dim")
    if table.rows:
        _print(console, _grid(table, text, console.width), title)
    else:
        console.print(title + text(": nothing to report"))
        console.print()


def writer(console: Console) -> Callable[..., Text]:
    """Makes styled text: never from markup, and in ASCII if the console has only that."""
    ascii_only = console.options.ascii_only

    def text(words: str, style: str = "") -> Text:
        return Text(words.translate(ASCII) if ascii_only else words, style=style)

    return text


def _grid(table: SummaryTable, text: Callable[[str], Text], width: int) -> Table:
    """A table in `width` columns, if possible.

    In a narrow console headings are wrapped first, then labels, since a row needs its name. A
    number is never wrapped, and truncated only visibly, since a part of it would be another number.
    """
    grid = Table()
    rows = [[text(cell) for cell in row] for row in table.rows]
    last = len(table.columns) - 1
    for index, heading in enumerate(table.columns):
        is_words = index < table.n_labels or (index == last and table.last_is_words)
        grid.add_column(text(heading), justify="left" if is_words else "right", overflow="fold")
        if not is_words:
            _keep_whole([row[index] for row in rows])
    for row in rows:
        grid.add_row(*row)
    _style(grid)
    if _natural_width(grid) > width:
        for column, columns in zip(grid.columns, _narrow(table, width - GAP * last)):
            column.width = columns
    return grid


def _narrow(table: SummaryTable, width: int) -> list[int]:
    """Widths of columns: numbers first, then the others, one by one."""
    cells = list(zip(table.columns, *table.rows))
    whole = [max(map(cell_len, column)) for column in cells]
    words = [max(cell_len(w) for cell in column for w in cell.split()) for column in cells]
    least = [max(map(cell_len, column[1:])) for column in cells]
    for index in range(len(cells)):
        if index < table.n_labels or (index == len(cells) - 1 and table.last_is_words):
            least[index] = min(LEAST_LABEL, words[index])
    for wanted in (words, whole):
        while short := [index for index in range(len(cells)) if least[index] < wanted[index]]:
            if sum(least) >= width:
                return least
            least[min(short, key=lambda index: least[index])] += 1
    return least


def _keep_whole(cells: Sequence[Text]) -> None:
    """Do not wrap these columns; text that does not fit ends in an ellipsis."""
    for cell in cells:
        cell.no_wrap, cell.overflow = True, "ellipsis"


def _natural_width(grid: Table) -> int:
    wide = Console(width=UNBOUNDED)
    return Measurement.get(wide, wide.options, grid).maximum


def _style(grid: Table) -> None:
    grid.box = box.SIMPLE_HEAD
    grid.show_edge = False
    grid.pad_edge = False


def _print(console: Console, table: Table, title: Text) -> None:
    _style(table)
    console.print(title)
    console.print(table)
    console.print()
