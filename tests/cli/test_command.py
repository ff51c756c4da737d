"""The command's top level and `kvgraft components`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

import kvgraft
from kvgraft_cli import app

from ..commands import KVGRAFT, run, run_forked
from ..packages.distributions import Shelf
from .refusals import refused


def test_help_names_the_subcommands() -> None:
    done = run_forked(KVGRAFT, "--help")
    assert done.returncode == 0
    assert "components" in done.stdout
    assert "replay" in done.stdout
    assert done.stdout == run_forked(KVGRAFT, "-h").stdout


def test_every_option_of_a_subcommand_is_explained() -> None:
    text = run_forked(KVGRAFT, "replay", "--help", COLUMNS="200").stdout
    entries = re.split(r"\n\s+(?=-)", text.partition("Options:")[2])[1:]
    assert len(entries) >= 18
    for entry in entries:
        assert re.search(r"\s{2,}[A-Z].*\.|\[", entry), f"no explanation: {entry}"


WITHOUT_TORCH = """
import sys
from kvgraft_cli.app import cli

for arguments in [[each, "--help"] for each in cli.list_commands(None)] + [
    ["--version"], ["--help"], ["components"], ["components", "--json"]
]:
    try:
        cli(arguments)
    except SystemExit as ended:
        assert ended.code == 0
    print(arguments, "imported torch:", "torch" in sys.modules, file=sys.stderr)
"""


def test_help_and_lists_import_no_torch() -> None:
    """Contract: P2. Seconds are waited for, otherwise."""
    lines = run(sys.executable, "-c", WITHOUT_TORCH).stderr.splitlines()
    assert len(lines) >= 10
    assert [line for line in lines if not line.endswith("imported torch: False")] == []


REPLAY_OF_NOTHING = """
import sys
from kvgraft_cli import main

sys.argv = ["kvgraft", "replay", "nosuch"]
try:
    main()
finally:
    print("torch" in sys.modules)
"""


def test_a_trace_that_is_not_there_is_named_before_torch_is_imported() -> None:
    done = run(sys.executable, "-c", REPLAY_OF_NOTHING)
    assert done.stderr == "kvgraft: nosuch: no such file; check the path\n"
    assert done.stdout == "False\n"


def test_version_is_that_of_the_package() -> None:
    assert run_forked(KVGRAFT, "--version").stdout == f"kvgraft, version {kvgraft.__version__}\n"


def test_no_subcommand_and_a_wrong_one_exit_with_2() -> None:
    wrong = run(KVGRAFT, "graft")
    assert wrong.returncode == 2
    assert "no such command 'graft'; it has check, " in wrong.stderr
    assert "did you mean 'components'?" in run(KVGRAFT, "component").stderr
    assert run_forked(KVGRAFT).returncode == 2


def test_components_are_listed_with_their_declarations() -> None:
    rows = listed(run_forked(KVGRAFT, "components", "--build", "--json"))
    assert rows.keys() >= {"full", "swa", "mamba", "hisparse"}
    assert {
        name: (row["distribution"], row["kind"], row["home"], row["reach"])
        for name, row in rows.items()
        if name in ("full", "swa", "mamba", "hisparse")
    } == {
        "full": ("kvgraft-full", "paged", "device", "[0, b)"),
        "swa": ("kvgraft-swa", "paged", "device", "[b-4096, b)"),
        "mamba": ("kvgraft-mamba", "state", "device", "state at b"),
        "hisparse": ("kvgraft-hisparse", "paged", "host", "[0, b)"),
    }
    assert all(row["status"] == "ok" for row in rows.values())
    assert all(row["api"] == "1.0" for row in rows.values())


@pytest.mark.parametrize(("options", "shown"), [([], "summary"), (["--build"], "reach")])
def test_the_table_shows_the_same_components(options: list[str], shown: str) -> None:
    table = run_forked(KVGRAFT, "components", *options, COLUMNS="160").stdout
    for row in listed(run_forked(KVGRAFT, "components", *options, "--json")).values():
        assert row["distribution"] in table
        assert str(row[shown]) in table


def listed(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(done.stdout)}


def test_a_reader_that_goes_away_is_no_error() -> None:
    done = subprocess.run(
        f"{KVGRAFT} components --json | head -c 1", shell=True, capture_output=True, check=False
    )
    assert b"Traceback" not in done.stderr
    assert done.stdout == b"["


def test_wrong_use_is_refused_in_one_line() -> None:
    outcomes = refused(
        {
            "argument missing": ["check"],
            "option of no kind": ["new-component", "ring", "--kind", "round"],
            "unknown option": ["components", "--jsn"],
            "number out of range": ["replay", "--users", "0"],
            "an option of a command's command twice": ["storage", "drivers", "--json", "--json"],
        }
    )
    for case, outcome in outcomes.items():
        assert (outcome.status, outcome.output) == (2, ""), case
        assert re.fullmatch(r"kvgraft: (--)?[a-z].*\n", outcome.errors), outcome.errors


def test_a_message_of_several_lines_is_said_in_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = click.Option(["--kind"], type=click.Choice(["a", "b"]), required=True)
    monkeypatch.setattr(app, "cli", click.Command("kvgraft", params=[kind]))
    monkeypatch.setattr("sys.argv", ["kvgraft"])
    with pytest.raises(SystemExit, match="2"):
        app.main()
    said = capsys.readouterr().err
    assert said == "kvgraft: missing option '--kind'. Choose from: a, b\n"


REACHES = """
from kvgraft import ComponentDeclaration, ComponentOptions, Chunk, Kind, Leading, Reach, hookimpl

