"""`kvgraft components`: what is installed, and whether it can be used."""

from __future__ import annotations

import json

import click
from rich.table import Table

from kvgraft.cli.console import OutputConsole
from kvgraft.contract import API_VERSION
from kvgraft.errors import KvgraftError
from kvgraft.registry import Found, discover
from kvgraft.tree.track import ComponentShape, ordered

__all__ = ["components", "describe", "widest"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of a table.")
def components(*, as_json: bool) -> None:
    """List the installed component packages."""
    found = discover()
    rows = [describe(each) for each in found]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo("no component is installed; install a component package beside kvgraft")
        return
    console = OutputConsole()
    table = Table(title=f"components (core API {API_VERSION})", title_justify="left")
    for column in ("name", "distribution", "API", "reach", "capabilities"):
        table.add_column(column)
    table.add_column("status", style="bold")
    for row in rows:
        table.add_row(
            str(row["name"]),
            f"{row['distribution'] or '-'} {row['version'] or ''}".strip(),
            str(row["api"] or "-"),
            str(row["reach"] or "-"),
            "\n".join(row["capabilities"]) or "-",  # type: ignore[arg-type]
            "ok" if row["status"] == "ok" else "broken",
        )
    console.print(table)
    for row in rows:
        if row["status"] != "ok":
            console.print(f"{row['name']}: {row['status']}", style="red", soft_wrap=True)


def describe(found: Found) -> dict[str, object]:
    """One row of the list; the reach is that of the default options."""
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
            reach=_reach(found),
        )
    return row


def _reach(found: Found) -> str | None:
    shape = _shape(found)
    return None if shape is None else str(shape.reach)


def _shape(found: Found) -> ComponentShape | None:
    """The component with default options, built over the smallest pools; None if it refuses."""
    from kvgraft.dispatch import mount
    from kvgraft.pools import BuildContext

    if found.plugin is None:
        return None
    context = BuildContext(
        page_size=1, device="cpu", device_tokens=1, host_tokens=1, pin_host=False
    )
    try:
        return mount(found.plugin, {}, context).shape
    except KvgraftError:
        return None


def widest() -> str:
    """The installed component that needs most before a boundary: the base of any set.

    Raises:
        ConfigError: no usable component is installed.
    """
    shapes = [shape for found in discover() if (shape := _shape(found)) is not None]
    return ordered(shapes)[0].name
