"""Cores with one defect each in the events that they tell of (V1 to V3)."""

from __future__ import annotations

from typing import Any

from kvgraft.tree.component import Cause, TreeComponent
from kvgraft.tree.node import Node
from kvgraft.types import Tier
from kvgraft_observe.events import EventStream, Recorder
from kvgraft_observe.events.pages import Pages, Run

from .cores import Patch, mutant

__all__: list[str] = []


@mutant("everything", "V2", "V1")
def an_eviction_is_not_reported(patch: Patch) -> None:
    leaving = Recorder.leaving

    def quiet(
        self: Recorder, node: Node, component: TreeComponent, tier: Tier, cause: Cause
    ) -> None:
        if cause != "demoted":
            leaving(self, node, component, tier, cause)

    patch.setattr(Recorder, "leaving", quiet)


@mutant("everything+window", "V1")
def an_arrival_is_reported_twice(patch: Patch) -> None:
    arrived = Recorder.arrived

    def twice(self: Recorder, *given: Any) -> None:
        arrived(self, *given)
        if given[2] is Tier.HOST:
            arrived(self, *given)

    patch.setattr(Recorder, "arrived", twice)


@mutant("everything", "V1")
def events_come_in_another_order(patch: Patch) -> None:
    take = EventStream.take
    patch.setattr(
        EventStream, "take", lambda self: sorted(take(self), key=lambda each: str(type(each)))
    )


@mutant("everything", "V1", "V2")
def data_leaves_the_wrong_tier(patch: Patch) -> None:
    leaving = Recorder.leaving

    def mistaken(
        self: Recorder, node: Node, component: TreeComponent, tier: Tier, cause: Cause
    ) -> None:
        leaving(self, node, component, Tier.DEVICE if tier is Tier.HOST else tier, cause)

    patch.setattr(Recorder, "leaving", mistaken)


@mutant("everything", "V2", "V1")
def namespaces_are_reported_as_one(patch: Patch) -> None:
    patch.setattr("kvgraft_observe.events.recording.Run", lambda _, *given: Run(None, *given))


@mutant("everything", "V2", "V1")
def a_split_leaves_the_pages_with_the_wrong_part(patch: Patch) -> None:
    split = Recorder.split

    def swapped(self: Recorder, upper: Node, node: Node) -> None:
        whole = self._pages[node]
        split(self, upper, node)
        self._pages[upper] = whole

    patch.setattr(Recorder, "split", swapped)


@mutant("everything+state", "V1", "V2")
def a_state_is_reported_for_all_pages_of_its_node(patch: Patch) -> None:
    part = Pages.part

    def whole(self: Pages, start: int, end: int) -> Pages:
        return self if end == self.end and end - start == 1 else part(self, start, end)

    patch.setattr(Pages, "part", whole)


@mutant("everything", "V3")
def an_observer_that_raises_takes_the_cache_down(patch: Patch) -> None:
    def frank(self: EventStream) -> None:
        if self._observer is not None and (events := self.take()):
            self._observer(events)

    patch.setattr(EventStream, "deliver", frank)


@mutant("everything", "V2", "V1", "V3")
def a_reader_that_lags_is_not_notified_of_its_loss(patch: Patch) -> None:
    def add(self: EventStream, event: Any) -> None:
        if not self._begins and len(self._events) < self.limit:
            self._events.append(event)

    patch.setattr(EventStream, "add", add)


@mutant("everything", "V3")
def a_failure_of_an_observer_is_not_counted(patch: Patch) -> None:
    deliver = EventStream.deliver

    def silent(self: EventStream) -> None:
        deliver(self)
        self.failures = 0

    patch.setattr(EventStream, "deliver", silent)
