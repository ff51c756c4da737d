"""Consoles of the command line."""

from __future__ import annotations

import os
import sys

from rich.console import Console

__all__ = ["OutputConsole"]

BROKEN_PIPE = 141
"""The status a shell gives a program that SIGPIPE ended."""


class OutputConsole(Console):
    """Standard output; whoever reads it may stop reading."""

    def on_broken_pipe(self) -> None:
        """End quietly with the status of a broken pipe."""
        self.quiet = True
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
        raise SystemExit(BROKEN_PIPE)
