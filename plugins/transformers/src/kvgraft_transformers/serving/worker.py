"""The thread that runs the engine, and how coroutines talk to it.

The engine belongs to one thread. Requests and aborts go to it through a queue; tokens come back to
the event loop that asked for them.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from kvgraft import KvgraftError
from kvgraft_transformers.engine import (
    Engine,
    FinishReason,
    Generation,
    GenerationRequest,
    NewToken,
)

__all__ = ["EngineFailureError", "EngineWorker", "Ticket"]

IDLE_S = 0.5
"""Longest sleep of an idle engine between two looks at its transfers."""

log = logging.getLogger("kvgraft.serve")


class EngineFailureError(Exception):
    """A forward pass failed; the request it was for is lost, the engine goes on."""


@dataclass(eq=False)
class Ticket:
    """One request in the engine's thread, seen from a coroutine.

    Attributes:
        generation: the engine's; None until it was taken in.
    """

    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[NewToken | Exception] = field(default_factory=asyncio.Queue)
    generation: Generation | None = None

    def put(self, event: NewToken | Exception) -> None:
        """Hand an event to the coroutine (engine thread)."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class EngineWorker:
    """Runs an engine until it is stopped.

    Args:
        engine: nobody else may call it from now on, but for reading counts.

    Attributes:
        failures: forward passes that raised.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failures = 0
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self._tickets: dict[Generation, Ticket] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvgraft-engine", daemon=True)

    def start(self) -> None:
        """Begin to run."""
        self._thread.start()

    def stop(self) -> None:
        """Abort what runs, close the engine, and wait for its thread."""
        self._calls.put(self._close)
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether it can take requests."""
        return self._thread.is_alive() and not self._stopping

    async def generate(self, request: GenerationRequest) -> AsyncIterator[NewToken]:
        """Tokens as they come, until the last; leaving early aborts the request.

        Raises:
            KvgraftError: a request the engine refuses.
            EngineFailureError: a forward pass failed.
        """
        ticket = Ticket(asyncio.get_running_loop())
        self._calls.put(lambda: self._submit(ticket, request))
        finished = False
        try:
            while not finished:
                event = await ticket.events.get()
                if isinstance(event, Exception):
                    finished = True
                    raise event
                finished = event.finish is not None
                yield event
        finally:
            if not finished:
                self._calls.put(lambda: self._abort(ticket))

    # -- in the engine's thread

    def _run(self) -> None:
        while self._take_calls():
            try:
                for new in self.engine.step():
                    self._deliver(new)
            except Exception as error:  # noqa: BLE001 - a model may raise anything; serving goes on
                self._lose(error)

    def _take_calls(self) -> bool:
        """Carry out what was asked; sleep while there is nothing to do. False at the end."""
        try:
            call = self._calls.get(timeout=IDLE_S) if self.engine.idle else self._calls.get_nowait()
            while True:
                call()
                if self._stopping:
                    return False
                call = self._calls.get_nowait()
        except queue.Empty:
            return True

    def _submit(self, ticket: Ticket, request: GenerationRequest) -> None:
        try:
            ticket.generation = self.engine.submit(request)
        except KvgraftError as error:
            ticket.put(error)
            return
        self._tickets[ticket.generation] = ticket

    def _abort(self, ticket: Ticket) -> None:
        generation = ticket.generation
        if generation is not None and self._tickets.pop(generation, None) is not None:
            self.engine.abort(generation)

    def _deliver(self, new: NewToken) -> None:
        ticket = self._tickets.get(new.generation)
        if ticket is None:
            return
        if new.finish is not None:
            del self._tickets[new.generation]
        ticket.put(new)

    def _lose(self, error: Exception) -> None:
        """A pass failed: the engine has aborted its requests; tell those who wait for them."""
        self.failures += 1
        log.error("a forward pass failed: %s: %s", type(error).__name__, error)
        for generation, ticket in list(self._tickets.items()):
            if generation.finish is FinishReason.ABORTED:
                del self._tickets[generation]
                ticket.put(EngineFailureError(f"{type(error).__name__}: {error}"))

    def _close(self) -> None:
        self._stopping = True
        for ticket in self._tickets.values():
            ticket.put(EngineFailureError("the server is shutting down"))
        self._tickets.clear()
        self.engine.close()
