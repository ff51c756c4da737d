"""Costs of the core, plain and compiled, side by side.

Runs the benchmarks of the core with each build, in turns, each in its own process, and prints what
they measured in one table. The compiled build is taken from build/compiled (`make compiled`);
without it only the plain one runs. `--save FILE` writes the numbers and what they were measured
with as JSON, of which `make docs` makes the page about performance and its chart.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

from _measure import FIGURES, Figure, arguments, cpu_model, grid

HERE = Path(__file__).parent
COMPILED = HERE.parent / "build" / "compiled"
FULL_SIZE = "decode_step.py"
"""The one that `--quick` leaves as it is: its bars are for as many requests as it has."""

SCRIPTS = (
    "workload_w.py",
    FULL_SIZE,
    "warm_match.py",
    "long_paths.py",
    "eviction.py",
    "states.py",
    "collector.py",
)
PLAIN, FAST = "plain", "compiled"


def measured(script: str, build: str, *, quick: bool) -> list[Figure]:
    """The figures of one script with one build."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures"
        path.touch()
        environment = {**os.environ, FIGURES: str(path)}
        if build == FAST:
            environment["PYTHONPATH"] = str(COMPILED)
        started = monotonic()
        command = [sys.executable, str(HERE / script), *(["--quick"] if quick else [])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{script}, {build} build: exit {done.returncode}\n{done.stderr}")
        print(f"{script}, {build}: {monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        found = [json.loads(line) for line in path.read_text().splitlines()]
    if not found:
        sys.exit(f"{script}, {build} build: no figures; it prints what went wrong if run alone")
    if {each.pop("compiled") for each in found} != {build == FAST}:
        sys.exit(f"{script}: this is not the {build} build; run `make compiled` again")
    return [Figure(**each) for each in found]


def rows(found: dict[str, list[Figure]]) -> Iterator[list[str]]:
    """A line for each figure: plain, compiled, their ratio, units, bars, verdicts."""
    fast = {(each.group, each.name): each for each in found.get(FAST, [])}
    for plain in found[PLAIN]:
        other = fast.get((plain.group, plain.name))
        pair = [plain, other]
        verdicts = {_verdict(each, bar) for each, bar in zip(pair, plain.bars) if each is not None}
        yield [
            f"{plain.group}: {plain.name}",
            *("" if each is None else f"{each.value:.2f}" for each in pair),
            plain.measure,
            "" if other is None or not other.value else f"{plain.value / other.value:.1f}",
            *("" if each is None or each.units is None else f"{each.units:.2f}" for each in pair),
            " / ".join(f"{bar:g}" for bar in plain.bars if bar is not None),
            "over" if "over" in verdicts else "ok" if "ok" in verdicts else "",
        ]


def _verdict(figure: Figure, bar: float | None) -> str:
    if bar is None:
        return ""
    return "ok" if (figure.value if figure.units is None else figure.units) <= bar else "over"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--save", type=Path, help="write the numbers to this file, as JSON")
    given = parser.parse_args()
    if given.save and not given.save.parent.is_dir():
        parser.error(f"--save {given.save}: there is no folder {given.save.parent}")
    builds = [PLAIN, FAST] if any(COMPILED.glob("kvgraft/tree/*.so")) else [PLAIN]
    facts = {
        "python": platform.python_version(),
        "cpu": f"{cpu_model()}, {os.cpu_count()} cores",
        "load": " ".join(f"{value:.2f}" for value in os.getloadavg()),
        "sizes": "quick" if given.quick else "full",
    }
    print("# costs of the core: " + ", ".join(f"{name} {value}" for name, value in facts.items()))
    if FAST not in builds:
        print("# the plain build alone: run `make compiled` first for both; it needs a C compiler")
    found: dict[str, list[Figure]] = {build: [] for build in builds}
    for script in SCRIPTS:
        for build in builds:
            found[build] += measured(script, build, quick=given.quick and script != FULL_SIZE)
    grid(
        ["", *(PLAIN, FAST), "", "ratio", *("plain units", "compiled units"), "bars", ""],
        rows(found),
    )
    if given.save:
        saved = {
            "facts": facts,
            **{build: [each._asdict() for each in figures] for build, figures in found.items()},
        }
        given.save.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
