"""Shuts the server down: refuses new requests, waits for running ones, then ends the rest.

    signal      new requests get 503, running ones go on
    last words  those that are left get 503, or an error event in their stream
    grace over  the listener is closed, the engine has stopped, the process exits with 0

uvicorn by itself closes its listener at once, cuts off streams, and ends by its signal.
"""

from __future__ import annotations

import logging
import time
from types import FrameType

import uvicorn

from kvgraft_transformers.serving.worker import EngineWorker

__all__ = ["LAST_WORDS_S", "DrainingServer"]

LAST_WORDS_S = 1
"""Last seconds of the grace, in which clients get errors for their requests, and the engine stops.
"""

log = logging.getLogger("kvgraft.serve")


class DrainingServer(uvicorn.Server):
    """A server that finishes running requests before it ends.

    Args:
        config: uvicorn's configuration.
        worker: refuses and ends requests.
        grace_s: seconds from a signal to the end; at least `LAST_WORDS_S`.
    """

    def __init__(self, config: uvicorn.Config, worker: EngineWorker, grace_s: float) -> None:
        super().__init__(config)
        self._worker = worker
        self._grace_s = max(grace_s, LAST_WORDS_S)
        self._begun = time.monotonic()
        self._drains = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to shut down at a signal; a second one ends at once."""
        if self._worker.draining:
            self.should_exit = self.force_exit = True
            self._worker.stop_by = time.monotonic()
        else:
            self._worker.stop_by = time.monotonic() + self._grace_s
        self._worker.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second: whether to leave the main loop."""
        if self._worker.draining and not self.should_exit:
            self.should_exit = self._drained(time.monotonic())
        return await super().on_tick(counter)

    def _drained(self, now: float) -> bool:
        worker, deadline = self._worker, self._worker.stop_by
        assert deadline is not None
        if not self._drains:
            self._drains = True
            left_s = max(0.0, deadline - LAST_WORDS_S - now)
            log.info("stopping: answers that have %.1f s to end: %d", left_s, worker.n_open)
        if not self.server_state.tasks:
            return True
        if now < deadline - LAST_WORDS_S:
            return False
        log.info("stopping: answers that end before they are done: %d", worker.end_all())
        return True

    def tell_totals(self) -> None:
        """Log what was served."""
        totals = self._worker.engine.totals
        log.info(
            "stopped after %.0f s and %d answers: %d finished, %d aborted, %d failed, %d rejected; "
            "%d prompt tokens (%d cached), %d new",
            time.monotonic() - self._begun,
            totals.requests,
            totals.finished,
            totals.aborted,
            totals.failed,
            totals.rejected,
            totals.prompt_tokens,
            totals.cached_tokens,
            totals.generated_tokens,
        )
