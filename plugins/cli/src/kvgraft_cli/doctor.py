"""`kvgraft doctor`: the installation in one page, and its unusable parts."""

from __future__ import annotations

import json
import platform
import resource
import sys
from typing import Any

import click
import importlib_metadata
from rich.table import Table
from rich.text import Text

import kvgraft
from kvgraft.compiled import is_compiled
from kvgraft.contract import API_VERSION
from kvgraft.errors import ConfigError
from kvgraft.optional import PARTS, PARTS_GROUP, how_to_install, published
from kvgraft.packages.registry import discover, policy_names
from kvgraft.sizes import format_nbytes
from kvgraft_cli.console import OutputConsole

__all__ = ["doctor"]

COMMANDS = "kvgraft.commands"
"""Entry points of this group are subcommands of other distributions."""

CHECKUPS = "kvgraft.doctor"
"""Entry points of this group add sections: functions of the URLs that return sections."""

VALUE_COLUMNS = 80
"""Most columns of a value; a longer one is wrapped."""

Rows = dict[str, Any]


@click.command()
@click.argument("stores", metavar="[URL]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def doctor(stores: tuple[str, ...], *, as_json: bool) -> None:
    """Say what is installed here, and whether it can be used.

    Versions, the build that is loaded, devices, packages, limits of this process, and whether the
    stores at each URL can be reached. Exits with 1 if a package cannot be used, or a store cannot
    be reached.
    """
    report: dict[str, Rows] = {
        "versions": _versions(),
        "devices": _devices(),
        "components": {each.name: each.status for each in discover()},
        "parts": _parts(),
        "policies": dict.fromkeys(policy_names(), "ok"),
        "storage backends": {},
        "commands": _commands(),
        "stores": {},
        "limits": _limits(),
    }
    for each in published(CHECKUPS):
        checkup: Any = each.load()
        report.update(checkup(stores))
    if len(report["stores"]) < len(stores):
        raise ConfigError(
            f"doctor {stores[0]}: stores are checked by a package that is not installed; "
            f"{how_to_install(*PARTS['storage'])}"
        )
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _print(report)
    for url, status in report["stores"].items():
        if status != "ok":
            click.echo(f"kvgraft: {url}: {' '.join(status.split())}", err=True)
    checked = ("components", "storage backends", "stores")
    if any(status != "ok" for part in checked for status in report[part].values()):
        sys.exit(1)


def _versions() -> Rows:
    return {
        "kvgraft": kvgraft.__version__,
        "build": "compiled" if is_compiled() else "plain",
        "component API": API_VERSION,
        "Python": f"{platform.python_version()}, {platform.platform()}",
        "torch": importlib_metadata.version("torch"),
    }


def _devices() -> Rows:
    """Name and memory of every device that torch can use."""
    import torch

    found: Rows = {"cpu": f"{torch.get_num_threads()} threads"}
    for index in range(torch.cuda.device_count()):
        its = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = f"{its.name}, {format_nbytes(its.total_memory)}"
    if torch.version.cuda is not None and len(found) == 1:
        found["cuda"] = f"none found by a torch built for CUDA {torch.version.cuda}"
    return found


def _parts() -> Rows:
    """The distribution of each part of a cache, or how to install it."""
    found = {each.name: each for each in published(PARTS_GROUP)}
    return {
        name: f"not installed; {how_to_install(*paths)}"
        if name not in found
        else found[name].contested or f"{found[name].distribution} {found[name].version}"
        for name, paths in PARTS.items()
    }


def _commands() -> Rows:
    points = importlib_metadata.entry_points(group=COMMANDS)
    return {each.name: each.dist.name for each in points if each.dist is not None}


def _limits() -> Rows:
    """Limits of this process that matter to caches; None for no limit."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    none = resource.RLIM_INFINITY
    return {
        "open files and sockets": None if descriptors == none else descriptors,
        "locked memory in bytes": None if locked == none else locked,
    }


def _print(report: dict[str, Rows]) -> None:
    console = OutputConsole()
    table = Table(show_header=False)
    for most in (None, None, VALUE_COLUMNS):
        table.add_column(overflow="fold", max_width=most)
    for part, rows in report.items():
        for position, (name, value) in enumerate(rows.items()):
            last = position == len(rows) - 1
            shown = "no limit" if value is None else f"{value:,}" if type(value) is int else value
            table.add_row("" if position else part, name, Text(shown), end_section=last)
    console.widen(table)
    console.print(table)
