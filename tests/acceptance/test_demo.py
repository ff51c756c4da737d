"""The demo of `make demo`, with one of its architectures."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from ..commands import KVGRAFT, ROOT, run, run_forked

needs_models = pytest.mark.skipif(
    importlib.util.find_spec("kvgraft_transformers") is None, reason="needs Python 3.11"
)


@needs_models
@pytest.mark.long  # `.ci/run` runs all of it
def test_the_demo_compares_every_answer_and_a_second_process_hits_stored_data(
    tmp_path: Path,
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    storage = ("--storage", f"file:{store}?capacity=256MiB")
    demo = (ROOT / "examples/demo.py", "--html", tmp_path, "--model", "lfm3")
    done = run_forked(*demo, *storage)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "60 of 60 answers equal the model's answers without a cache, token by token" in done.stdout
    )
    assert "did not happen" not in done.stdout
    assert done.stdout.startswith("lfm3: "), "a log has a line as soon as a model is done"
    again = re.search(r"^lfm3 +10/10 +([\d,]+) +([\d,]+) ", done.stdout, re.MULTILINE)
    assert again is not None, done.stdout
    prompt_tokens, storage_tokens = (int(number.replace(",", "")) for number in again.groups())
    assert prompt_tokens > storage_tokens > prompt_tokens / 2
    assert any(store.iterdir())
    report = (tmp_path / "kvgraft-demo-lfm3.html").read_text(encoding="utf-8")
    assert "lfm3: full + window + conv" in report


@needs_models
@pytest.mark.long
def test_the_demo_refuses_a_store_it_cannot_open_in_one_line(tmp_path: Path) -> None:
    demo = (sys.executable, ROOT / "examples/demo.py", "--html", tmp_path, "--model", "lfm3")
    done = run(*demo, "--storage", f"file:{tmp_path / 'none'}")
    assert done.returncode == 2
    assert "none does not exist; create the directory first" in done.stderr
    assert "Traceback" not in done.stderr


def test_where_models_do_not_run_the_demo_replays_chats(tmp_path: Path) -> None:
    alone: dict[str, Any] = {"MAKEFLAGS": "", "MAKELEVEL": "", "MFLAGS": ""}
    made = run("make", "-n", "demo", "STAMP=", "DISTS=core", cwd=ROOT, **alone)
    *_, command = made.stdout.replace("\\\n", "").strip().splitlines()
    program, *arguments = shlex.split(command)
    assert program == ".venv/bin/kvgraft"
    done = run_forked(KVGRAFT, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"0 ok +0 ok +0 ok +[\d,]{5,}", done.stdout), "every byte is compared"
    assert (tmp_path / "kvgraft-demo-replay.html").stat().st_size > 10_000
