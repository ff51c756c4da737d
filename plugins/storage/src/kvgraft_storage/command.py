"""`kvgraft storage`: list the backends; count, verify or clear a store."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from kvgraft.errors import ConfigError
from kvgraft_cli.console import OutputConsole
from kvgraft_storage import StorageBackend, discover_storage, open_existing_storage
from kvgraft_storage.driver import STORAGE_API, FoundDriver

__all__ = ["storage"]

SHOWN = 20
"""Damages listed; `--json` has all."""

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


@click.group()
def storage() -> None:
    """Inspect, verify and clear stores.

    A store is named by a URL: file:PATH, or that of another backend.
    """


@contextmanager
def _opened(url: str) -> Iterator[StorageBackend]:
    """A store that exists, closed afterwards; an error it raises becomes one line.

    Raises:
        ConfigError: it cannot be opened, or failed.
    """
    store = open_existing_storage(url)
    try:
        yield store
    except OSError as error:
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(f"storage {url.partition(':')[0]!r} failed: {said}") from error
    finally:
        store.close()


@storage.command()
@AS_JSON
def drivers(*, as_json: bool) -> None:
    """List the installed backends.

    With the options of their URLs and the defaults. A URL is
    NAME:LOCATION?OPTION=VALUE&OPTION=VALUE.
    """
    rows = [_described(each) for each in discover_storage()]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    console = OutputConsole()
    table = Table(title=f"storage backends (API {STORAGE_API})", title_justify="left")
    for column in ("name", "distribution", "keeps prefixes", "options", "status"):
        table.add_column(column, no_wrap=column in ("name", "status"), overflow="fold")
    for row in rows:
        distribution = f"{row['distribution'] or '-'} {row['version'] or ''}".strip()
        options = "\n".join(
            f"{name}={value}" if value else name for name, value in row["options"].items()
        )
        status = "ok" if row["status"] == "ok" else "broken"
        cells = (row["name"], distribution, row["summary"] or "-", options or "-", status)
        table.add_row(*map(Text, cells), end_section=True)
    console.widen(table)
    console.print(table)
    for row in rows:
        if row["status"] != "ok":
            console.print(f"{row['name']}: {row['status']}", style="red", soft_wrap=True)


def _described(found: FoundDriver) -> dict[str, Any]:
    """One backend; options with their defaults as they are written in a URL, "" for none."""
    driver = found.driver
    return {
        "name": found.name,
        "distribution": found.distribution,
        "version": found.version,
        "api": None if driver is None else driver.api,
        "summary": None if driver is None else driver.summary,
        "options": {} if driver is None else driver.defaults(),
        "status": found.problem or "ok",
    }


@storage.command()
@click.argument("url")
@AS_JSON
def stats(url: str, *, as_json: bool) -> None:
    """Count the content of the store at URL."""
    with _opened(url) as store:
        found = store.stats()
    rows = {
        "records": found.n_records,
        "bytes": found.nbytes,
        "capacity": found.capacity_nbytes,
        **found.details,
    }
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    for name, value in rows.items():
        table.add_row(name.replace("_", " "), "no limit known" if value is None else f"{value:,}")
    console = OutputConsole()
    console.print(Text(f"storage {url}"), soft_wrap=True)
    console.widen(table)
    console.print(table)


@storage.command()
@click.argument("url")
@AS_JSON
def verify(url: str, *, as_json: bool) -> None:
    """List the damaged payloads in the store at URL.

    Reads all of it; exits with 1 if anything is damaged.
    """
    with _opened(url) as store:
        report = store.verify()
    if as_json:
        found = {
            "records": report.n_records,
            "bytes": report.nbytes,
            "damaged": [each._asdict() for each in report.damaged],
        }
        click.echo(json.dumps(found, indent=2))
    else:
        _print_report(url, report.n_records, report.nbytes, [*report.damaged])
    if report.damaged:
        sys.exit(1)


def _print_report(
    url: str, n_records: int, nbytes: int, damaged: list[tuple[str, str, str]]
) -> None:
    console = OutputConsole()
    if damaged:
        table = Table(title=f"damaged in {url}", title_justify="left")
        for column in ("where", "key", "why"):
            table.add_column(column, overflow="fold")
        for where, key, reason in damaged[:SHOWN]:
            table.add_row(Text(where), f"{key[:16]}…" if key else "-", Text(reason))
        console.widen(table)
        console.print(table)
        if len(damaged) > SHOWN:
            console.print(f"and {len(damaged) - SHOWN} more; see --json")
    told = f"{len(damaged)} damaged" if damaged else "nothing damaged"
    console.print(f"{n_records:,} records, {nbytes:,} bytes read: {told}", highlight=False)


def _ask(question: str) -> None:
    """Go on only if somebody says yes.

    Raises:
        ConfigError: nobody is there to ask, or says no.
        Abort: somebody stops it.
    """
    try:
        if click.confirm(question, err=True):
            return
    except click.Abort:
        if not sys.stdin.isatty():
            raise ConfigError("nothing removed: no answer; add --yes") from None
        raise
    raise ConfigError("nothing removed")


@storage.command()
@click.argument("url")
@click.option("--yes", is_flag=True, help="Do not ask.")
@AS_JSON
def clear(url: str, *, yes: bool, as_json: bool) -> None:
    """Remove everything from the store at URL.

    Running processes go on with an empty store.
    """
    with _opened(url) as store:
        found = store.stats()
        if not yes:
            told = f"remove {found.n_records:,} records, {found.nbytes:,} bytes, from {url}?"
            _ask(told)
        store.clear()
    if as_json:
        click.echo(json.dumps({"records": found.n_records, "bytes": found.nbytes}, indent=2))
    else:
        click.echo(f"removed {found.n_records:,} records, {found.nbytes:,} bytes")
