"""What `make demo` runs, with one of its architectures."""

from __future__ import annotations

import sys
from pathlib import Path

from .commands import ROOT, run


def test_the_demo_compares_every_answer_and_writes_a_report(tmp_path: Path) -> None:
    done = run(sys.executable, ROOT / "examples/demo.py", "--html", tmp_path, "--model", "lfm3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "50 of 50 answers are, token by token, what the model says" in done.stdout
    assert "did not happen" not in done.stdout
    report = (tmp_path / "kvgraft-demo-lfm3.html").read_text(encoding="utf-8")
    assert "lfm3: full + window + conv" in report
