"""Where `kvgraft replay` writes: whole files or none, or standard output."""

from __future__ import annotations

import json
import os
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.commands import KVGRAFT, run, run_forked

SHORT = ("replay", "--synthetic", "chat", "--requests", "5", "--verify", "off")


def replay(*arguments: object) -> CompletedProcess[str]:
    return run_forked(KVGRAFT, *SHORT, *(str(each) for each in arguments))


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_json_on_standard_output_is_alone_there(name: str) -> None:
    done = replay("--json", name)
    assert done.returncode == 0
    assert json.loads(done.stdout)["requests"] == 5
    assert "token hit rate" in done.stderr
    assert (
        f", eviction policy {json.loads(done.stdout)['settings']['eviction_policy']}\n"
        in done.stderr
    )


def test_a_replaced_file_keeps_its_permissions_and_its_links(tmp_path: Path) -> None:
    file, link = tmp_path / "result.json", tmp_path / "latest.json"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to("result.json")
    assert replay("--json", link, "--html", tmp_path / "new.html").returncode == 0
    assert link.is_symlink()
    assert json.loads(file.read_text())["requests"] == 5
    assert file.stat().st_mode & 0o777 == 0o640
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "new.html").stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.long
def test_a_result_that_does_not_fit_on_the_disk_leaves_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text("old")
    limited = f'ulimit -f 2; exec "$@" --json {file}'
    done = run("bash", "-c", limited, "bash", KVGRAFT, *SHORT, PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 2
    assert done.stderr == f"kvgraft: {file}: File too large; choose another path\n"
    assert "token hit rate" in done.stdout, "the tables are there all the same"
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


KILLED = """
import os, sys
from kvgraft_replay.report.output import write_whole
os.fsync = lambda descriptor: os._exit(9)
write_whole(sys.argv[1], "half")
"""


def test_leftovers_of_a_killed_writer_go_with_the_next_result(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    assert run_forked("-c", KILLED, str(file)).returncode == 9
    assert not file.exists()
    assert list(tmp_path.iterdir()), "killed before it could clean up"
    assert replay("--json", file).returncode == 0
    assert list(tmp_path.iterdir()) == [file]


def test_a_refused_replay_leaves_old_files_alone(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.html"
    old.write_text("old")
    done = replay("--json", old, "--html", new, "--component", "sinks")
    assert done.returncode == 2
    assert old.read_text() == "old"
    assert not new.exists()


def test_a_full_device_is_one_line(tmp_path: Path) -> None:
    done = replay("--json", "/dev/full")
    assert done.returncode == 2
    assert done.stderr == "kvgraft: /dev/full: No space left on device; choose another path\n"


def test_a_reader_that_stops_reading_the_tables_loses_no_file(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    done = run("bash", "-c", '"$@" | head -c 1', "bash", KVGRAFT, *SHORT, "--json", str(file))
    assert done.stdout == "R"
    assert json.loads(file.read_text())["requests"] == 5


@pytest.mark.parametrize("name", ["", "new/", "missing/."])
def test_a_name_that_is_no_files_is_refused_before_the_replay(name: str, tmp_path: Path) -> None:
    done = replay("--json", f"{tmp_path}/{name}" if name else "")
    assert done.returncode == 2
    assert not done.stdout
    assert done.stderr.endswith(": Is a directory; choose another path\n")
    assert not list(tmp_path.iterdir())


def test_standard_output_that_is_closed_is_refused_in_a_line() -> None:
    done = run("bash", "-c", 'exec "$@" --json - >&-', "bash", KVGRAFT, *SHORT)
    assert done.returncode == 2
    assert done.stderr.endswith("kvgraft: standard output: it is closed; choose another path\n")
