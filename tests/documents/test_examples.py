"""Blocks of Python run, and commands run, exit with 0 and print the lines shown below them.

All of README.md, docs/ and the packages' own pages; `LEFT_OUT` says what cannot run, and why.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ..commands import KVGRAFT, ROOT, run, run_forked
from .test_links_and_blocks import Block, blocks

RUN_ELSEWHERE = {
    "docs/write-a-component.md": "tests/third_party/test_document.py runs it from top to bottom",
    "examples/gallery/README.md": "tests/documents/test_gallery.py runs its programs",
    "examples/third_party/README.md": "plugins/sinks is installed by tests/third_party",
    "examples/draft_layer/README.md": "tests/third_party installs it",
}
"""Documents whose blocks are files of one package."""

LEFT_OUT = {
    # commands
    "make ": "the README's are run by `.ci/run`, and by tests/packaging on a minimal Debian",
    "pip install ": "takes packages from an index; tests/packaging installs ours",
    ".venv/bin/pip install ": "takes packages from an index",
    ".venv/bin/pre-commit install": "changes the clone that it is run in",
    "HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 pip wheel ": "takes packages from an index, minutes",
    "kvgraft check-tier ": "needs engines and packages of others; tests of both run the suite",
    "kvgraft plan trace.jsonl.gz --model config.json ": "files of the reader's",
    "kvgraft serve MODEL": "a checkpoint of the reader's",
    "kvgraft dynamo-worker MODEL": "NVIDIA Dynamo, with which plugins/dynamo/tests starts it",
    "python -m dynamo.frontend ": "NVIDIA Dynamo",
    "export DYN_FILE_KV=": "NVIDIA Dynamo",
    "curl ": "asks a server; its own tests ask it the same",
    # Python
    'components={"full": {"n_layers": 32,': "170 GB of pools",
    '"kind": "mla",': "100 GB of pools",
    '"checkpoint_interval_tokens": 4096,': "14 GB of pools",
    "sparse = SparseComponent.of(cache)": "goes on with those pools",
    '"window": 1024,\n            "n_layers": 10,': "56 GB of pools",
    'open_storage("mooncake:': "a server of the reader's",
    'open_storage("s3:': "a server of the reader's",
    'open_storage("valkey:': "a server of the reader's",
    'dist.init_process_group("gloo")': "several processes, which tests/ranks starts",
    "HandOver(cache, NixlTransport()": "two processes and NIXL, which plugins/nixl/tests start",
    "return MyStore(location,": "a store of the reader's",
    "def weigh_request(component,": "hooks that do not exist",
}
"""How a command begins, or text in a block of Python, and why it does not run here."""

REPEATED = (
    "kvgraft check full",
    "kvgraft plan --synthetic chat --requests 300 ",
    "kvgraft plan --synthetic chat --requests 50 ",
    "kvgraft replay --synthetic agents ",
)
"""Commands that take long, and that tests of their own run in a smaller way."""

ALONE = {"plan": ("--processes", "1")}
"""Further options, by command: processes of their own start Python, and are tested elsewhere."""


class Command(NamedTuple):
    """A command of a document, with the lines shown below it and the Python above it."""

    document: str
    text: str
    shown: list[str]
    above: str


def documents(*languages: str) -> dict[str, list[Block]]:
    """The blocks of each document, those of one language or several."""
    found: dict[str, list[Block]] = {}
    for block in blocks(*languages):
        if block.document not in RUN_ELSEWHERE and not block.document.startswith("changes/"):
            found.setdefault(block.document, []).append(block)
    return found


def is_left_out(text: str) -> bool:
    """Whether a command, or a block of Python, cannot run here."""
    return any(text.startswith(start) or (start in text and "\n" in text) for start in LEFT_OUT)


def commands() -> Iterator[Command]:
    """Every command of every document."""
    for document, found in documents("console", "python").items():
        above = ""
        for block in found:
            if block.language == "python":
                above = block.text
                continue
            prompted = "$ " in block.text
            command: Command | None = None
            for line in block.text.splitlines():
                if line.startswith("$ ") or not prompted:
                    if command is not None:
                        yield command
                    command = Command(document, line.removeprefix("$ "), [], above)
                elif command is not None:
                    command.shown.append(line)
            if command is not None:
                yield command


COMMANDS = list(commands())
PYTHON = {
    document: code
    for document, found in documents("python").items()
    if (code := [block.text for block in found if not is_left_out(block.text)])
}


def shape(line: str) -> str:
    """A line without its numbers, which change with the code and the machine."""
    return " ".join(re.sub(r"[\d.,]+", "N", line).split())


def is_exact(command: Command) -> bool:
    """Whether it prints the same every time; a store answers when it does, and keeps its data."""
    return bool(command.shown) and "--storage" not in command.text


def is_timed(line: str) -> bool:
    """Whether it tells how long something took here."""
    return re.search(r"\d (?:s|µs|ms)\b|CPU", line) is not None


def run_python(code: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run it without a word of complaint."""
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")  # it tells of kernels for GPUs
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "kvgraft_transformers" in code and find_spec("kvgraft_transformers") is None:
        pytest.skip("needs Python 3.11")
    done = run_forked("-c", code, cwd=directory)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("document", PYTHON)
