"""`kvgraft check`: the contract suite on one component."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from kvgraft.cli.console import OutputConsole
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from kvgraft.testing import Result

__all__ = ["check"]

STYLES = {
    "passed": "green",
    "failed": "bold red",
    "unexpected pass": "bold red",
    "expected failure": "yellow",
    "undecided": "yellow",
    "not applicable": "dim",
}


def _options(texts: tuple[str, ...]) -> dict[str, Any]:
    options = {}
    for text in texts:
        field, equals, value = text.partition("=")
        if not equals or not field.strip():
            raise ConfigError(f"--option {text!r} is not NAME=VALUE, such as window=4096")
        options[field.strip()] = value.strip()
    return options


@click.command()
@click.argument("name")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="An option of the component; small pools and shapes are fast. Repeat for more.",
)
@click.option(
    "--profile",
    type=click.Choice(["dev", "ci", "nightly"]),
    default="ci",
    show_default=True,
    help="How hard the state machine looks.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of lines.")
@click.option("--all", "show_all", is_flag=True, help="List clauses that do not apply as well.")
def check(
    name: str, options: tuple[str, ...], profile: str, *, as_json: bool, show_all: bool
) -> None:
    """Run the contract suite on the installed component NAME.

    Prints a line per clause and, for each failure, the rule, what was seen and the calls that lead
    there. Exits with 1 if a clause fails. Needs the extra kvgraft[testing].
    """
    try:
        from kvgraft.testing import check_component
    except ImportError as error:
        raise ConfigError(
            f"the contract suite needs {error.name}; pip install 'kvgraft[testing]'"
        ) from error

    console = OutputConsole()
    waiting = Console(stderr=True)
    # The first clause to be decided waits for the state machine; the others do not take long.
    status = waiting.status(f"driving {name!r} through the core")

    def show(result: Result) -> None:
        status.stop()
        if not as_json and (show_all or result.status.value != "not applicable"):
            _print_line(console, result)

    if waiting.is_terminal:
        status.start()
    try:
        results = check_component(name, options=_options(options), profile=profile, progress=show)
    finally:
        status.stop()
    if as_json:
        click.echo(json.dumps([result.as_json() for result in results], indent=1))
    else:
        _print_end(console, name, results)
    if any(result.bad for result in results):
        sys.exit(1)


def _print_line(console: Console, result: Result) -> None:
    style = STYLES[result.status.value]
    seconds = f"  ({result.seconds:.1f} s)" if result.seconds >= 1 else ""
    console.print(
        f"[{style}]{result.status.value:>16}[/]  {result.clause}{seconds}",
        highlight=False,
        soft_wrap=True,
    )


def _print_end(console: Console, name: str, results: list[Result]) -> None:
    for result in results:
        if not result.bad:
            continue
        console.print()
        console.print(result.heading, style="bold", highlight=False)
        console.print(f"  seen: {result.evidence}", highlight=False, soft_wrap=True, markup=False)
        for number, step in enumerate(result.steps, 1):
            console.print(f"  {number:>3}. {step}", highlight=False, soft_wrap=True, markup=False)
    counts = Counter(result.status.value for result in results)
    console.print()
    told = ", ".join(f"{counts[status]} {status}" for status in STYLES if counts[status])
    console.print(f"component {name!r}: {told}", highlight=False)
