"""Transfer engines, which move bytes: one interface, several engines.

An engine accepts copies and returns at once with a ticket; the scheduler thread polls tickets and
never waits, except with a bound, for a copy that must finish now. Copies start after `fence`, the
point of the computation that produced their source, so order is part of the call (B4).
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from kvgraft.errors import ConfigError, TransferError
from kvgraft.pools.component import PlaneCopy, layers_of, run_copy


class Fence(Protocol):
    """A point of the computation; a `threading.Event` is one on the CPU."""

    def wait(self, timeout: float | None = None) -> object:
        """Block until the point is reached, at most `timeout` seconds; false if it was not."""


def expect_fence(fence: object) -> None:
    """Refuse an object without `wait`; None means no fence.

    Raises:
        ConfigError: naming it.
    """
    if fence is not None and not callable(getattr(fence, "wait", None)):
        raise ConfigError(
            f"fence {fence!r:.40} of type {type(fence).__name__}; give an object with "
            "wait(timeout), such as a threading.Event, or an event of the device"
        )


class Fences:
    """The points of the computation that an engine named; copies to HOST wait for them (B4).

    Computation happens in order, so a new point covers all before it. A point that is named again
    is either an old one, or the same object for a new point: copies wait for it and for the latest.
    Points without weak references count as new each time.
    """

    __slots__ = ("_ahead", "_known")

    def __init__(self) -> None:
        self._ahead: tuple[Fence, ...] = ()
        self._known: weakref.WeakSet[Fence] = weakref.WeakSet()

    def name(self, fence: Fence) -> None:
        """Copies from now on wait for this point too."""
        if any(each is fence for each in self._ahead):
            return
        try:
            known = fence in self._known
            self._known.add(fence)
        except TypeError:
            known = False
        self._ahead = (*self._ahead, fence) if known else (fence,)

    @property
    def ahead(self) -> Fence | None:
        """The point that copies wait for now; None if none was named."""
        if len(self._ahead) > 1:
            return _AllOf(self._ahead)
        return self._ahead[0] if self._ahead else None


class _AllOf:
    """Several points: reached when all of them are."""

    __slots__ = ("fences",)

    def __init__(self, fences: tuple[Fence, ...]) -> None:
        self.fences = fences

    def wait(self, timeout: float | None = None) -> bool:
        """Block until all are reached, at most `timeout` seconds; false if one was not."""
        end = None if timeout is None else time.monotonic() + timeout
        for fence in self.fences:
            left = None if end is None else max(0.0, end - time.monotonic())
            if fence.wait(left) is False:
                return False
        return True


def fences_of(fence: Fence | None) -> tuple[Fence, ...]:
    """The points that a copy behind `fence` waits for, one by one."""
    if fence is None:
        return ()
    return fence.fences if isinstance(fence, _AllOf) else (fence,)


class Ticket:
    """Progress of one submission; written by the engine, read by the scheduler.

    Attributes:
        copies: the plane copies, in layer order.
        error: why it failed, once it has.
    """

    __slots__ = ("_done", "_progress", "copies", "error", "layers", "layers_done")

    def __init__(self, copies: Sequence[PlaneCopy]) -> None:
        self.copies = tuple(copies)
        self.layers = layers_of(self.copies)
        self.layers_done = 0
        self.error: BaseException | None = None
        self._done = False
        self._progress = threading.Condition()

    @property
    def done(self) -> bool:
        """Whether the copies ended, even if they failed."""
        return self._done

    def finish_layer(self) -> None:
        """The next layer's copies are complete (engine side)."""
        with self._progress:
            self.layers_done += 1
            self._progress.notify_all()

    def finish(self, error: BaseException | None = None) -> None:
        """The submission ended (engine side)."""
        with self._progress:
            self.error = error
            self._done = True
            self._progress.notify_all()

    def layer_ready(self, layer: int) -> bool:
        """Whether a layer's data can be read (R7); layers without copies are ready."""
        return layer not in self.layers or self.layers.index(layer) < self.layers_done

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end, at most `timeout_s` seconds; whether it ended."""
        with self._progress:
            return self._progress.wait_for(lambda: self._done, timeout_s)

    def wait_layer(self, layer: int, timeout_s: float) -> None:
        """Wait until a layer's data can be read.

        Raises:
            TransferError: the copy failed, or took longer than `timeout_s`.
        """
        with self._progress:
            arrived = self._progress.wait_for(
                lambda: self.layer_ready(layer) or self._done, timeout_s
            )
        if not arrived or not self.layer_ready(layer):
            reason = self.error or f"not done after {timeout_s} s"
            raise TransferError(f"layer {layer}: {reason}; treat the load as failed")


class TransferEngine(Protocol):
    """Runs copies in the background, each direction in the order of submission."""

    def submit(self, copies: Sequence[PlaneCopy], fence: Fence | None = None) -> Ticket:
        """Start copying after `fence`; never blocks."""

    def close(self) -> None:
        """Finish the submitted copies and stop."""


Submissions: TypeAlias = "queue.SimpleQueue[tuple[Ticket, Fence | None, float] | None]"
"""Each ticket with its fence, and when its wait ends, by `time.monotonic`."""


class CpuTransferEngine:
    """Worker threads that run submissions in order.

    Args:
        n_workers: threads; submissions start in order, but several threads may end them out of
            order.
        fence_timeout_s: seconds after its submission at which a copy whose fence was not reached
            fails; a cache gives the engine it makes its `transfer_timeout_s`.
    """

    def __init__(self, n_workers: int = 1, fence_timeout_s: float = 30.0) -> None:
        self._queue: Submissions = queue.SimpleQueue()
        self._fence_timeout_s = fence_timeout_s
        self._workers = [
            threading.Thread(
                target=_work,
                args=(self._queue, fence_timeout_s),
                name=f"kvgraft-copy-{index}",
                daemon=True,
            )
            for index in range(n_workers)
        ]
        for worker in self._workers:
            worker.start()
        # Workers refer only to the queue, so dropping an unclosed engine stops them as well.
        self._stop = weakref.finalize(self, _stop, self._queue, n_workers)

    def submit(self, copies: Sequence[PlaneCopy], fence: Fence | None = None) -> Ticket:
        """Queue the copies; see `TransferEngine.submit`. A closed engine fails them at once."""
        ticket = Ticket(copies)
        if self._stop.alive:
            self._queue.put((ticket, fence, time.monotonic() + self._fence_timeout_s))
        else:
            ticket.finish(TransferError("the engine is closed: nothing is copied any more"))
        return ticket

    def close(self) -> None:
        """Finish the submitted copies and stop the workers."""
        self._stop()
        for worker in self._workers:
            worker.join()


def _stop(submissions: Submissions, n_workers: int) -> None:
    for _ in range(n_workers):
        submissions.put(None)


def _work(submissions: Submissions, fence_timeout_s: float) -> None:
    """Run submissions until the end of the queue; between two it holds none, and so no pool."""
    while (item := submissions.get()) is not None:
        ticket, fence, until = item
        try:
            if fence is not None and fence.wait(max(0.0, until - time.monotonic())) is False:
                raise TransferError(f"the fence was not reached in {fence_timeout_s} s")
            run_layers(ticket)
        except Exception as error:  # noqa: BLE001 - the ticket carries the error
            ticket.finish(error)
        else:
            ticket.finish()
        del item, ticket, fence


def run_layers(ticket: Ticket) -> None:
    """Run a ticket's copies, announcing each layer as it completes."""
    for position, copy in enumerate(ticket.copies):
        run_copy(copy)
        last = position + 1 == len(ticket.copies)
        if last or ticket.copies[position + 1].layer != copy.layer:
            ticket.finish_layer()


class NoPayloadTransferEngine:
    """A transfer engine for pools on torch's device `meta`: every submission ends at once.

    Without payload there is no fence to wait for.
    """

    def submit(self, copies: Sequence[PlaneCopy], fence: Fence | None = None) -> Ticket:
        """A ticket that has ended; see `TransferEngine.submit`."""
        del fence
        ticket = Ticket(copies)
        ticket.layers_done = len(ticket.layers)
        ticket.finish()
        return ticket

    def close(self) -> None:
        """Does nothing: every submission has ended."""
