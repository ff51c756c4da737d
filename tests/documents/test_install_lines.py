"""Whatever a document says to install is whole: pip finds none of our packages by itself."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import pytest

from ..commands import ROOT
from .test_links_and_blocks import DOCUMENTS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COMMAND = re.compile(r"`(pip install [^`]+)`|^ *(?:\S*/)?(pip install [^`\n]+)$", re.MULTILINE)
FOLDER = re.compile(r"\./?(core|plugins/[\w-]+)(?:\[([\w,-]+)\])?")
OURS = re.compile(r"(kvgraft[\w-]*)(?:\[([\w,-]+)\])?")

Package = tuple[str, str]
"""A folder, and extras with commas between them."""


def commands() -> list[tuple[str, str]]:
    """Documents and the commands in them that install from a clone's folders."""
    found = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        for match in COMMAND.finditer(text):
            command = " ".join((match[1] or match[2]).split())
            if "./core" in command:  # else it adds to what is installed
                found.append((document, command))
    return found


@cache
def folders() -> dict[str, str]:
    """The folder of each distribution."""
    return {
        tomllib.loads(each.read_text(encoding="utf-8"))["project"]["name"]: (
            each.parent.relative_to(ROOT).as_posix()
        )
        for each in (ROOT / "core/pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml"))
    }


def needs(package: Package) -> set[Package]:
    """Packages of ours that pip asks for, to install one."""
    folder, extras = package
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))
    project = project["project"]
    asked = list(project["dependencies"])
    for each in filter(None, extras.split(",")):
        asked += project["optional-dependencies"][each]
    matches = [match for each in asked if (match := OURS.match(each)) is not None]
    return {(folders()[match[1]], match[2] or "") for match in matches}


def test_commands_are_found_in_several_documents() -> None:
    assert len({document for document, _ in commands()}) >= 6
    assert any("[serve" in command for _, command in commands())


@pytest.mark.parametrize(("document", "command"), commands())
def test_a_command_names_all_packages_that_it_needs(document: str, command: str) -> None:
    named = {(match[1], match[2] or "") for match in FOLDER.finditer(command)}
    todo, seen = list(named), set(named)
    while todo:
        more = needs(todo.pop()) - seen
        todo += more
        seen |= more
    missing = {folder for folder, _ in seen} - {folder for folder, _ in named}
    assert missing == set(), f"{Path(document)}: {command}"
