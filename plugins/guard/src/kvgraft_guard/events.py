"""Checks of events: they report all of the tree's data, and lost events are counted (V1 to V3).

A second opinion: all events are recorded a second time, and applied to a mirror at every full
check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvgraft.errors import ContractViolation
from kvgraft.tree.node import Node
from kvgraft.types import Tier

if TYPE_CHECKING:
    from kvgraft_observe.events import Event, EventStream
    from kvgraft_observe.events import Recorder as _Recorder
    from kvgraft_observe.events.stream import EventStream as _Stream
    from kvgraft_observe.events.stream import Observe
else:
    _Recorder = _Stream = object

__all__ = ["guarded_recorder"]

Residency = dict[tuple[str, Tier], set[bytes]]
"""Hashes of the pages there, by component and tier."""


class CountedStream(_Stream):
    """A reader's events, counted when they are made, taken and lost (V3).

    If another thread takes some during a comparison, there is none.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._told = self._given = 0
        self._takes = 0
        """Odd while some are being taken."""

    def add(self, event: Event) -> None:
        # A stream that is to begin with a snapshot for the first time has it there.
        self._told += self._behind or not self._begins
        super().add(event)

    def take(self) -> list[Event]:
        self._takes += 1
        begins = self._begins or self._asked_to_begin
        taken = super().take()
        self._given += 0 if begins else len(taken)
        self._takes += 1
        return taken

    def check(self) -> None:
        """Each event was given, waits, or is counted as lost."""
        takes = self._takes
        known = len(self) + self._given + self.lost
        if takes % 2 or takes != self._takes or self._told <= known:
            return
        raise ContractViolation(
            "V3",
            None,
            f"{self._told} events for a reader, of which {self._given} were taken, {len(self)} "
            f"wait and {self.lost} are counted as lost",
        )


class MirroringRecorder(_Recorder):
    """A recorder whose events are compared with the tree (V1, V2)."""

    def __init__(self, *given: Any) -> None:
        self._untold: list[Event] = []
        self._mirror: Residency = {}
        super().__init__(*given)

    def open(self, limit: int, observer: Observe | None) -> EventStream:
        first = not self.streams
        stream = super().open(limit, observer)
        if first:
            self._untold = []
            self._mirror = residency(self.snapshot())
        return stream

    def _set_streams(self, streams: tuple[EventStream, ...]) -> None:
        super()._set_streams(streams)
        tell: Callable[[Event], object] = self._tell
        self._tell = partial(self._note, tell)

    def _note(self, tell: Callable[[Event], object], event: Event) -> None:
        self._untold.append(event)
        tell(event)

    def cleared(self, roots: Sequence[Node]) -> None:
        super().cleared(roots)
        if not self.tree.roots:
            self._untold = []
            self._mirror = {}

    def check(self) -> None:
        super().check()
        events, self._untold = self._untold, []
        apply(self._mirror, events)
        there = residency(self.snapshot())
        for place in sorted({*self._mirror, *there}, key=str):
            said, has = self._mirror.get(place, set()), there.get(place, set())
            if said != has:
                component, tier = place
                raise ContractViolation(
                    "V2",
                    component,
                    f"by the events {len(said - has)} pages are on {tier.value} that are not, and "
                    f"{len(has - said)} are not that are, of {len(has)}",
                )
        for stream in self.streams:
            assert isinstance(stream, CountedStream)
            stream.check()


def residency(snapshot: Iterable[Any]) -> Residency:
    """The pages of a snapshot."""
    found: Residency = {}
    apply(found, snapshot)
    return found


def apply(mirror: Residency, events: Iterable[Any]) -> None:
    """Apply events; stored data must be new, and evicted data must exist (V1)."""
    for event in events:
        kind = type(event).__name__
        if kind not in ("Stored", "Moved", "Evicted"):
            continue
        there = mirror.setdefault((event.component, event.tier), set())
        pages = set(event.pages.hashes)
        wrong = pages - there if kind == "Evicted" else pages & there
        if wrong:
            raise ContractViolation(
                "V1",
                event.component,
                f"{kind} of {len(pages)} pages on {event.tier.value}: {len(wrong)} of them "
                f"{'are not there' if kind == 'Evicted' else 'are there already'}",
            )
        if kind == "Evicted":
            there -= pages
        else:
            there |= pages


def guarded_recorder(plain: Any) -> Any:
    """`plain`, the maker of events, with a mirror beside it and counted streams.

    Another package's recorder stays as it is: only its own `check` runs.
    """
    if not hasattr(plain, "new_stream"):
        return plain
    stream = type("EventStream", (CountedStream, plain.new_stream), {})
    return type("Recorder", (MirroringRecorder, plain), {"new_stream": stream})
