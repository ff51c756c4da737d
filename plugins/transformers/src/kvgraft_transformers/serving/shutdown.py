"""The end of the server: requests are refused first, then given time, then told.

    signal      new requests get 503, running ones go on
    grace over  those that are left get 503, or an error event in their stream
    all told    the listener closes, the engine stops, the process exits with 0

uvicorn alone closes its listener at once, cuts streams off, and ends by the signal it got.
"""

from __future__ import annotations

import time
from types import FrameType

import uvicorn

from kvgraft_transformers.serving.worker import EngineWorker

__all__ = ["DrainingServer"]

LAST_WORDS_S = 2.0
"""Seconds in which clients may read why their requests ended."""


class DrainingServer(uvicorn.Server):
    """A server that finishes running requests before it ends.

    Args:
        config: uvicorn's.
        worker: refuses and ends requests.
        grace_s: how long running requests may go on after a signal.
    """

    def __init__(self, config: uvicorn.Config, worker: EngineWorker, grace_s: float) -> None:
        super().__init__(config)
        self._worker = worker
        self._grace_s = grace_s
        self._deadline: float | None = None
        self._told = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: begin to end; a second one ends at once."""
        if self._worker.draining:
            self.should_exit = self.force_exit = True
        self._worker.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to leave the main loop."""
        if self._worker.draining and not self.should_exit:
            self.should_exit = self._drained(time.monotonic())
        return await super().on_tick(counter)

    def _drained(self, now: float) -> bool:
        if self._deadline is None:
            self._deadline = now + self._grace_s
        if not self.server_state.tasks:
            return True
        if now >= self._deadline and not self._told:
            self._told = True
            self._worker.end_all()
        return now >= self._deadline + LAST_WORDS_S
