"""The gallery's programs are short, and print what its page says."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from ..commands import ROOT, run_forked
from .test_links_and_blocks import blocks

GALLERY = ROOT / "examples/gallery"
PROGRAMS = sorted(path.name for path in GALLERY.glob("*.py"))
NOTEBOOKS = sorted(path.name for path in GALLERY.glob("*.ipynb"))
MOST_LINES = 60


def shown() -> dict[str, str]:
    """The output of each program, as the page shows it."""
    outputs: dict[str, str] = {}
    for block in blocks("console"):
        if block.document == "examples/gallery/README.md":
            command, _, output = block.text.partition("\n")
            outputs[command.removeprefix("$ python ")] = output
    return outputs


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_prints_what_the_page_shows(program: str, tmp_path: Path) -> None:
    done = run_forked(GALLERY / program, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == shown()[program]


def test_every_program_is_short_and_the_page_shows_no_other() -> None:
    assert shown().keys() == set(PROGRAMS)
    too_long = {
        program: n_lines
        for program in PROGRAMS
        if (n_lines := len((GALLERY / program).read_text().splitlines())) > MOST_LINES
    }
    assert not too_long


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_notebook_runs_from_top_to_bottom(
    notebook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("matplotlib") is None:
        pytest.skip("the notebooks need matplotlib")
    cells = json.loads((GALLERY / notebook).read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    pictures = [
        output
        for cell in cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", ())
    ]
    assert code
    assert pictures, "run it and save it, so that readers see its plots"
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    done = run_forked("-c", "\n".join(code), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
