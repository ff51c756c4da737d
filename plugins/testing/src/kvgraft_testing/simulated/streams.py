"""Streams that queue their work until the host needs it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvgraft.devices import PlaneCopy
from kvgraft.errors import TransferError
from kvgraft_accelerator.fragments import Fragments, Rows
from kvgraft_accelerator.protocol import Event, Purpose
from kvgraft_testing.simulated.ordering import Clock, join

if TYPE_CHECKING:
    from kvgraft_testing.simulated.device import SimulatedDevice

__all__ = ["Point", "SimulatedEvent", "SimulatedStream", "Work"]


class Point(NamedTuple):
    """The end of a stream's work up to some step."""

    stream: SimulatedStream
    step: int


class Work(NamedTuple):
    """A piece of a stream's work.

    Attributes:
        number: in the order of submission to the device.
        label: its name in messages.
        purpose: what it is for.
        point: its place in its stream.
        clock: the work that is known to have run before.
        after: points of other streams that it waits for.
        run: runs it, and notes the accesses.
    """

    number: int
    label: str
    purpose: Purpose
    point: Point
    clock: Clock
    after: tuple[Point, ...]
    run: Callable[[Work], None]


class SimulatedEvent:
    """A point of a simulated stream; see `Event`."""

    def __init__(self, stream: SimulatedStream, since: int) -> None:
        self.point = Point(stream, stream.submitted)
        self.clock = dict(stream.clock)
        self._since = since

    def done(self) -> bool:
        """Whether the schedule has reached it; a schedule may choose to do so now."""
        device = self.point.stream.device
        device.expect_alive()
        if not self.passed and not device.choose(2):
            return False
        return self.wait()

    def wait(self, timeout: float | None = None) -> bool:
        """Run all work that the point needs; the host then knows that it ran."""
        del timeout
        stream = self.point.stream
        stream.device.expect_alive()
        stream.device.run_until([self.point])
        join(stream.device.host_clock, self.clock)
        if self.error is not None:
            raise TransferError(f"{stream.name}: {self.error}") from self.error
        return True

    def replace(self, run: Callable[[Work], None]) -> None:
        """Replace the work since the event before, if it has not run."""
        queue = self.point.stream.queue
        for index, work in enumerate(queue):
            if self._since < work.point.step <= self.point.step:
                queue[index] = work._replace(run=run)

    @property
    def passed(self) -> bool:
        """Whether the device has reached it; the host does not learn that."""
        return self.point.stream.ran >= self.point.step

    @property
    def error(self) -> BaseException | None:
        """The first error of the work since the event before, if it has run."""
        failed = self.point.stream.failed
        steps = range(self._since + 1, self.point.step + 1)
        return next((failed[step] for step in steps if step in failed), None)


class SimulatedStream:
    """A stream of a simulated device; see `Stream`.

    Attributes:
        name: in messages.
        clock: the work known to have run before its next work.
        queue: work that has not run, oldest first.
        submitted, ran: the last step submitted, and run.
        failed: errors of steps that raised.
    """

    def __init__(self, device: SimulatedDevice, name: str, purpose: Purpose) -> None:
        self.device, self.name, self.purpose = device, name, purpose
        self.clock: Clock = {}
        self.queue: deque[Work] = deque()
        self.submitted = self.ran = self._recorded = 0
        self.failed: dict[int, BaseException] = {}
        self._after: list[Point] = []

    def copy(self, groups: Sequence[Sequence[PlaneCopy]]) -> list[Event]:
        """Queue copies, group after group; see `Stream.copy`."""
        events: list[Event] = []
        for _ in self.device.submit_copies(self, groups):
            events.append(self.record())
        return events

    def move(self, fragments: Fragments) -> None:
        """Queue copies of pieces."""
        self.device.submit_moves(self, fragments)

    def move_rows(self, rows: Rows) -> None:
        """Queue copies of rows."""
        self.device.submit_rows(self, rows)

    def record(self) -> SimulatedEvent:
        """An event behind all that was submitted so far."""
        self.device.expect_alive()
        if self._after:  # the event is behind what the stream waits for
            self.device.submit_wait(self)
        event = SimulatedEvent(self, self._recorded)
        self._recorded = self.submitted
        return event

    def wait(self, event: Event) -> None:
        """Work submitted from now on runs after `event`."""
        assert isinstance(event, SimulatedEvent), "an event of another device"
        join(self.clock, event.clock)
        self._after.append(event.point)

    def submit(self, number: int, label: str, run: Callable[[Work], None]) -> None:
        """Queue some work; it inherits the host's clock."""
        self.submitted += 1
        join(self.clock, self.device.host_clock)
        self.clock[self.name] = self.submitted
        after, self._after = tuple(self._after), []
        point = Point(self, self.submitted)
        self.queue.append(Work(number, label, self.purpose, point, dict(self.clock), after, run))

    def run_next(self) -> None:
        """Run the oldest work; an error is kept for those that wait for it."""
        work = self.queue.popleft()
        try:
            work.run(work)
        except Exception as error:  # noqa: BLE001 - as on a device, whoever waits is told
            self.failed[work.point.step] = error
        self.ran = work.point.step