@hookimpl
def declare_component():
    return ComponentDeclaration(
        name="thrown", api_version="1.0", kind=Kind.PAGED, summary="", options=ComponentOptions
    )

@hookimpl
def create_component(options, context):
    import torch
    from kvgraft.pools import Component, PlaneSpec, paged_pools

    planes = [PlaneSpec(0, "kv", (context.page_size,), torch.uint8)]
    device, host = paged_pools(options, context, planes)
    return Component(Reach(REACH), device, host if MIRRORED else None)
"""


def shelved(directory: Path, *, reach: str, mirrored: bool = False) -> Shelf:
    shelf = Shelf(directory)
    source = REACHES.replace("REACH)", f"{reach})").replace("MIRRORED", str(mirrored))
    shelf.put("kvgraft-thrown", source)
    return shelf


LONG = "Leading(16), Chunk(8192)"
SHOWN = "[0, 16) + [floor((b-1)/8192)*8192, b)"


def test_a_table_in_a_pipe_is_as_wide_as_its_content(tmp_path: Path) -> None:
    table = shelved(tmp_path, reach=LONG).run(KVGRAFT, "components", "--build", COLUMNS=None).stdout
    (row,) = (line for line in table.splitlines() if "thrown" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        *("thrown", "kvgraft-thrown 2.1", "1.0", SHOWN, "-", "ok")
    ]


@pytest.mark.parametrize("columns", [30, 40, 80])
def test_a_narrow_table_keeps_name_reach_and_status_whole(tmp_path: Path, columns: int) -> None:
    table = (
        shelved(tmp_path, reach=LONG)
        .run(KVGRAFT, "components", "--build", COLUMNS=str(columns))
        .stdout
    )
    assert "…" not in table
    lines = table.splitlines()
    assert max(map(len, lines)) <= columns
    heads = next(line for line in lines if "reach" in line).strip("┃").split("┃")
    reach = [head.strip() for head in heads].index("reach")
    start = next(at for at, line in enumerate(lines) if "thrown" in line)
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines[start:-1]]
    assert (cells[0][0], cells[0][-1]) == ("thrown", "ok")
    assert "".join(row[reach] for row in cells).replace(" ", "") == SHOWN.replace(" ", "")


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"reach": "Chunk(0)"}, "reach: Chunk(0) needs at least 1 token"),
        ({"reach": "Chunk(3)", "mirrored": True}, "has a host mirror without the capability "),
    ],
)
def test_a_component_that_cannot_be_built_is_listed_with_the_reason(
    tmp_path: Path, case: dict[str, Any], reason: str
) -> None:
    shelf = shelved(tmp_path, **case)
    rows = listed(shelf.run(KVGRAFT, "components", "--build", "--json"))
    assert rows["thrown"]["status"].startswith(
        f"cannot be built with its default options: {reason}"
    )
    assert rows["thrown"]["reach"] is None
    assert rows["full"]["status"] == "ok"
    printed = shelf.run(KVGRAFT, "components", "--build").stdout
    assert f"thrown: {rows['thrown']['status']}" in printed
    assert re.search("thrown .* broken", printed)


def test_the_first_word_of_a_command_names_those_that_begin_with_it() -> None:
    with pytest.raises(click.UsageError, match="did you mean 'new-component' or 'new-policy'"):
        app.cli.main(["new"], standalone_mode=False)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--block-size", "16"], "no such option --block-size; did you mean --page-size?"),
        (
            ["--num-gpu-blocks", "9"],
            "did you mean --device-tokens (= number of blocks * block_size)?",
        ),
        (["--devce-tokens=9"], "no such option --devce-tokens; did you mean --device-tokens?"),
        (["--max-num-seqs=9"], "no such option --max-num-seqs; did you mean --max-running?"),
    ],
)
def test_an_option_of_another_engine_is_answered_with_ours(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    names = ("--page-size", "--decode-tokens", "--device-tokens", "--max-running")
    options: list[click.Parameter] = [click.Option([name]) for name in names]
    monkeypatch.setattr(app, "cli", click.Command("kvgraft", params=options))
    monkeypatch.setattr("sys.argv", ["kvgraft", *arguments])
    with pytest.raises(SystemExit, match="2"):
        app.main()
    assert told in capsys.readouterr().err
