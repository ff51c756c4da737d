"""Python blocks run, and print the block after them; commands run and exit with 0."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ..commands import KVGRAFT, ROOT, run, run_forked

DOCUMENTS = [
    *("README.md", "docs/start.md", "docs/embedding.md", "docs/components.md", "docs/replay.md"),
    *("docs/operating.md", "docs/plan.md", "docs/guard.md", "docs/storage-library.md"),
    "docs/observing.md",
    *("plugins/observe/README.md", "plugins/transformers/README.md"),
]

FOR_EVER = ("kvgraft serve ",)
"""Commands that run until they are stopped; their own tests start and stop them."""

REPEATED = (
    "kvgraft check full",
    "kvgraft plan --synthetic chat --requests 300 ",
    "kvgraft plan --synthetic chat --requests 50 ",
    "kvgraft replay --synthetic agents ",
)
"""Commands that take long, and that tests of their own run in a smaller way."""

ALONE = {"plan": ("--processes", "1")}
"""Further options, by command: processes of their own start Python, and are tested elsewhere."""

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: str, kind: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return [body for language, body in FENCE.findall(text) if language == kind]


def shell_lines(document: str) -> list[tuple[str, list[str]]]:
    """Commands of a document, and the lines shown below each that begins with a prompt."""
    found: list[tuple[str, list[str]]] = []
    for block in [*blocks(document, "console"), *blocks(document, "bash")]:
        prompted = "$ " in block
        for line in block.splitlines():
            if line.startswith("$ ") or not prompted:
                found.append((line.removeprefix("$ "), []))
            elif found:
                found[-1][1].append(line)
    return found


def commands() -> list[tuple[str, str, list[str]]]:
    """Document, `kvgraft` command and the lines shown below it."""
    plugins = (str(path.relative_to(ROOT)) for path in ROOT.glob("plugins/*/README.md"))
    documents = dict.fromkeys([*DOCUMENTS, *plugins])
    return [
        (document, command, shown)
        for document in documents
        for command, shown in shell_lines(document)
        if command.startswith("kvgraft ") and not command.startswith(FOR_EVER)
    ]


def shape(line: str) -> str:
    """A line without its numbers, which change with the code and the machine."""
    return " ".join(re.sub(r"[\d.,]+", "N", line).split())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_documents_python_runs_in_order(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")  # it tells of kernels for GPUs
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    code = "\n".join(blocks(document, "python"))
    if "kvgraft_transformers" in code and find_spec("kvgraft_transformers") is None:
        pytest.skip("needs Python 3.11")
    done = run_forked("-c", code, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("document", "command", "shown"),
    [
        pytest.param(*each, marks=pytest.mark.long if each[1].startswith(REPEATED) else ())
        for each in commands()
    ],
    ids=[f"{document}: {command[:40]}" for document, command, _ in commands()],
)
def test_a_command_runs_and_shows_these_lines(
    document: str, command: str, shown: list[str], tmp_path: Path
) -> None:
    _, name, *arguments = shlex.split(command)
    done = run_forked(KVGRAFT, name, *arguments, *ALONE.get(name, ()), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    printed = {shape(line) for line in done.stdout.splitlines()}
    missing = [line for line in shown if line != "..." and shape(line) not in printed]
    assert not missing


def test_make_and_pip_commands_name_existing_targets_and_packages() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    others = [line for line, _ in shell_lines("README.md") if not line.startswith("kvgraft ")]
    assert others
    for line in others:
        tool, *arguments = shlex.split(line, comments=True)
        if tool == "make":
            assert all(re.search(rf"^{each}:", makefile, re.MULTILINE) for each in arguments)
        else:
            assert (tool, arguments[0]) == ("pip", "install")
            named = [each.partition("[")[0] for each in arguments[1:] if "==" not in each]
            assert all((ROOT / each / "pyproject.toml").exists() for each in named)


def test_make_help_lists_every_target() -> None:
    done = run("make", "help", cwd=ROOT)
    listed = re.findall(r"^make ([\w-]+) +\S", done.stdout, re.MULTILINE)
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(phony.split())


def test_make_nightly_runs_all_long_parts_and_names_the_failed_ones() -> None:
    # make may run these tests
    alone: dict[str, Any] = {"MAKEFLAGS": "", "MAKELEVEL": "", "MFLAGS": ""}
    done = run("make", "-n", "nightly", "STAMP=", cwd=ROOT, **alone)
    parts = ["== make long", "pytest -m long", "== make examples", "--hypothesis-profile=nightly"]
    parts += ["== make fuzz", "KVGRAFT_FUZZ_STEPS=1000000"]
    places = [done.stdout.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)
    failing = run("make", "nightly", "PY=false", "STAMP=", cwd=ROOT, **alone)
    assert failing.returncode != 0
    assert failing.stderr.count(" Error 1") == 4
    assert failing.stdout.endswith("failed: long examples fuzz\n")


def test_decisions_are_listed_numbered_and_dated() -> None:
    directory = ROOT / "docs" / "adr"
    index = (directory / "README.md").read_text(encoding="utf-8")
    for number, path in enumerate(sorted(directory.glob("0*.md")), start=1):
        text = path.read_text(encoding="utf-8")
        assert path.name.startswith(f"{number:04d}-")
        assert text.startswith(f"# {number:04d} ")
        assert re.search(r"^20\d\d-\d\d, (accepted|replaced by \d{4})$", text, re.MULTILINE)
        assert all(f"## {part}\n" in text for part in ("Context", "Decision", "Consequences"))
        assert f"[{number:04d}]({path.name})" in index
