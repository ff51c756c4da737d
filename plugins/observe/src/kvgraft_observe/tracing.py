"""Tracers are notified of each step of a request, inside the engine's call that takes it.

Events say where data is. Tracers serve durations, spans, and explanations of one request.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from kvgraft.admission.decision import Decision
    from kvgraft.parts import Prefetch
    from kvgraft.requests.request import Request
    from kvgraft.tree.keys import TokenKey

__all__ = ["Tracer", "Tracers"]

logger = logging.getLogger("kvgraft")


class Tracer:
    """Gets every step; a subclass overrides the methods it needs.

    The cache's thread calls it inside the engine's calls, so it must be fast. Of the cache's
    methods it may call only `explain` and `stats`. If it raises, the error is logged, the engine's
    call continues, and the tracer gets no more calls.
    """

    def beginning(self, key: TokenKey) -> None:
        """`begin` or `restart` begins to match a prompt."""

    def begun(self, request: Request) -> None:
        """It has matched and pinned the prefix that was found."""

    def decided(self, request: Request, decision: Decision) -> None:
        """`admit` decided; `decision.admitted` says whether the request may run."""

    def loading(self, request: Request) -> None:
        """`load_back` started copies; the request waits until it is `ready`."""

    def finished(self, request: Request) -> None:
        """`finish` or `retract` ended it, and its data is cached."""

    def aborted(self, request: Request) -> None:
        """`abort` ended it."""

    def prefetching(self, prefetch: Prefetch) -> None:
        """A prefetch of a queued request's data from STORAGE begins."""

    def polled(self) -> None:
        """`poll` or `drain` processed the transfers and prefetches that have ended."""


class Tracers:
    """The tracers of one cache, in the order in which they came."""

    def __init__(self) -> None:
        self._tracers: tuple[Tracer, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._tracers)

    def add(self, tracer: Tracer) -> None:
        """Notify a tracer from now on; adding it twice changes nothing.

        Raises:
            ConfigError: it is no tracer.
        """
        if not isinstance(tracer, Tracer):
            raise ConfigError(
                f"add_tracer: {tracer!r:.40} is no tracer; derive its class from "
                "kvgraft_observe.tracing.Tracer"
            )
        self.remove(tracer)
        self._tracers = (*self._tracers, tracer)

    def remove(self, tracer: Tracer) -> None:
        """Stop notifying a tracer."""
        self._tracers = tuple([each for each in self._tracers if each is not tracer])

    def notify(self, step: str, *about: object) -> None:
        """Call one method of `Tracer` on all of them; one that raises is removed."""
        for tracer in self._tracers:
            try:
                getattr(tracer, step)(*about)
            except Exception as error:  # noqa: BLE001 - it costs the cache nothing, as in V3
                self.remove(tracer)
                said = f"{type(error).__name__}: {' '.join(str(error).split())}"
                logger.warning("tracer %r raised and gets no more calls: %s", tracer, said)
