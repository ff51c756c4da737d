"""`kvgraft replay`: a workload through the cache, then tables."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvgraft.config import GuardMode
from kvgraft.errors import ConfigError, KvgraftError
from kvgraft.packages.registry import discover
from kvgraft.tree.component import ordered
from kvgraft_cli.cache_options import (
    check_tenants,
    cut_tokens_option,
    memory_options,
    parse_tenants,
    pool_sizes,
)
from kvgraft_cli.components import default_shape
from kvgraft_cli.sizes import PoolSize
from kvgraft_replay.cache_options import cache_options, parse_components
from kvgraft_replay.output_options import (
    open_targets,
    output_options,
    save,
    tables_console,
)
from kvgraft_replay.progress import shown_progress
from kvgraft_replay.ranks import started_ranks
from kvgraft_replay.report import ReplayResult, print_tables, render_html
from kvgraft_replay.report.comparison import print_comparison
from kvgraft_replay.report.output import Target
from kvgraft_replay.report.summary import served_nothing
from kvgraft_replay.storage_options import storage_options, storage_settings
from kvgraft_replay.tenants import scanned, tenant_options
from kvgraft_replay.workload import Workload
from kvgraft_replay.workload_options import (
    engine_model,
    engine_options,
    read_workload,
    workload_options,
)

__all__ = ["replay", "run_with_progress"]


def _widest_component() -> str:
    """The installed component with the widest reach, which is the base of any set.

    Raises:
        ConfigError: no usable component is installed.
    """
    shapes = []
    for found in discover():
        if found.plugin is not None:
            with suppress(KvgraftError):
                shapes.append(default_shape(found.plugin))
    if not shapes:
        raise ConfigError("no usable component is installed; see `kvgraft components`")
    return ordered(shapes)[0].name


def run_with_progress(workload: Workload, settings: Any, console: Console) -> ReplayResult:
    """Replay, and show its progress."""
    import torch

    from kvgraft_replay.replay import replay as run

    # The tensors are small: more threads would only slow copies down.
    torch.set_num_threads(1)
    with shown_progress("requests", console) as progress:
        return run(workload, settings, progress=progress)


@click.command()
@workload_options
@click.option(
    "--component",
    "components",
    multiple=True,
    metavar="NAME[:OPTION=VALUE,...]",
    help="A component and its options, such as NAME:window=4096; repeat for more. "
    "Default: the installed component of the widest reach.",
)
@click.option("--device", default="cpu", show_default=True, help="Torch device of the pools.")
@click.option(
    "--device-tokens",
    type=PoolSize(min=1),
    default=1_000_000,
    show_default=True,
    help="Device pool size: tokens, such as 4M, or bytes of all components, such as 40GB.",
)
@click.option(
    "--host-tokens",
    type=PoolSize(min=0),
    default=0,
    show_default=True,
    help="Host mirror size, as for the device; 0 for none.",
)
@memory_options
@cache_options
@click.option(
    "--load-policy",
    type=click.Choice(["cost", "always"]),
    default="cost",
    show_default=True,
    help="Load a prefix back if that is estimated cheaper than computing it, or always.",
)
@cut_tokens_option(0)
@tenant_options
@storage_options
@engine_options
@click.option(
    "--ranks",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Processes that replay the same, each with a cache of its own, as ranks of one model do; "
    "see docs/ranks.md. The tables are rank 0's.",
)
@click.option(
    "--verify",
    type=click.Choice(["full", "sampled", "off"]),
    default="full",
    show_default=True,
    help="Share of the reused data that is compared byte by byte. With off and no --storage, pools "
    "take no memory.",
)
@click.option(
    "--guard",
    type=click.Choice([mode.value for mode in GuardMode]),
    default=GuardMode.OFF.value,
    show_default=True,
    help="Share of the cache's operations checked against the contract; see docs/guard.md.",
)
@output_options
def replay(path: Path | None, **options: Any) -> None:
    """Replay a trace, or a synthetic workload, through the cache.

    PATH is a trace of blocks (Mooncake's, Bailian's or Dynamo's: one request per line, with
    hash_ids), of a coding agent (one session per line, with requests), or of lengths alone (Azure's
    or BurstGPT's CSV), plain or gzip. A model's part is played on a virtual clock;
    the cache, its pools and its copies are real. Exits with 1 if memory ran out, a byte was wrong
    or a ledger did not balance, and where no request was served.
    """
    targets = open_targets(options, path)
    _check_policies(options)
    check_tenants(options)
    workload, limit = scanned(read_workload(path, options), options)
    settings = _settings(options, limit)
    again = partial(_replay_again, path, options, settings)
    with started_ranks(options["ranks"], again) as group:
        settings = replace(settings, ranks=group)
        results = _replay(workload, settings, options["policies"], Console(stderr=True))
    _report(results, targets)


def _replay_again(path: Path | None, options: dict[str, Any], settings: Any, group: Any) -> None:
    """Replay on another rank, which reports nothing."""
    workload, _ = scanned(read_workload(path, options), options)
    _replay(workload, replace(settings, ranks=group), options["policies"], Console(quiet=True))


def _replay(
    workload: Workload, settings: Any, policies: Sequence[str], console: Console
) -> list[ReplayResult]:
    """Replay on this rank, once for each policy."""
    return [
        run_with_progress(
            workload, replace(settings, cache={**settings.cache, "policy": policy}), console
        )
        for policy in policies
    ]


def _settings(options: dict[str, Any], limit: int | None) -> Any:
    """The settings of a replay, by the command's options."""
    from kvgraft_replay.payload import Verify
    from kvgraft_replay.replay import ReplaySettings

    cache: dict[str, Any] = {
        "components": parse_components(options["components"] or [_widest_component()]),
        "page_size": options["page_size"],
        "device": options["device"],
        **pool_sizes(options),
        "policy": options["policies"][0],
        "write_policy": options["write_policy"],
        "cut_tokens": options["cut_tokens"],
        "storage": storage_settings(options),
        "guard": options["guard"],
        "tenants": parse_tenants(options["tenants"]),
    }
    if options["load_policy"] == "always":
        cache["load"] = None
    return ReplaySettings(
        cache=cache,
        users=options["users"],
        model=engine_model(options),
        verify=Verify(options["verify"]),
        seed=options["seed"],
        limit=limit,
    )


def _check_policies(options: Mapping[str, Any]) -> None:
    """Refuse several policies if one replay would change another, or if no output compares them.

    Raises:
        ConfigError: naming the option.
    """
    if len(options["policies"]) == 1:
        return
    named = ",".join(options["policies"])
    if options["storage"] is not None:
        raise ConfigError(
            f"--policy {named} and --storage: a replay would find what the one before stored; give "
            "one policy"
        )
    if options["html_path"] is not None:
        raise ConfigError(
            f"--policy {named} and --html: the report is of one replay; give one policy, or let "
            "kvgraft plan draw several"
        )


def _report(results: Sequence[ReplayResult], targets: Mapping[str, Target]) -> None:
    """Write and print one result, or several side by side.

    Exits with 1 if one is unsound or served nothing.
    """
    console, first = tables_console(targets), results[0]
    alone = len(results) == 1
    try:
        save(first if alone else results, lambda: render_html(first), targets)
    finally:  # tables are printed even if the disk is full
        if alone:
            print_tables(first, console)
        else:
            print_comparison(results, console)
    for result in results:
        if result["out_of_memory"] or result["payload_mismatches"] or result["ledger_violations"]:
            click.echo(f"kvgraft: {result['first_problem']}", err=True)
            sys.exit(1)
    for result in results:
        if served_nothing(result):
            told = "no request was served; see the note above and give more memory"
            click.echo(f"kvgraft: {told}", err=True)
            sys.exit(1)
