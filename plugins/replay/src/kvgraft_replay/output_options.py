"""Options of all commands that write results to files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from kvgraft_cli.cache_options import OptionGroup
from kvgraft_cli.console import OutputConsole
from kvgraft_replay.report.output import Target, expect_distinct

__all__ = ["open_targets", "output_options", "save", "tables_console"]

output_options = OptionGroup(
    click.option(
        "--json", "json_path", metavar="FILE", help="Write the result here, or to stdout (-)."
    ),
    click.option("--html", "html_path", metavar="FILE", help="Write a report here."),
)
"""The options for output files."""


def open_targets(options: Mapping[str, Any], trace: Path | None) -> dict[str, Target]:
    """The files for results, by option; checked before the replays.

    Raises:
        ConfigError: a path that cannot be written, is given twice or is the trace's.
    """
    paths = {"--json": options["json_path"], "--html": options["html_path"]}
    targets = {option: Target(path) for option, path in paths.items() if path is not None}
    expect_distinct(list(targets.items()), [] if trace is None else [trace])
    return targets


def tables_console(targets: Mapping[str, Target]) -> OutputConsole:
    """The console for tables: stderr if a result goes to standard output."""
    return OutputConsole(stderr=any(target.is_standard_output for target in targets.values()))


def save(result: object, html: Callable[[], str], targets: Mapping[str, Target]) -> None:
    """Write a result to the files that were asked for.

    Args:
        result: lists and dictionaries, for `--json`.
        html: renders it for `--html`; called only if that was given.
        targets: the result of `open_targets`.

    Raises:
        ConfigError: a file that cannot be written; it keeps its content.
    """
    renderers = {"--json": lambda: json.dumps(result, indent=1) + "\n", "--html": html}
    for option, target in targets.items():
        try:
            target.write(renderers[option]())
        except BrokenPipeError:
            OutputConsole().on_broken_pipe()
