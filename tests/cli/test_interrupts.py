"""Ctrl-C waits where it must, and is not lost."""

from __future__ import annotations

import importlib
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvgraft_cli.interrupts import UninterruptedImport, uninterrupted


def interrupted(work: Callable[[], object]) -> None:
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
        work()


def test_ctrl_c_counts_at_the_end_of_the_block() -> None:
    before, done = signal.getsignal(signal.SIGINT), list[int]()
    with pytest.raises(KeyboardInterrupt):
        interrupted(lambda: done.append(1))
    assert done
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_in_the_block_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        interrupted(lambda: 1 // 0)


def test_on_another_thread_the_block_changes_no_handler() -> None:
    before, found = signal.getsignal(signal.SIGINT), list[object]()

    def work() -> None:
        with uninterrupted():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before]


def test_ctrl_c_in_an_import_counts_when_the_module_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import ends whole, and is undone by the interruption; the next one is an ordinary one."""
    body = "import signal\nsignal.raise_signal(signal.SIGINT)\nprint('whole')\n"
    (tmp_path / "delicate.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    UninterruptedImport.install("delicate")
    said = list[str]()
    monkeypatch.setattr("builtins.print", said.append)
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module("delicate")
    assert said == ["whole"]
    assert sys.meta_path == finders
    assert "delicate" not in sys.modules


def test_a_module_that_is_not_there_is_missing_as_ever() -> None:
    UninterruptedImport.install("no_such_module_anywhere")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        importlib.import_module("no_such_module_anywhere")
