"""A recorder of events that tells too little, or too much, or does not count what it loses."""

from __future__ import annotations

from typing import Any

from kvgraft_observe.events import EventStream, Recorder

from .defect import breaks
from .scene import LONGER, PROMPT, Patch, Scene

__all__: list[str] = []


def observed(limit: int = 1000) -> tuple[Scene, Any]:
    """A cache that is looked at as a whole after every call, and a reader of its events."""
    scene = Scene(full_check=1)
    scene.cached(PROMPT)
    stream = scene.cache.events(limit)
    stream.take()
    return scene, stream


@breaks("V1", "base")
def data_that_is_reported_twice(put: Patch) -> None:
    arrived = Recorder.arrived

    def twice(self: Recorder, *given: Any) -> None:
        arrived(self, *given)
        arrived(self, *given)

    scene, _ = observed()
    put.setattr(Recorder, "arrived", twice)
    scene.cached(LONGER)
    scene.close()


@breaks("V2", "base")
def evictions_that_are_not_reported(put: Patch) -> None:
    scene, _ = observed()
    put.setattr(Recorder, "leaving", lambda self, *given: None)
    scene.cache.evict("base", 1)
    scene.close()


@breaks("V3")
def events_that_are_lost_and_not_counted(put: Patch) -> None:
    def drop(self: EventStream, lost: int) -> None:
        self._events.clear()
        self._begins = self._behind = True

    scene, _ = observed(limit=1)
    put.setattr(EventStream, "_start_again", drop)
    scene.cached(LONGER)
    scene.close()


@breaks("V3")
def events_that_are_lost_behind_a_loss_and_not_counted(put: Patch) -> None:
    add = EventStream.add

    def forget(self: EventStream, event: Any) -> None:
        lost = self.lost
        add(self, event)
        if self._begins and lost:
            self.lost = lost

    scene, _ = observed(limit=1)
    put.setattr(EventStream, "add", forget)
    for first in range(200, 260, 20):
        scene.cached(range(first, first + 8))
    scene.close()
