"""`kvgraft new-component`: a component package to start from, complete and within the contract."""

from __future__ import annotations

import errno
import re
import shlex
import shutil
from pathlib import Path

import click

import kvgraft
from kvgraft.contract import API_VERSION
from kvgraft.errors import ConfigError
from kvgraft.packages.registry import discover
from kvgraft.types import Kind

__all__ = ["new_component", "write_package"]

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
"""Names that serve as component, distribution and, with underscores, module."""

PREFIX = "kvgraft-"


@click.command("new-component")
@click.argument("name")
@click.option(
    "--kind",
    type=click.Choice([kind.value for kind in Kind]),
    default=Kind.PAGED.value,
    show_default=True,
    help="Slots for every page of tokens, or one state at a boundary.",
)
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    default=Path(),
    show_default="the current directory",
    help="Directory in which the package's own directory is made.",
)
def new_component(name: str, kind: str, into: Path) -> None:
    """Write a component package to start from.

    It is called kvgraft-NAME and holds pyproject.toml, a README, options, pools, hooks and a
    contract test that passes; comments mark the places to change. Nothing is overwritten.
    """
    package = write_package(name, Kind(kind), into)
    click.echo(f"{package}: component {name!r}, {kind}; wrote")
    for path in sorted(each for each in package.rglob("*") if each.is_file()):
        click.echo(f"  {path.relative_to(package)}")
    click.echo(
        "kvgraft is on no package index yet; in another environment than this one, first\n"
        "  pip install '/path/to/kvgraft/core[testing]' /path/to/kvgraft/plugins/replay\n"
        "next, then search for 'Change:'\n"
        f"  cd {shlex.quote(str(package))}\n"
        "  pip install -e '.[test]'\n"
        "  kvgraft components\n"
        "  pytest\n"
        f"  kvgraft replay --synthetic chat --requests 100 --component {name}"
    )


def write_package(name: str, kind: Kind, into: Path) -> Path:
    """Write the package of a new component.

    Args:
        name: the component's name.
        kind: which scaffold to use.
        into: where to make its directory, `kvgraft-NAME`; made as well if need be.

    Returns:
        The package's directory.

    Raises:
        ConfigError: a name that does not serve or is taken, a directory that exists or cannot be
            written; nothing is left behind.
    """
    _check_name(name)
    package = into / f"{PREFIX}{name}"
    contents = _render(name, kind)
    try:
        into.mkdir(parents=True, exist_ok=True)
        package.mkdir()
    except FileExistsError as error:
        raise ConfigError(
            f"{error.filename}: is there already and stays as it is; choose another name or --into"
        ) from error
    except OSError as error:
        advice = "another directory with --into"
        if error.errno == errno.ENAMETOOLONG:
            advice = "a shorter name"
        raise ConfigError(f"{error.filename}: {error.strerror}; choose {advice}") from error
    try:
        for path, text in contents.items():
            target = package / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        shutil.rmtree(package, ignore_errors=True)
        raise ConfigError(
            f"{error.filename}: {error.strerror}; choose another directory with --into"
        ) from error
    return package


def _check_name(name: str) -> None:
    if name.startswith(PREFIX):
        raise ConfigError(
            f"component name {name!r}: the package is named {PREFIX}NAME by itself; "
            f"give {name.removeprefix(PREFIX)!r}"
        )
    if not NAME.fullmatch(name):
        usable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789") or "my-component"
        raise ConfigError(
            f"component name {name!r}: give lower-case letters and digits, parts joined by '-', "
            f"a letter first; for example {usable!r}"
        )
    for found in discover():
        if found.name == name:
            raise ConfigError(
                f"component name {name!r}: {found.distribution} publishes it here; "
                "choose another, or uninstall that first"
            )


def _render(name: str, kind: Kind) -> dict[str, str]:
    """The package's files by relative path."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    module = f"{PREFIX}{name}".replace("-", "_")
    scaffold = Environment(
        loader=PackageLoader("kvgraft", "scaffold"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    words = {
        "name": name,
        "kind": kind.value,
        "distribution": f"{PREFIX}{name}",
        "module": module,
        "title": "".join(part.capitalize() for part in name.split("-")),
        "api_version": API_VERSION,
        "release": ".".join(kvgraft.__version__.split(".")[:2]),
    }
    templates = {
        "pyproject.toml": "pyproject.toml.j2",
        "README.md": "README.md.j2",
        f"src/{module}/__init__.py": "init.py.j2",
        f"src/{module}/options.py": f"{kind.value}/options.py.j2",
        f"src/{module}/plugin.py": f"{kind.value}/plugin.py.j2",
        f"src/{module}/pools.py": f"{kind.value}/pools.py.j2",
        "tests/test_contract.py": "contract.py.j2",
    }
    contents = {
        path: scaffold.get_template(template).render(words) for path, template in templates.items()
    }
    return {**contents, f"src/{module}/py.typed": ""}
