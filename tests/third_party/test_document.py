"""`docs/write-a-component.md`, executed from top to bottom."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ..commands import ROOT
from ..documents.test_examples import shape
from .asking import expect_kept
from .workshop import Workshop

DOCUMENT = (ROOT / "docs" / "write-a-component.md").read_text(encoding="utf-8")

BLOCK = re.compile(r"(?:^`(?P<path>\S+)`:\n\n)?^```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.M | re.S)
"""A fenced block, after the name of the file it is to be if a line names one."""


class Block(NamedTuple):
    """One fenced block; `path` is empty where it is no file."""

    path: str
    kind: str
    body: str


BLOCKS = [Block(*(part or "" for part in found)) for found in BLOCK.findall(DOCUMENT)]


def commands(body: str) -> list[tuple[str, list[str]]]:
    """Commands of a console block, each with the lines shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in body.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


@pytest.fixture
def cleared(workshop: Workshop) -> Iterator[Workshop]:
    """The shared environment, without the document's package, also after a failure."""
    yield workshop
    workshop.uninstall("kvgraft-chunked")


def write(block: Block, here: Path) -> None:
    path = here / block.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.body, encoding="utf-8")


def test_the_package_of_the_document_keeps_every_clause_that_is_asked_of_hooks_and_pools(
    tmp_path: Path,
) -> None:
    """Without the state machine, and without installing it."""
    for block in BLOCKS:
        if block.path:
            write(block, tmp_path)
    expect_kept(["chunked"], [tmp_path / "src"])


@pytest.mark.long
def test_the_document_runs_from_top_to_bottom(cleared: Workshop, tmp_path: Path) -> None:
    here = tmp_path
    for block in BLOCKS:
        if block.path:
            write(block, here)
            continue
        for command, shown in commands(block.body):
            if command.startswith("cd "):
                here = (here / command.removeprefix("cd ")).resolve(strict=True)
                continue
            output = cleared.succeeds(command, here)
            printed = {shape(line) for line in output.splitlines()}
            missing = [line for line in shown if shape(line) not in printed]
            assert not missing, f"$ {command} does not print {missing}; it prints {printed}"
    assert (tmp_path / "kvgraft-my-layers" / "pyproject.toml").is_file()
    assert cleared.listed() == {}


def test_every_block_is_a_file_or_commands() -> None:
    assert len(BLOCKS) == DOCUMENT.count("\n```") // 2 > 10
    for block in BLOCKS:
        assert bool(block.path) is (block.kind != "console"), block
