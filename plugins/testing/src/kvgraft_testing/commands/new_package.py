"""A new package's name and files, for the commands that write one to start from."""

from __future__ import annotations

import errno
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

import click

import kvgraft
from kvgraft.errors import ConfigError

__all__ = ["expect_name", "into_option", "render", "show", "write"]

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
"""Names that work for a plugin, a distribution and, with underscores, a module."""

PREFIX = "kvgraft-"

into_option = click.option(
    "--into",
    type=click.Path(path_type=Path),
    default=Path(),
    show_default="the current directory",
    help="Directory in which the package's own directory is made.",
)


def expect_name(what: str, name: str, owners: Mapping[str, str]) -> None:
    """Refuse a name that is invalid or taken.

    Args:
        what: "component" or "policy".
        name: its name.
        owners: the distributions that have names already, by name.

    Raises:
        ConfigError: with a name that would work.
    """
    if name.startswith(PREFIX):
        raise ConfigError(
            f"{what} name {name!r}: the package is named {PREFIX}NAME by itself; "
            f"give {name.removeprefix(PREFIX)!r}"
        )
    if not NAME.fullmatch(name):
        usable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789") or f"my-{what}"
        raise ConfigError(
            f"{what} name {name!r}: give lower-case letters and digits, parts joined by '-', "
            f"a letter first; for example {usable!r}"
        )
    if name in owners:
        raise ConfigError(
            f"{what} name {name!r}: {owners[name]} publishes it here; "
            "choose another, or uninstall that first"
        )


def render(name: str, templates: Mapping[str, str], **words: str) -> dict[str, str]:
    """The package's files by relative path.

    Args:
        name: the plugin's name.
        templates: in the folder `scaffold`, by the path of the file, where MODULE is the module's
            name.
        words: more words that templates use.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    module = f"{PREFIX}{name}".replace("-", "_")
    scaffold = Environment(
        loader=PackageLoader("kvgraft_testing", "scaffold"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    words = {
        "name": name,
        "distribution": f"{PREFIX}{name}",
        "module": module,
        "title": "".join(part.capitalize() for part in name.split("-")),
        "release": ".".join(kvgraft.__version__.split(".")[:2]),
        **words,
    }
    contents = {
        path.replace("MODULE", module): scaffold.get_template(template).render(words)
        for path, template in templates.items()
    }
    return {**contents, f"src/{module}/py.typed": ""}


def write(name: str, contents: Mapping[str, str], into: Path) -> Path:
    """Write a package's files into a new directory, `kvgraft-NAME`; return that.

    Args:
        name: the plugin's name.
        contents: of the files, by relative path.
        into: where to make its directory; it is made if missing.

    Raises:
        ConfigError: a directory that exists or cannot be written; no file stays.
    """
    package = into / f"{PREFIX}{name}"
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


def show(package: Path, what: str, commands: list[str], needs: str = "plugins/replay") -> None:
    """Say which files were written, and which commands come next.

    Args:
        package: its directory.
        what: its plugin.
        commands: in that directory, once it is installed.
        needs: folders of this repository with packages that the commands use.
    """
    paths = " ".join(f"./{each}" for each in needs.split())
    click.echo(f"{package}: {what}; wrote")
    for path in sorted(each for each in package.rglob("*") if each.is_file()):
        click.echo(f"  {path.relative_to(package)}")
    click.echo(
        "kvgraft is on no package index yet; in another environment than this one, first\n"
        f"  (cd /path/to/kvgraft && pip install -r plugins/testing/requirements.txt {paths})\n"
        "next, then search for 'Change:'\n"
        f"  cd {shlex.quote(str(package))}\n"
        "  pip install -e '.[test]'"
    )
    for command in commands:
        click.echo(f"  {command}")
