"""Consoles of the command line."""

from __future__ import annotations

import os
import sys

from rich.console import Console, RenderableType
from rich.measure import Measurement

__all__ = ["OutputConsole"]

UNBOUNDED = 10_000
"""More columns than any output has."""

BROKEN_PIPE = 141
"""The exit status that a shell reports for a program that SIGPIPE ended."""


class OutputConsole(Console):
    """Standard output; its reader may stop reading."""

    def measured(self, renderable: RenderableType) -> Measurement:
        """The widths that it needs so that nothing is wrapped."""
        return Measurement.get(self, self.options.update(max_width=UNBOUNDED), renderable)

    def widen(self, renderable: RenderableType) -> None:
        """Widen the console for the next output, if it goes into a file or a pipe."""
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = max(self.width, self.measured(renderable).maximum)

    def on_broken_pipe(self) -> None:
        """End quietly with the status of a broken pipe."""
        self.quiet = True
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
        raise SystemExit(BROKEN_PIPE)
