"""Predicts a match from a snapshot and a key (M1 to M5, R8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvgraft.config import LoadModel
from kvgraft_testing.machine.brute_force import BruteForce, ModelComponent, Prefix
from kvgraft_testing.machine.observing import Snapshot

__all__ = ["Adopted", "Prediction", "Predictor", "adopted"]

Adopted = dict[str, dict[Prefix, tuple[int, ...] | None]]
"""Per component, pages and the slots they come in; None where the slot is not known."""


class Prediction(NamedTuple):
    """Boundaries in pages.

    Attributes:
        deepest: every component accepts it on DEVICE or HOST.
        device: every component accepts it on DEVICE.
        anchor: where a request resumes: `deepest`, or `device` where computing again is estimated
            faster.
        no_copy: the match is given up because a state cannot be copied (M8).
    """

    deepest: int
    device: int
    anchor: int
    no_copy: bool = False

    @property
    def recomputes(self) -> bool:
        """Whether a load is skipped (R8)."""
        return self.anchor < self.deepest


class Predictor:
    """Predicts matches.

    Args:
        model: the components.
        load: when a load is skipped.
        slot_nbytes: bytes of a DEVICE slot, per component.
    """

    def __init__(
        self, model: BruteForce, load: LoadModel | None, slot_nbytes: dict[str, int]
    ) -> None:
        self.model = model
        self.load = load
        self.slot_nbytes = slot_nbytes
        self.cannot_copy = any(each.is_state and not each.can_copy for each in model.components)

    def found(self, snapshot: Snapshot, sequence: Prefix, limit: int) -> Prediction:
        """The tree's match of a sequence; no load is skipped."""
        model = self.model
        on_device = {each.name: snapshot.on_device(each) for each in model.components}
        readable = {each.name: snapshot.readable(each) for each in model.components}
        deepest = model.deepest(readable, sequence, limit)
        return Prediction(deepest, model.deepest(on_device, sequence, deepest), deepest)

    def lease(
        self, snapshot: Snapshot, sequence: Prefix, limit: int, limits: Sequence[int] = ()
    ) -> Prediction:
        """The match of a request; components' hooks added `limits`, in pages."""
        if self.cannot_copy:
            deepest = self.found(snapshot, sequence, limit).deepest
            return Prediction(0, 0, 0, no_copy=deepest > 0)
        found = self.found(snapshot, sequence, min(limit, *limits) if limits else limit)
        if found.device < found.deepest and self._skips(snapshot, sequence, found):
            return found._replace(anchor=found.device)
        return found

    def _skips(self, snapshot: Snapshot, sequence: Prefix, found: Prediction) -> bool:
        """Whether computing is estimated faster than loading; not if a state is needed."""
        if self.load is None:
            return False
        nbytes = 0
        for component in self.model.components:
            held = snapshot.held[component.name]
            absent = [
                page
                for page in self.model.prefixes(component, sequence, found.deepest)
                if page not in held.device
            ]
            if component.is_state:
                if absent:
                    return False
                continue
            moved = sum(page not in held.arriving for page in absent)
            nbytes += moved * component.slots_per_page * self.slot_nbytes[component.name]
        load_s = self.load.latency_s + nbytes / self.load.bandwidth_bytes_s
        size = self.model.page_size
        tokens, rest = (
            (found.deepest - found.device) * size,
            len(sequence[1]) - found.deepest * size,
        )
        return self.load.compute_s(tokens, rest) < load_s

    def missing_pages(
        self, snapshot: Snapshot, sequence: Prefix, boundary: int, locked: dict[str, set[int]]
    ) -> dict[str, set[Prefix]]:
        """Per component, pages a load-back brings: not on DEVICE, nor on the way there.

        Pages that a component pins besides its reach come along where HOST has them.
        """
        missing = {}
        for component in self.model.components:
            held = snapshot.held[component.name]
            wanted = self.model.prefixes(component, sequence, boundary)
            for page in locked.get(component.name, ()):
                prefix = self.model.prefix(*sequence, page)
                if prefix in held.host:
                    wanted.append(prefix)
            missing[component.name] = {
                page for page in wanted if page not in held.device and page not in held.arriving
            }
        return missing

    def slots(self, pages: dict[str, set[Prefix]]) -> dict[str, int]:
        """Pages as slots, per component."""
        return {
            each.name: len(pages[each.name]) * each.slots_per_page for each in self.model.components
        }


def adopted(model: BruteForce, before: Snapshot, offered: Adopted) -> Adopted:
    """The part of an offer that the tree must take: empty cells of use (I1, I4, T4)."""
    result: Adopted = {}
    there = {name: set(held.device) for name, held in before.held.items()}

    def depth(component: ModelComponent) -> int:
        return len(model.depends_on(component))

    for component in sorted(model.components, key=depth):
        mine = {
            page: slots
            for page, slots in offered[component.name].items()
            if page not in there[component.name]
            and all(page in there[wider.name] for wider in model.depends_on(component))
        }
        result[component.name] = mine
        there[component.name] |= mine.keys()
    return result
