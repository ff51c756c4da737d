"""`kvgraft check` says that it works, now and then."""

from __future__ import annotations

import io
import re
import sys
import threading

import pytest

from kvgraft_testing import working
from kvgraft_testing.commands import check


class Told(io.StringIO):
    """Keeps what is written, and tells when a line came."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()

    def flush(self) -> None:
        if self.getvalue().endswith("\n"):
            self.came.set()


def test_a_check_in_a_pipe_says_now_and_then_that_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    monkeypatch.setattr(working, "LINE_EVERY_S", 0.001)
    monkeypatch.setattr(sys, "stderr", told)
    with check.shown_working("driving 'full' through the core"):
        assert told.came.wait(10)
    assert re.match(r"kvgraft: driving 'full' through the core, 0 s so far\n", told.getvalue())
    said = told.getvalue()
    assert not [each for each in threading.enumerate() if each.name == "kvgraft-progress"]
    assert told.getvalue() == said


def test_a_check_that_ends_soon_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with check.shown_working("driving"):
        pass
    assert capsys.readouterr().err == ""
