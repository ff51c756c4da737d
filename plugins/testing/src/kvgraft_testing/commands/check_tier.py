"""`kvgraft check-tier`: the suite for tiers on one class or store."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvgraft.errors import ConfigError
from kvgraft_cli.console import OutputConsole
from kvgraft_testing.commands.check import STYLES, shown_working

if TYPE_CHECKING:
    from kvgraft_testing.result import Result

__all__ = ["check_tier"]


def _options(texts: tuple[str, ...]) -> dict[str, Any]:
    """`NAME=VALUE` as options; a value that is JSON is what it says.

    Raises:
        ConfigError: not of that form, or an option given twice.
    """
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(
                f"--option {text!r} is not NAME=VALUE, such as root_dir={{directory}}"
            )
        if name.strip() in options:
            raise ConfigError(f"--option {name.strip()!r} is given twice; keep one")
        try:
            options[name.strip()] = json.loads(value)
        except ValueError:
            options[name.strip()] = value
    return options


@click.command("check-tier")
@click.argument("tier", metavar="PACKAGE.MODULE:CLASS|URL")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="An option of the tier, as its engine's configuration has it; a number, a list or an "
    "object is written as JSON. {directory} stands for an empty directory and {capacity} for "
    "--capacity. Repeat for more.",
)
@click.option(
    "--capacity",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    metavar="MIB",
    help="The capacity of the tier.",
)
@click.option(
    "--durable", is_flag=True, help="It fails if a next process finds nothing of what was stored."
)
@click.option(
    "--clause", "named", multiple=True, metavar="ID", help="Run this clause alone. Repeat for more."
)
@click.option(
    "--log",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A file for what the tier and its engine write; nowhere by default.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of lines.")
def check_tier(
    tier: str,
    options: tuple[str, ...],
    capacity: int,
    named: tuple[str, ...],
    log: Path | None,
    *,
    durable: bool,
    as_json: bool,
) -> None:
    """Run the suite for tiers on a class of vLLM's or SGLang's interface, or on a store.

    PACKAGE.MODULE:CLASS extends vLLM's SecondaryTierManager, SGLang's HiCacheStorage or kvgraft's
    StorageBackend; URL names a store, as in 'file:{directory}?capacity={capacity}'. The engine's
    own classes drive it, on a CPU.

    Prints a line per clause as it ends. Exits with 1 if a clause fails. The tier runs in processes
    of its own, and clauses kill some of them; use no store that holds data of yours.
    """
    from kvgraft_testing.tiers import CheckedTier

    with shown_working(f"opening {tier!r}"):
        checked = CheckedTier(
            tier, _options(options), capacity_nbytes=capacity << 20, durable=durable, log=log
        )
    console = OutputConsole()
    results: list[Result] = []
    try:
        idents = _chosen(named, checked.idents)
        if not as_json:
            console.print(f"{checked.kind}, {checked.engine}", highlight=False, soft_wrap=True)
        for ident in idents:
            results.append(checked.decide(ident))
            if not as_json:
                _print(console, results[-1])
    finally:
        checked.close()
    if as_json:
        click.echo(json.dumps([result.as_json() for result in results], indent=1))
    else:
        counts = Counter(result.status.value for result in results)
        told = ", ".join(f"{counts[status]} {status}" for status in STYLES if counts[status])
        console.print(f"tier {tier!r}: {told}", highlight=False, soft_wrap=True, markup=False)
    if any(result.bad for result in results):
        sys.exit(1)


def _chosen(named: tuple[str, ...], idents: tuple[str, ...]) -> tuple[str, ...]:
    """The named clauses, or all of a named rule; every one without a name.

    Raises:
        ConfigError: there is no such clause.
    """
    for name in named:
        if not any(name in (each, each.partition("-")[0]) for each in idents):
            raise ConfigError(f"--clause {name!r} is none of {', '.join(idents)}")
    return tuple(
        each for each in idents if not named or {each, each.partition("-")[0]} & set(named)
    )


def _print(console: OutputConsole, result: Result) -> None:
    style = STYLES[result.status.value]
    console.print(
        f"[{style}]{result.status.value:>16}[/]  ", end="", highlight=False, soft_wrap=True
    )
    told = f"{result.clause}: {result.evidence}" if result.evidence else result.clause
    console.print(told, highlight=False, soft_wrap=True, markup=False)
