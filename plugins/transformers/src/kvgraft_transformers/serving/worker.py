"""The thread that runs the engine, and its interface for coroutines.

The engine belongs to one thread. Requests and aborts reach it through a queue; tokens go back to
the event loop of the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvgraft import KvgraftError
from kvgraft_transformers.engine import (
    Engine,
    FinishReason,
    Generation,
    GenerationRequest,
    NewToken,
)

__all__ = ["EngineFailureError", "EngineWorker", "ShutdownError", "Ticket"]

IDLE_S, STORING_S = 0.5, 0.005
"""Longest sleep of an idle engine between two polls of transfers, and while it stores."""

log = logging.getLogger("kvgraft.serve")

T = TypeVar("T")


LAST_STEP_S = 0.1
"""Seconds to wait for a running step if no time is left."""

MOST_FAILURES = 3
"""Consecutive steps that may raise before the engine is stopped."""


class EngineFailureError(Exception):
    """The model, a copy or the engine failed; this request is lost."""


class ShutdownError(EngineFailureError):
    """The server is shutting down; this request is lost, another server may answer it."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


@dataclass(eq=False)
class Ticket:
    """A coroutine's handle of one request in the engine's thread.

    Attributes:
        generation: the engine's generation; None until it is submitted.
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
        engine: the engine; others may only read its counts from now on.
        closes: called in its thread before it closes the engine.

    Attributes:
        failures: steps of the engine that raised, not counting failed passes of requests.
        draining: whether new requests are refused while running ones continue.
        stop_by: deadline for the end of its thread, by `time.monotonic`; None for none.
    """

    def __init__(self, engine: Engine, closes: Sequence[Callable[[], object]] = ()) -> None:
        self.engine = engine
        self._closes = closes
        self.failures = 0
        self.draining = False
        self.stop_by: float | None = None
        self._open: set[Ticket] = set()  # owned by the event loop's thread
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self._tickets: dict[Generation, Ticket] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvgraft-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Abort running requests, close the engine, and wait for its thread, until `stop_by`."""
        self._stopping = True
        self._calls.put(lambda: None)  # wakes the thread
        left_s = None if self.stop_by is None else max(LAST_STEP_S, self.stop_by - time.monotonic())
        self._thread.join(left_s)

    @property
    def runs(self) -> bool:
        """Whether its thread is running."""
        return self._thread.is_alive()

    def end_all(self) -> int:
        """End every request now, in the event loop's thread, without waiting for a running pass."""
        for ticket in self._open:
            ticket.events.put_nowait(ShutdownError())
        return len(self._open)

    @property
    def n_open(self) -> int:
        """Requests that have not ended, in the event loop's thread."""
        return len(self._open)

    @property
    def alive(self) -> bool:
        """Whether it can take requests."""
        return self._thread.is_alive() and not self._stopping

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[NewToken, None]:
        """Yield tokens as they come, until the last.

        Closing it earlier ends the request, whose data stays cached; cancelling it aborts the
        request.

        Raises:
            KvgraftError: the engine refuses the request.
            ShutdownError: the server is about to end.
            EngineFailureError: the model failed, or the engine has stopped.
        """
        if self.draining:
            raise ShutdownError
        ticket = Ticket(asyncio.get_running_loop())
        self._calls.put(lambda: self._submit(ticket, request))
        if not self.alive:
            raise EngineFailureError("the engine has stopped")
        leave = self.engine.abort
        self._open.add(ticket)
        try:
            while True:
                event = await ticket.events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if event.finish is not None:
                    return
        except GeneratorExit:
            leave = self.engine.end
            raise
        finally:
            self._open.discard(ticket)
            self._calls.put(lambda: self._leave(ticket, leave))

    async def call(self, function: Callable[[], T]) -> T:
        """Run a short function in the engine's thread between two steps; returns its result.

        Raises:
            EngineFailureError: the engine has stopped, or stops before it runs the function.
            KvgraftError: the function's own.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: Exception | None) -> None:
            if result.done():
                return  # its coroutine has gone
            if error is None:
                result.set_result(value)  # type: ignore[arg-type]
            else:
                result.set_exception(error)

        def run() -> None:
            value, error = None, None
            try:
                value = function()
            except Exception as raised:  # noqa: BLE001 - it is raised again where it was called
                error = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, value, error)

        self._calls.put(run)
        if not self.alive:
            raise EngineFailureError("the engine has stopped")
        return await result

    def post(self, function: Callable[[], object]) -> None:
        """Run a short function in the engine's thread later; does nothing once that has stopped."""

        def run() -> None:
            with contextlib.suppress(KvgraftError):
                function()

        self._calls.put(run)

    # -- in the engine's thread

    def _run(self) -> None:
        in_a_row = 0
        try:
            while in_a_row < MOST_FAILURES and self._take_calls():
                try:
                    for new in self.engine.step():
                        self._deliver(new)
                    in_a_row = 0
                except Exception as error:  # noqa: BLE001 - any error: clients must hear of it
                    in_a_row += 1
                    self._lose(error)
        finally:
            self._close()

    def _take_calls(self) -> bool:
        """Run queued calls; sleep while there is nothing to do. False at the end."""
        try:
            call = self._next_call()
            while True:
                call()
                if self._stopping:
                    return False
                call = self._calls.get_nowait()
        except queue.Empty:
            return True

    def _next_call(self) -> Callable[[], None]:
        if not self.engine.idle:
            return self._calls.get_nowait()
        return self._calls.get(timeout=STORING_S if self.engine.storing else IDLE_S)

    def _submit(self, ticket: Ticket, request: GenerationRequest) -> None:
        try:
            ticket.generation = self.engine.submit(request)
        except KvgraftError as error:
            ticket.put(error)
            return
        self._tickets[ticket.generation] = ticket

    def _leave(self, ticket: Ticket, leave: Callable[[Generation], None]) -> None:
        """The client has gone: end its request, unless it has ended."""
        generation = ticket.generation
        if generation is not None and self._tickets.pop(generation, None) is not None:
            leave(generation)

    def _deliver(self, new: NewToken) -> None:
        ticket = self._tickets.get(new.generation)
        if ticket is None:
            return
        if new.finish is not None:
            del self._tickets[new.generation]
        if new.finish is FinishReason.FAILED:
            error = new.generation.error
            log.error("a request failed: %s: %s", type(error).__name__, error)
            ticket.put(EngineFailureError(f"{type(error).__name__}: {error}"))
        else:
            ticket.put(new)

    def _lose(self, error: Exception) -> None:
        """A step raised and the request at fault is unknown: end all of them."""
        self.failures += 1
        log.error("the engine failed: %s: %s", type(error).__name__, error)
        for generation in list(self._tickets):
            self.engine.abort(generation)
        self._tell_all(EngineFailureError(f"{type(error).__name__}: {error}"))

    def _tell_all(self, error: EngineFailureError) -> None:
        for ticket in self._tickets.values():
            ticket.put(error)
        self._tickets.clear()

    def _close(self) -> None:
        """End the thread, so that no coroutine keeps waiting."""
        self._stopping = True
        with contextlib.suppress(queue.Empty):
            while True:  # calls that came too late get an error below
                self._calls.get_nowait()()
        self._tell_all(ShutdownError())
        for close in self._closes:
            close()
        self.engine.close()
