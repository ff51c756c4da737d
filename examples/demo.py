"""`make demo`: conversations with real architectures, in pools that are far too small.

Ten conversations of four turns over two shared system prompts talk to tiny models with random
weights. Everything has to happen: prefixes go to the host and come back, windows and states are
evicted on their own, requests wait and make room for one another, and data used twice is stored.
Then a second process, which begins cold, is asked the last questions again. Every answer is
compared, token by token, with the model's answer when it computes everything again; in double
precision, so that nothing is left to rounding.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from demo_conversations import (
    CONVERSATIONS,
    SHOWS,
    SYSTEM,
    TURNS,
    Again,
    Conversations,
    Progress,
    report,
)
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from kvgraft import KvgraftError
from kvgraft_replay.report import write_html

SECOND = Path(__file__).with_name("demo_again.py")


def overview(rows: list[Progress]) -> Table:
    """The live table: 80 columns are enough for it."""
    table = Table(
        title=f"{CONVERSATIONS} conversations x {TURNS} turns over {len(SYSTEM)} system prompts",
        caption="hits: share of the prompt tokens that was cached; (host): share from the host\n"
        "evicted: slots, and those that went while the rest of their page stayed\n"
        "waited: tries of requests that did not fit yet; retr.: requests that made room",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("architecture", no_wrap=True)
    for name in ("right", "hits (host) %", "evicted (alone)", "waited", "retr.", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row.engine is None:
            table.add_row(f"{row.show.family}\n[dim]{row.show.about}[/]", *[""] * 6)
            continue
        totals = row.engine.totals
        prompt_tokens = max(totals.prompt_tokens, 1)
        fired = row.fired()
        evicted = []
        for component in row.engine.memory.cache.tree.components:
            alone = fired.get(f"{component.name} alone")
            some = "" if alone is None else f" ({alone})"
            evicted.append(f"{component.name} {fired[f'{component.name} evicted']}{some}")
        mark = "red" if row.wrong else "green"
        table.add_row(
            f"{row.show.family}\n[dim]{row.show.about}[/]",
            f"[{mark}]{row.answers - row.wrong}/{row.answers}[/]",
            f"{100 * totals.cached_tokens / prompt_tokens:.1f} "
            f"({100 * totals.host_tokens / prompt_tokens:.1f})",
            "\n".join(evicted),
            str(totals.deferrals),
            str(totals.retractions),
            f"{row.seconds:.0f}",
        )
    return table


def storage_table(rows: list[Progress]) -> Table:
    """The second process's result."""
    table = Table(
        title="A second process begins cold: the last questions",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("architecture", no_wrap=True)
    for name in ("right", "prompt tokens", "from storage", "%", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        again = row.again
        if again is None:
            table.add_row(row.show.family, *[""] * 5)
            continue
        mark = "red" if again.wrong else "green"
        table.add_row(
            row.show.family,
            f"[{mark}]{again.answers - again.wrong}/{again.answers}[/]",
            f"{again.prompt_tokens:,}",
            f"{again.storage_tokens:,}",
            f"{100 * again.storage_tokens / again.prompt_tokens:.1f}",
            f"{again.seconds:.1f} s",
        )
    return table


@contextmanager
def second_process(storage: str) -> Iterator[subprocess.Popen[str]]:
    """The process that begins cold; it imports its modules while it waits for the questions."""
    command = [sys.executable, str(SECOND), storage]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as second:
        try:
            yield second
        except BaseException:  # there are no questions
            second.kill()
            raise


def ask_again(rows: list[Progress], second: subprocess.Popen[str]) -> Iterator[None]:
    """Ask the second process; yields when it is done with an architecture."""
    prompts = {row.show.family: list(row.prompts.values()) for row in rows}
    waiting = {row.show.family: row for row in rows}
    assert second.stdin is not None
    assert second.stdout is not None
    json.dump(prompts, second.stdin)
    second.stdin.close()
    for line in second.stdout:
        again = Again(**json.loads(line))
        waiting.pop(again.family).again = again
        yield
    if second.wait() or waiting:
        raise SystemExit(f"the second process failed with {second.returncode}; see above")


@contextmanager
def store(url: str | None) -> Iterator[str]:
    """The store to use: the one asked for, or a temporary directory."""
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="kvgraft-demo-") as directory:
        yield f"file:{directory}?capacity=512MiB"


def talk(
    rows: list[Progress],
    storage: str,
    second: subprocess.Popen[str],
    html: Path,
    console: Console,
) -> None:
    """All conversations, their reports, and the second process."""
    with Live(overview(rows), console=console, refresh_per_second=8) as live:
        for row in rows:
            for _ in Conversations(row, storage).run():
                live.update(overview(rows))
            if not console.is_terminal:  # the table is printed at its end there
                console.print(f"{row.show.family}: {row.answers} answers", highlight=False)
    console.print()
    for row in rows:
        assert row.engine is not None
        path = html / f"kvgraft-demo-{row.show.family}.html"
        write_html(report(row), path)
        console.print(f"report: {path}", highlight=False, soft_wrap=True)
        row.engine.close()  # data still to be stored is stored now
    console.print()
    with Live(storage_table(rows), console=console, refresh_per_second=8) as live:
        for _ in ask_again(rows, second):
            live.update(storage_table(rows))
    console.print()


def summary(rows: list[Progress], console: Console) -> bool:
    """Say what came of it; whether everything happened and every answer was right."""
    fired: dict[str, int] = {}
    wrong = answers = 0
    for row in rows:
        assert row.engine is not None
        assert row.again is not None
        counts = row.fired() | {"storage hits": row.again.storage_tokens}
        for name, count in counts.items():
            fired[name] = fired.get(name, 0) + count
        wrong += row.wrong + row.again.wrong
        answers += row.answers + row.again.answers
        if row.engine.memory.sparse is not None:
            console.print(
                f"{row.show.family} fetched {row.engine.totals.rows_moved:,} rows from the host; "
                f"attention over everything would have fetched {row.engine.totals.rows_dense:,}",
                highlight=False,
            )
    console.print(
        f"{answers - wrong} of {answers} answers equal the model's answers without a cache, "
        "token by token",
        highlight=False,
    )
    idle = [name for name, count in fired.items() if not count]
    if idle:
        console.print(f"[yellow]did not happen[/]: {', '.join(idle)}", highlight=False)
    return not wrong and not idle


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--html", type=Path, default=Path(), help="directory for the reports, one per model"
    )
    parser.add_argument(
        "--model",
        action="append",
        choices=[show.family for show in SHOWS],
        help="only this architecture; may be given more than once",
    )
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="store to use, as in file:PATH?capacity=1GiB; a temporary directory by default",
    )
    arguments = parser.parse_args(given)
    transformers.logging.set_verbosity_error()  # missing kernels for GPUs are no news here
    torch.set_num_threads(1)  # products of this size are faster on one
    console = Console()
    wanted = arguments.model or [show.family for show in SHOWS]
    arguments.html.mkdir(parents=True, exist_ok=True)
    rows = [Progress(show) for show in SHOWS if show.family in wanted]
    try:
        with store(arguments.storage) as storage, second_process(storage) as second:
            talk(rows, storage, second, arguments.html, console)
    except KvgraftError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: stopped\n")
    return 0 if summary(rows, console) else 1


if __name__ == "__main__":
    sys.exit(main())
