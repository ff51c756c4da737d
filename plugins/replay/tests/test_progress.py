"""Long work says how far it is, also where stderr is a pipe."""

from __future__ import annotations

import io

from rich.console import Console

from kvgraft_replay.progress import LINE_EVERY_S, shown_progress
from kvgraft_replay.synthetic import synthetic_workload


def test_on_a_pipe_a_line_is_written_every_half_a_minute() -> None:
    now, out = 100.0, io.StringIO()
    with shown_progress("replays", Console(file=out), clock=lambda: now) as report:
        for step in range(1, 100):
            now += LINE_EVERY_S / 10
            report(step / 4, 26)
    lines = out.getvalue().splitlines()
    assert lines[0] == "kvgraft: 2.5 of 26 replays in 30 s"
    assert lines[1] == "kvgraft: 5 of 26 replays in 60 s"
    assert len(lines) == 9


def test_a_terminal_gets_a_bar_that_goes_when_the_work_is_done() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    with shown_progress("requests", console) as report:
        report(3, 40)
    assert "3/40" in out.getvalue()


def test_making_a_synthetic_workload_tells_how_far_it_is() -> None:
    told: list[tuple[float, float]] = []
    synthetic_workload(
        "chat", requests=3500, seed=0, progress=lambda done, total: told.append((done, total))
    )
    assert told == [(1000, 3500), (2000, 3500), (3000, 3500)]
