"""`kvgraft components`: the installed packages, and whether they can be used."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from kvgraft.contract import API_VERSION
from kvgraft.errors import ConfigError, KvgraftError, PluginError
from kvgraft.packages.registry import Found, Plugin, discover, select
from kvgraft.tree.component import ComponentShape
from kvgraft_cli.console import OutputConsole

__all__ = [
    "components",
    "default_shape",
    "describe",
    "parse_component",
    "parse_options",
    "parse_value",
]

COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "name": lambda row: str(row["name"]),
    "distribution": lambda row: f"{row['distribution'] or '-'} {row['version'] or ''}".strip(),
    "API": lambda row: row["api"] or "-",
    "about": lambda row: row["summary"] or "-",
    "reach": lambda row: row["reach"] or "-",
    "capabilities": lambda row: "\n".join(row["capabilities"]) or "-",
    "status": lambda row: "ok" if row["status"] == "ok" else "broken",
}
"""The table's columns: heading, and the cell's text of a row."""

LESS_TELLING = ("capabilities", "API", "distribution")
"""Columns that a narrow terminal leaves out, in this order."""

POOLS = ((1, 1), (64, 4096), (128, 4096))
"""Page sizes and tokens with which building a component is tried: the smallest, and usual ones."""


@click.command()
@click.option(
    "--build",
    is_flag=True,
    help="Build each with its default options: its reach, and whether it can be built. Loads "
    "torch, which takes seconds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of a table.")
def components(*, build: bool, as_json: bool) -> None:
    """List the installed component packages."""
    found = discover()
    rows = [describe(each, build=build) for each in found]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo("no component is installed; install a component package beside kvgraft")
        return
    console = OutputConsole()
    console.print(_table(rows, console, "about" if build else "reach"))
    for row in rows:
        if row["status"] != "ok":
            console.print(f"{row['name']}: {row['status']}", style="red", soft_wrap=True)


def _table(rows: list[dict[str, object]], console: OutputConsole, without: str) -> Table:
    """A table of as many columns as fit the terminal; nothing is truncated."""
    columns = [column for column in COLUMNS if column != without]
    table = _of(columns, rows)
    console.widen(table)
    for column in LESS_TELLING:
        if console.measured(table).minimum <= console.width:
            break
        columns.remove(column)
        table = _of(columns, rows)
    return table


def _of(columns: list[str], rows: list[dict[str, object]]) -> Table:
    table = Table(title=f"components (core API {API_VERSION})", title_justify="left")
    for column in columns:
        # A wrapped name cannot be copied; a wrapped reach can be read.
        table.add_column(column, no_wrap=column in ("name", "status"), overflow="fold")
    for row in rows:
        table.add_row(*(Text(COLUMNS[column](row)) for column in columns))
    return table


def describe(found: Found, *, build: bool) -> dict[str, object]:
    """One row of the list; with `build` also the reach with default options."""
    row: dict[str, object] = {
        "name": found.name,
        "distribution": found.distribution,
        "version": found.version,
        "api": None,
        "kind": None,
        "home": None,
        "reach": None,
        "capabilities": [],
        "summary": None,
        "status": found.status,
    }
    if found.plugin is not None:
        declaration = found.plugin.declaration
        row.update(
            api=declaration.api_version,
            kind=declaration.kind.value,
            home=declaration.home.value,
            capabilities=sorted(declaration.capabilities),
            summary=declaration.summary,
        )
        if build:
            try:
                row["reach"] = str(default_shape(found.plugin).reach)
            except KvgraftError as error:
                reason = error.reason if isinstance(error, PluginError) else str(error)
                row["status"] = f"cannot be built with its default options: {reason}"
    return row


def default_shape(plugin: Plugin) -> ComponentShape:
    """The component with its default options and the smallest pools that it accepts.

    Raises:
        KvgraftError: it cannot be built.
    """
    from kvgraft.packages.dispatch import mount
    from kvgraft.pools import BuildContext

    refused: KvgraftError | None = None
    for page_size, tokens in POOLS:
        context = BuildContext(page_size, "cpu", tokens, tokens, pin_host=False)
        try:
            return mount(plugin, {}, context).shape
        except KvgraftError as error:
            refused = error
    assert refused is not None
    raise refused


def _own_option(name: str) -> str:
    """The component and the first option of its own, as in `swa:window`; else a description."""
    try:
        (plugin,) = select([name])
    except KvgraftError:
        return "NAME:OPTION"
    options = plugin.declaration.options
    shared = getattr(options.__base__, "model_fields", {})
    return f"{name}:{next((o for o in options.model_fields if o not in shared), 'OPTION')}"


def parse_options(subject: str, text: str, example: str) -> dict[str, str | list[str]]:
    """`window=4096,n_layers=2` as options; `layers=0,2` or `layers=[0,2]` gives one a list.

    Args:
        subject: begins an error message.
        text: the text to parse.
        example: a valid text for the error message.

    Raises:
        ConfigError: not of that form, or an option given twice.
    """
    options: dict[str, str] = {}
    field = ""
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        is_open = options and options[field].startswith("[") and not options[field].endswith("]")
        if options and (is_open or item.strip().isdecimal()):
            options[field] += f",{item.strip()}"
            continue
        field = name.strip()
        if not equals or not field:
            raise ConfigError(
                f"{subject}: {item!r} is not OPTION=VALUE; write for example {example}"
            )
        if field in options:
            raise ConfigError(f"{subject}: option {field!r} is given twice; keep one")
        options[field] = value.strip()
    return {name: parse_value(value) for name, value in options.items()}


def parse_value(text: str) -> str | list[str]:
    """An option's value: a list where it has commas or brackets, such as `0,2` and `[0]`."""
    text = text.strip()
    in_brackets = text.startswith("[") and text.endswith("]")
    if not in_brackets and not re.fullmatch(r"\d+(\s*,\s*\d+)+", text):
        return text
    return [each.strip() for each in text.strip("[]").split(",") if each.strip()]


def parse_component(text: str) -> tuple[str, dict[str, Any]]:
    """`NAME:window=4096,n_layers=2` as a name and options.

    Raises:
        ConfigError: not of that form, or an option given twice.
    """
    name, _, rest = text.partition(":")
    first, comma, _ = name.partition(",")
    if comma:
        raise ConfigError(
            f"component {text!r}: one --component names one; repeat it, as in --component "
            f"{first.strip()} --component ..."
        )
    if "=" in name:
        named, _, value = name.partition("=")
        raise ConfigError(
            f"component {text!r}: a name and its options have ':' between them; write "
            f"{_own_option(named.strip())}={value.strip()}"
        )
    options: dict[str, Any] = parse_options(f"component {text!r}", rest, "NAME:window=4096")
    if not name.strip():
        raise ConfigError(f"component {text!r} has no name; see `kvgraft components`")
    return name.strip(), options
