"""`kvgraft check`: the contract suite on one component."""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich.console import Console
from rich.markup import escape

from kvgraft.errors import ConfigError
from kvgraft.optional import PARTS, how_to_install
from kvgraft_cli.components import parse_component, parse_value
from kvgraft_cli.console import OutputConsole
from kvgraft_testing.working import lines_about

if TYPE_CHECKING:
    from kvgraft_testing.result import Result

__all__ = ["check", "shown_working"]

STYLES = {
    "passed": "green",
    "failed": "bold red",
    "unexpected pass": "bold red",
    "expected failure": "yellow",
    "undecided": "yellow",
    "not applicable": "dim",
}

HEADER = (
    "A clause is a rule and its check. RULE-driven: a state machine makes random calls of a cache "
    "with the component, and looks at the rule after each. No clause can know whether the declared "
    "reach and the size of a slot are those of the model; see check_restored_logits."
)


def _options(texts: tuple[str, ...]) -> dict[str, Any]:
    options = {}
    for text in texts:
        field, equals, value = text.partition("=")
        if not equals or not field.strip():
            raise ConfigError(f"--option {text!r} is not NAME=VALUE, such as window=4096")
        if field.strip() in options:
            raise ConfigError(f"--option {field.strip()!r} is given twice; keep one")
        options[field.strip()] = parse_value(value)
    return options


@click.command()
@click.argument("component", metavar="NAME[:OPTION=VALUE,...]")
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
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    help="The device of the pools, such as cuda or xpu. With simulated, the state machine runs on "
    "one that checks the order of copies.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of lines.")
@click.option("--all", "show_all", is_flag=True, help="List clauses that do not apply as well.")
def check(
    component: str,
    options: tuple[str, ...],
    profile: str,
    device: str,
    *,
    as_json: bool,
    show_all: bool,
) -> None:
    """Run the contract suite on the installed component NAME.

    Its options come with the name, as in NAME:window=8, or with --option.

    Prints each failure with its rule, the observation and the calls that lead there, then a line
    per clause. Exits with 1 if a clause fails. The component runs in processes of its own.
    """
    name, given = parse_component(component)
    more = _options(options)
    for field in sorted(given.keys() & more.keys()):
        raise ConfigError(f"option {field!r} of component {name!r} is given twice; keep one")
    signal.signal(signal.SIGTERM, _stop)
    console = OutputConsole()
    with shown_working(f"driving {name!r} through the core"):
        results = _results(name, {**given, **more}, profile, device)
    if as_json:
        click.echo(json.dumps([result.as_json() for result in results], indent=1))
    else:
        console.print(HEADER, highlight=False, soft_wrap=True)
        console.print()
        _print_failures(console, results)
        _print_clauses(console, results, show_all=show_all)
        counts = Counter(result.status.value for result in results)
        told = ", ".join(f"{counts[status]} {status}" for status in STYLES if counts[status])
        console.print(f"component {name!r}: {told}", highlight=False, soft_wrap=True)
    if any(result.bad for result in results):
        sys.exit(1)


@contextmanager
def shown_working(work: str) -> Iterator[None]:
    """Show that the work goes on: a spinner on a terminal, elsewhere a line now and then."""
    waiting = Console(stderr=True)
    if waiting.is_terminal:
        with waiting.status(work):
            yield
        return

    def write(line: str) -> None:
        waiting.file.write(f"{line}\n")
        waiting.file.flush()

    with lines_about(work, write):
        yield


def _stop(number: int, frame: object) -> NoReturn:
    """End as other commands do, and the process of the component first."""
    sys.exit(128 + number)


def _results(name: str, options: dict[str, Any], profile: str, device: str) -> list[Result]:
    """The suite's results, from another process; this one imports nothing of the component."""
    try:
        from kvgraft_testing.process import SuiteProcess, Unusable
    except ImportError as error:
        raise ConfigError(
            f"the contract suite needs {error.name}; {how_to_install(*PARTS['simulated'])}"
        ) from error
    try:
        suite = SuiteProcess(name, options, profile, None, device)
    except Unusable as error:
        return [error.result]
    try:
        return suite.run()
    finally:
        suite.close()


def _print_failures(console: Console, results: list[Result]) -> None:
    for result in results:
        if not result.bad:
            continue
        heading = f"{result.heading} [{result.clause}]"
        console.print(heading, style="bold", highlight=False, soft_wrap=True, markup=False)
        console.print(f"  seen: {result.evidence}", highlight=False, soft_wrap=True, markup=False)
        for number, step in enumerate(result.steps, 1):
            console.print(f"  {number:>3}. {step}", highlight=False, soft_wrap=True, markup=False)
        console.print()


def _print_clauses(console: Console, results: list[Result], *, show_all: bool) -> None:
    """A line per clause, failures first; those that are undecided are counted, by reason."""
    undecided = Counter(each.evidence for each in results if each.status.value == "undecided")
    shown = set(STYLES) - {"undecided"} - (set() if show_all else {"not applicable"})
    for result in sorted(results, key=lambda each: not each.bad):
        if result.status.value in shown:
            _print_line(console, result)
    for reason, count in undecided.items():
        _print(console, "undecided", f"{count} clauses: {reason}")
    console.print()


def _print_line(console: Console, result: Result) -> None:
    seconds = f"  ({result.seconds:.1f} s)" if result.seconds >= 1 else ""
    _print(console, result.status.value, f"{result.clause}{seconds}")


def _print(console: Console, status: str, text: str) -> None:
    line = f"[{STYLES[status]}]{status:>16}[/]  {escape(text)}"
    console.print(line, highlight=False, soft_wrap=True)
