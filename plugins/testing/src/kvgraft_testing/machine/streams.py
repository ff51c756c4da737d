"""The engine of accelerators on a simulated device, whose copies run when the test says so.

The model's steps, and copies within pools, run as soon as a call is over; the bytes of a step are
there at once. The device notes which work accessed which bytes, in order.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvgraft.transfers import Fence, PlaneCopy, Ticket
from kvgraft_accelerator.streams import StreamTicket, StreamTransferEngine
from kvgraft_testing.machine.engines import PromptedTransferEngine, Submission
from kvgraft_testing.simulated import SimulatedDevice, Unordered
from kvgraft_testing.simulated.streams import Point, SimulatedEvent

__all__ = ["PromptedStreamEngine"]


class _PromptedStreamTicket(StreamTicket):
    """Runs, fails or runs out of time as soon as somebody waits for it."""

    __slots__ = ("engine",)
    engine: PromptedStreamEngine

    def wait(self, timeout_s: float) -> bool:
        del timeout_s
        if not self.ran:
            self.engine.prompted(self)
        return self.done

    @property
    def points(self) -> list[SimulatedEvent]:
        """Its events."""
        return [event for event in self.events or () if isinstance(event, SimulatedEvent)]

    @property
    def ran(self) -> bool:
        """Whether its copies ended; the host does not learn of it."""
        return self.events is not None and all(event.passed for event in self.points)


class _Streams(StreamTransferEngine):
    kind = _PromptedStreamTicket


class PromptedStreamEngine(PromptedTransferEngine):
    """Copies on streams of a simulated device; running one also runs those before it.

    Attributes:
        device: the device, for the cache.
    """

    def __init__(self) -> None:
        super().__init__()
        self.runtime = self.device = SimulatedDevice()
        self._streams = _Streams(self.device)
        self._n_told = 0

    def accept(self, copies: Sequence[PlaneCopy], fence: Fence | None) -> Ticket:
        """Submit to the device."""
        ticket = self._streams.submit(copies, fence)
        assert isinstance(ticket, _PromptedStreamTicket)
        ticket.engine = self
        return ticket

    def step(self, index: int = 0) -> None:
        """Run one pending submission, and those that must run before it."""
        self._run(self.pending[index], fails=False)

    def fail(self, index: int = 0) -> None:
        """Let one pending submission fail without moving anything; those before it run."""
        ticket = self.pending[index]
        assert isinstance(ticket, _PromptedStreamTicket)
        self.device.fail(ticket.points)
        self._run(ticket, fails=True)

    def unfinished(self) -> list[Submission]:
        """Submissions that have not run."""
        self.submissions = [each for each in self.submissions if not _ran(each.ticket)]
        return self.submissions

    def settle(self) -> Sequence[Unordered]:
        """The model's steps run; pairs of accesses found since the last time."""
        compute = self.device.compute()
        self.device.run_until([Point(compute, compute.submitted)])
        found = self.device.unordered[self._n_told :]
        self._n_told += len(found)
        return found

    def _run(self, ticket: Ticket, *, fails: bool) -> None:
        assert isinstance(ticket, _PromptedStreamTicket)
        self.device.run_until([event.point for event in ticket.points])
        for each in [each for each in self.pending if _ran(each)]:
            self.pending.remove(each)
            error = _error(each)
            if error is not None:
                self.failed += 1
                if each is not ticket or not fails:
                    self.broken.append((each, error))


def _ran(ticket: Ticket) -> bool:
    return isinstance(ticket, _PromptedStreamTicket) and ticket.ran


def _error(ticket: Ticket) -> Exception | None:
    assert isinstance(ticket, _PromptedStreamTicket)
    errors = [ticket.failure, *(event.error for event in ticket.points)]
    return next((each for each in errors if isinstance(each, Exception)), None)
