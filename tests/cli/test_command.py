"""The command's top level and `kvgraft components`."""

from __future__ import annotations

import json
import re
import subprocess

import kvgraft

from ..commands import KVGRAFT, run


def test_help_names_the_subcommands() -> None:
    done = run(KVGRAFT, "--help")
    assert done.returncode == 0
    assert "components" in done.stdout
    assert "replay" in done.stdout
    assert done.stdout == run(KVGRAFT, "-h").stdout


def test_every_option_of_a_subcommand_is_explained() -> None:
    text = run(KVGRAFT, "replay", "--help", COLUMNS="200").stdout
    entries = re.split(r"\n\s+(?=-)", text.partition("Options:")[2])[1:]
    assert len(entries) >= 18
    for entry in entries:
        assert re.search(r"\s{2,}[A-Z].*\.|\[", entry), f"no explanation: {entry}"


def test_version_is_that_of_the_package() -> None:
    assert run(KVGRAFT, "--version").stdout == f"kvgraft, version {kvgraft.__version__}\n"


def test_no_subcommand_and_a_wrong_one_exit_with_2() -> None:
    wrong = run(KVGRAFT, "graft")
    assert wrong.returncode == 2
    assert "no such command 'graft'" in wrong.stderr
    assert run(KVGRAFT).returncode == 2


def test_components_are_listed_with_what_they_declare() -> None:
    rows = {row["name"]: row for row in json.loads(run(KVGRAFT, "components", "--json").stdout)}
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


def test_the_table_shows_the_same_components() -> None:
    table = run(KVGRAFT, "components", COLUMNS="160").stdout
    for row in json.loads(run(KVGRAFT, "components", "--json").stdout):
        assert row["distribution"] in table
        assert str(row["reach"]) in table


def test_a_reader_that_goes_away_is_no_error() -> None:
    done = subprocess.run(
        f"{KVGRAFT} components --json | head -c 1", shell=True, capture_output=True, check=False
    )
    assert b"Traceback" not in done.stderr
    assert done.stdout == b"["