def test_a_documents_python_runs_in_order(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_python("\n".join(PYTHON[document]), tmp_path, monkeypatch)


def once(found: list[Command]) -> list[Command]:
    """Those that run to their end, each a single time."""
    return list(
        {
            command.text: command
            for command in found
            if not is_left_out(command.text) and not command.text.startswith("kvgraft serve ")
        }.values()
    )


PROGRESS = re.compile(r"kvgraft: (?:[\d,]+ of [\d,]+ requests in \d+ s|.*, \d+ s so far)")
"""Progress of a replay or a check, on a machine so busy that it takes half a minute."""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(each, marks=pytest.mark.long if each.text.startswith(REPEATED) else ())
        for each in once(COMMANDS)
    ],
    ids=[f"{each.document}: {each.text[:40]}" for each in once(COMMANDS)],
)
def test_a_command_runs_and_shows_these_lines(command: Command, tmp_path: Path) -> None:
    tool, name, *arguments = shlex.split(command.text, comments=True)
    assert tool == "kvgraft", "run it here, or say in LEFT_OUT why it cannot run"
    done = run_forked(KVGRAFT, name, *arguments, *ALONE.get(name, ()), cwd=tmp_path)
    told = [line for line in done.stderr.splitlines() if not PROGRESS.fullmatch(line)]
    assert (done.returncode, told) == (0, [])
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    shapes = {shape(line) for line in printed}
    shown = [line for line in command.shown if line != "..."]
    assert not [line for line in shown if shape(line) not in shapes]
    if is_exact(command):
        stale = [line for line in shown if line.rstrip() not in printed and not is_timed(line)]
        assert not stale, "write what is printed now: python -m docs.refresh_examples"


SERVERS = [each for each in COMMANDS if each.text.startswith("kvgraft serve ")]


@pytest.mark.long
@pytest.mark.skipif(find_spec("kvgraft_transformers") is None, reason="needs Python 3.11")
@pytest.mark.parametrize(
    "command", [each for each in SERVERS if not is_left_out(each.text)], ids=lambda each: each[0]
)
def test_a_server_answers_where_the_python_above_it_ran(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from plugins.transformers.tests.serving_process import Server

    run_python(command.above, tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    _, _, *arguments = shlex.split(command.text)
    with Server(*arguments, log=tmp_path / "log") as server:
        answer = server.client().completions.create(model="tiny", prompt="Once", max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0


def test_examples_left_out_are_in_a_document_and_all_kinds_are_found() -> None:
    texts = [command.text for command in COMMANDS]
    texts += [block.text for found in documents("python").values() for block in found]
    assert not [start for start in LEFT_OUT if not any(start in text for text in texts)]
    assert {"README.md", "docs/eviction.md", "docs/storage.md", "plugins/observe/README.md"} <= {
        *PYTHON
    }
    assert len(once(COMMANDS)) > 10


def test_python_and_commands_are_in_blocks_that_say_so() -> None:
    for block in blocks("", "text", "sh", "bash", "shell"):
        place = f"{block.document}:{block.line}"
        assert block.language in ("", "text"), f"{place}: call a block of commands console"
        commands = re.findall(r"^(?:\$|kvgraft|make|pip) (?:(?!   ).)*$", block.text, re.MULTILINE)
        assert not commands, place  # with spaces between, what it answers stands beside it
        try:
            ast.parse(block.text)
        except SyntaxError:
            continue
        raise AssertionError(f"{place} is Python; call it so")


def test_make_and_pip_commands_name_existing_targets_and_packages() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in COMMANDS:
        tool, *arguments = shlex.split(command.text, comments=True)
        if tool == "make":
            targets = [each for each in arguments if re.fullmatch(r"[a-z-]+", each)]
            assert all(re.search(rf"^{each}:", makefile, re.MULTILINE) for each in targets)
        elif tool == "pip" and arguments[0] == "install":
            paths = [each.partition("[")[0] for each in arguments[1:] if each.startswith("./")]
            assert all((ROOT / each / "pyproject.toml").exists() for each in paths)
    start = "pip install ./core ./plugins/density ./plugins/full ./plugins/swa ./plugins/storage "
    start += "./plugins/observe"
    assert {"make test", start} <= {command.text.partition("  ")[0] for command in COMMANDS}


def test_make_help_lists_every_target() -> None:
    done = run("make", "help", cwd=ROOT)
    listed = re.findall(r"^make ([\w-]+) +\S", done.stdout, re.MULTILINE)
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(phony.split())


def test_make_nightly_runs_all_long_parts_and_names_the_failed_ones() -> None:
    # make may run these tests
    alone: dict[str, Any] = {"MAKEFLAGS": "", "MAKELEVEL": "", "MFLAGS": ""}
    done = run("make", "-n", "nightly", "STAMP=", cwd=ROOT, **alone)
    parts = ["== make long", "pytest -m long", "== make long-engine-files", "== make examples"]
    parts += ["--hypothesis-profile=nightly", "== make fuzz", "KVGRAFT_FUZZ_STEPS=1000000"]
    places = [done.stdout.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)
    no_files = "FILES_S=0.01"  # engines' files are not fetched here
    failing = run("make", "nightly", "PY=false", "STAMP=", no_files, cwd=ROOT, **alone)
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
