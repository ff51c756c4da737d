"""Options of all commands with a workload: its requests, and the simulated engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console

from kvgraft.errors import ConfigError
from kvgraft_cli.cache_options import OptionGroup
from kvgraft_cli.sizes import TokenCount, WholeNumber
from kvgraft_replay.detect import TIME_UNITS, open_workload
from kvgraft_replay.numbers import Number
from kvgraft_replay.progress import shown_progress
from kvgraft_replay.synthetic import synthetic_workload
from kvgraft_replay.workload import Workload

if TYPE_CHECKING:
    from kvgraft_replay.engine import EngineModel

__all__ = ["engine_model", "engine_options", "read_workload", "workload_options"]

N_REQUESTS: Final = 2000
"""Default number of requests of a synthetic workload."""

workload_options = OptionGroup(
    click.argument("path", required=False, type=click.Path(path_type=Path)),
    click.option(
        "--synthetic",
        type=click.Choice(["agents", "chat", "rag"]),
        help="Generate a workload instead of reading PATH.",
    ),
    click.option(
        "--block-tokens",
        type=TokenCount(min=1),
        help="Tokens of the trace's blocks. Default: what its format, or its lengths, say.",
    ),
    click.option(
        "--time-unit",
        type=click.Choice(list(TIME_UNITS)),
        help="Unit of the trace's times that are numbers. Default: its format's.",
    ),
    click.option("--users", type=WholeNumber(min=1), help="Closed loop with that many users."),
    click.option(
        "--limit",
        type=WholeNumber(min=1),
        help="Replay at most N requests: the first, or whole sessions of all users.",
    ),
    click.option(
        "--requests",
        type=WholeNumber(min=1),
        help=f"Size of a synthetic workload. Default: {N_REQUESTS}.",
    ),
    click.option(
        "--seed",
        type=WholeNumber(min=0),
        default=0,
        show_default=True,
        help="Seed of everything random.",
    ),
)
"""The trace's path and the options of workloads, for `read_workload`."""

engine_options = OptionGroup(
    click.option(
        "--chunk-tokens",
        type=TokenCount(min=1),
        default=8192,
        show_default=True,
        help="Most prompt tokens computed in one step.",
    ),
    click.option(
        "--max-running",
        type=WholeNumber(min=1),
        default=256,
        show_default=True,
        help="Most requests running at a time.",
    ),
    click.option(
        "--reserve-tokens",
        type=TokenCount(min=0),
        default=512,
        show_default=True,
        help="Decode tokens admission keeps slots for, per request.",
    ),
    click.option(
        "--prefill-rate",
        type=Number(min=1),
        default=100_000.0,
        show_default=True,
        help="Prompt tokens per second of the pretended engine.",
    ),
    click.option(
        "--decode-rate",
        type=Number(min=1),
        default=100.0,
        show_default=True,
        help="Output tokens per second and request of the pretended engine.",
    ),
    click.option(
        "--hints/--no-hints",
        default=True,
        show_default=True,
        help="Tell the policy why outputs ended, where the trace says it.",
    ),
    click.option(
        "--announce/--no-announce",
        default=False,
        show_default=True,
        help="Announce waiting requests: other data is evicted before theirs.",
    ),
)
"""The options of the simulated engine, for `engine_model`."""


def read_workload(path: Path | None, options: Mapping[str, Any]) -> Workload:
    """The workload that the options name.

    Raises:
        ConfigError: no workload, or two.
        TraceError: a trace that cannot be read.
    """
    if (path is None) == (options["synthetic"] is None):
        raise ConfigError("give a trace's PATH or --synthetic agents|chat|rag, one of the two")
    if path is None:
        for name in ("block_tokens", "time_unit"):
            if options[name] is not None:
                option = "--" + name.replace("_", "-")
                raise ConfigError(
                    f"{option} is of a trace, and --synthetic reads none; leave it out"
                )
        with shown_progress("requests made", Console(stderr=True)) as progress:
            return synthetic_workload(
                options["synthetic"],
                requests=options["requests"] or N_REQUESTS,
                seed=options["seed"],
                progress=progress,
            )
    if options["requests"] is not None:
        raise ConfigError("--requests is of --synthetic, and PATH is a trace; give --limit instead")
    return open_workload(
        path,
        limit=options["limit"],
        users=options["users"],
        block_tokens=options["block_tokens"],
        time_unit=options["time_unit"],
    )


def engine_model(options: Mapping[str, Any]) -> EngineModel:
    """The engine that the options describe."""
    from kvgraft_replay.engine import EngineModel

    return EngineModel(
        prefill_tokens_s=options["prefill_rate"],
        decode_tokens_s=options["decode_rate"],
        chunk_tokens=options["chunk_tokens"],
        max_running=options["max_running"],
        reserve_tokens=options["reserve_tokens"],
        hints=options["hints"],
        announce=options["announce"],
    )
