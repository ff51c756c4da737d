"""Progress of long work on stderr: a bar on a terminal, a line every half a minute elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["LINE_EVERY_S", "shown_progress"]

LINE_EVERY_S = 30.0

Report = Callable[[float, float], None]
"""Called with the finished and the expected amount."""


@contextmanager
def shown_progress(
    work: str, console: Console, clock: Callable[[], float] = time.monotonic
) -> Iterator[Report]:
    """A function to report progress to.

    Args:
        work: what is counted, such as `"requests"`.
        console: a console of stderr.
        clock: monotonic, in seconds.
    """
    if not console.is_terminal:
        yield _lines(work, console, clock)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(work, total=None, done="")
        yield lambda done, total: progress.update(
            task, completed=done, total=total, done=f"{_count(done)}/{_count(total)}"
        )


def _lines(work: str, console: Console, clock: Callable[[], float]) -> Report:
    started = told = clock()

    def report(done: float, total: float) -> None:
        nonlocal told
        now = clock()
        if now - told >= LINE_EVERY_S:
            told = now
            line = f"kvgraft: {_count(done)} of {_count(total)} {work} in {now - started:.0f} s"
            console.file.write(f"{line}\n")
            console.file.flush()

    return report


def _count(number: float) -> str:
    return f"{number:,.1f}".removesuffix(".0")
