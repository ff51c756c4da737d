"""Copies of the process that a component forks: they end at once, and the fork is reported (P10).

A copy would go on with this process's work, fork again, and answer in its place. Programs that a
component starts with `subprocess` are not affected.
"""

from __future__ import annotations

import os
from collections.abc import Callable

__all__ = ["end_forks"]


def end_forks(tell: Callable[[], None]) -> None:
    """End every later copy of this process, as long as it runs.

    Args:
        tell: called in this process before each copy is made.
    """
    leave = os._exit
    os.register_at_fork(before=tell, after_in_child=lambda: leave(0))
