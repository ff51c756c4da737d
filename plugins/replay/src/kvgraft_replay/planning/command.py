"""`kvgraft plan`: replays one trace at many sizes, then prints tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvgraft.errors import ConfigError
from kvgraft.optional import published
from kvgraft_cli.cache_options import cut_tokens_option, parse_tenants
from kvgraft_cli.sizes import PoolSize, WholeNumber
from kvgraft_replay.cache_options import cache_options, parse_components
from kvgraft_replay.numbers import Number
from kvgraft_replay.output_options import (
    open_targets,
    output_options,
    save,
    tables_console,
)
from kvgraft_replay.planning.html import render_plan
from kvgraft_replay.planning.models import (
    MODELS_GROUP,
    QUANTIZATIONS,
    components_of,
    model_name,
    quantized,
)
from kvgraft_replay.planning.schema import PlanResult
from kvgraft_replay.planning.tables import print_plan
from kvgraft_replay.progress import shown_progress
from kvgraft_replay.tenants import scanned, tenant_options
from kvgraft_replay.workload_options import (
    engine_model,
    engine_options,
    read_workload,
    workload_options,
)

__all__ = ["plan"]


class SizeList(PoolSize):
    """Sizes separated by commas, such as `40GB,80GB`."""

    name = "size,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Each size, once.

        Raises:
            click.BadParameter: one is no size, or out of range.
        """
        if not isinstance(value, str):
            return value
        sizes = [super(SizeList, self).convert(each, param, ctx) for each in value.split(",")]
        return list(dict.fromkeys(sizes))


SHORT = {"device": "device-tokens", "host": "host-tokens"}
"""Options that may be shortened: no torch device is used here."""


@click.command(context_settings={"token_normalize_func": lambda word: SHORT.get(word, word)})
@workload_options
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    metavar="CONFIG.json",
    help="The model's configuration, or a checkpoint's directory; weights are not read.",
)
@click.option(
    "--component",
    "components",
    multiple=True,
    metavar="NAME[:OPTION=VALUE,...]",
    help="Instead of a model: a component and its options; repeat for more.",
)
@click.option(
    "--quantization",
    type=click.Choice(sorted(QUANTIZATIONS)),
    help="Keys and values take one byte an element; states stay as they are.",
)
@click.option(
    "--device-tokens",
    "devices",
    type=SizeList(min=1),
    required=True,
    help="Device pool sizes: tokens, such as 4M,8M, or bytes of all components, such as 40GB,80GB.",
)
@click.option(
    "--host-tokens",
    "hosts",
    type=SizeList(min=0),
    default="0",
    show_default=True,
    help="Host mirror sizes, as for the device; each is replayed with each device size.",
)
@click.option(
    "--one-budget",
    is_flag=True,
    help="The pools of a tier share its bytes, and their sizes follow their use.",
)
@cache_options
@click.option(
    "--target",
    type=Number(0, 100, min_open=True),
    help="A hit rate in percent: find the smallest sizes that reach it, between those given.",
)
@click.option(
    "--growth/--no-growth",
    default=True,
    show_default=True,
    help="Replay also with other splits of the bytes, and with each pool a tenth larger.",
)
@click.option(
    "--load-policy",
    type=click.Choice(["cost", "always"]),
    default="always",
    show_default=True,
    help="Load every prefix back, or where that is estimated cheaper than --prefill-rate.",
)
@cut_tokens_option(0)
@tenant_options
@engine_options
@click.option(
    "--processes",
    type=WholeNumber(min=1),
    help="Replays that run at a time; as many as there are processors by default.",
)
@output_options
def plan(path: Path | None, **options: Any) -> None:
    """Find the sizes of pools for a trace and a model.

    Replays PATH, a trace as for `kvgraft replay`, at every size of --device-tokens with every
    size of --host-tokens, without taking the pools' memory. Exits with 1 if memory ran out in a
    replay or a ledger did not balance.
    """
    if options["target"] is not None and options["target"] < 1:
        said = f"note: --target is in percent; for a share of {options['target']:g} give "
        click.echo(f"kvgraft: {said}{100 * options['target']:g}", err=True)
    targets = open_targets(options, path)
    components = _components(options)
    result = _planned(path, components, options)
    try:
        save(result, lambda: render_plan(result), targets)
    finally:
        print_plan(result, tables_console(targets))
    for size in result["sizes"]:
        if size["out_of_memory"] or size["ledger_violations"]:
            where = f"device {size['device']}, host {size['host']}"
            click.echo(f"kvgraft: {where}: {size['first_problem']}", err=True)
            raise SystemExit(1)


def _components(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Options by component, from the model's configuration or the command line."""
    if (options["model"] is None) == (not options["components"]):
        raise ConfigError(
            "give --model CONFIG.json or --component NAME[:OPTION=VALUE,...], one of the two"
        )
    if options["tenants"] and options["one_budget"]:
        raise ConfigError(
            "--tenant and --one-budget: tenants have shares of pools of a fixed size; leave one "
            "of them out"
        )
    if options["model"] is None:
        components = parse_components(options["components"])
    else:
        components = components_of(options["model"], published(MODELS_GROUP))
    return quantized(components, options["quantization"]) if options["quantization"] else components


def _planned(
    path: Path | None, components: dict[str, dict[str, Any]], options: Mapping[str, Any]
) -> PlanResult:
    from kvgraft_replay.meter import Unmetered
    from kvgraft_replay.payload import Verify
    from kvgraft_replay.planning.sizes import all_sizes
    from kvgraft_replay.planning.sweep import Sweep, plan_sizes
    from kvgraft_replay.planning.workers import usable_processors
    from kvgraft_replay.replay import ReplaySettings

    cache: dict[str, Any] = {
        "components": components,
        "page_size": options["page_size"],
        "write_policy": options["write_policy"],
        "cut_tokens": options["cut_tokens"],
        "tenants": parse_tenants(options["tenants"]),
        "load": None
        if options["load_policy"] == "always"
        else {"prefill_tokens_s": options["prefill_rate"]},
    }
    sizes = all_sizes(
        cache,
        options["devices"],
        options["hosts"],
        options["policies"],
        one_budget=options["one_budget"],
    )
    workload, limit = scanned(read_workload(path, options), options)
    settings = ReplaySettings(
        cache={},
        users=options["users"],
        model=engine_model(options),
        verify=Verify.OFF,
        seed=options["seed"],
        limit=limit,
        meter=Unmetered,
        checks=1,
    )
    target = options["target"]
    with shown_progress("replays", Console(stderr=True)) as progress:
        sweep = Sweep(
            workload,
            settings,
            n_processes=options["processes"] or usable_processors(),
            progress=progress,
        )
        result = plan_sizes(
            sweep,
            sizes,
            growth=options["growth"],
            target=None if target is None else target / 100,
        )
    result["model"] = None if options["model"] is None else model_name(options["model"])
    return result
