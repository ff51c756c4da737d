"""Ctrl-C waits where it must, and is not lost."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from kvgraft_cli.interrupts import uninterrupted


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
