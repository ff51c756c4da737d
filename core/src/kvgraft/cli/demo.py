"""`kvgraft demo`: every mechanism once, explained as it goes."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from kvgraft.cli.replay import run_with_progress, save
from kvgraft.replay.synthetic import synthetic_workload
from kvgraft.report import print_tables

__all__ = ["demo"]


@click.command()
@click.option(
    "--html",
    "html_path",
    type=click.Path(path_type=Path),
    default="kvgraft-demo.html",
    show_default=True,
    help="Where the report goes.",
)
def demo(html_path: Path) -> None:
    """Watch hybrid traffic go through a cache small enough that everything happens."""
    from kvgraft.replay.engine import EngineModel
    from kvgraft.replay.replay import ReplaySettings

    workload = synthetic_workload("agents", requests=300, seed=0)
    settings = ReplaySettings(
        cache={
            "components": {"full": {}, "swa": {"window": 1024}, "mamba": {"states": 48}},
            "device_tokens": 400_000,
            "host_tokens": 1_600_000,
        },
        model=EngineModel(reserve_tokens=64),
    )
    console = Console()
    result = run_with_progress(workload, settings, Console(stderr=True))
    print_tables(result, console)
    save(result, None, html_path)
