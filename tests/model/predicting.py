"""What a match must find, from a snapshot and a key (M1 to M4, R8)."""

from __future__ import annotations

from typing import NamedTuple

from .brute_force import BruteForce, Prefix
from .observing import Snapshot
from .setups import Sizes

__all__ = ["Prediction", "adopted", "missing", "predict"]


class Prediction(NamedTuple):
    """Boundaries in pages.

    Attributes:
        deepest: every component accepts it on DEVICE or HOST.
        device: every component accepts it on DEVICE.
        anchor: `deepest`, or `device` where computing again is estimated faster.
    """

    deepest: int
    device: int
    anchor: int


def missing(
    model: BruteForce,
    snapshot: Snapshot,
    namespace: object,
    tokens: tuple[int, ...],
    boundary: int,
) -> dict[str, int]:
    """Per component, slots a load-back to a boundary takes: not on DEVICE, nor on the way there."""
    counts = {}
    for component in model.components:
        held = snapshot.held[component.name]
        pages = [
            page
            for page in model.prefixes(component, namespace, tokens, boundary)
            if page not in held.device and page not in held.arriving
        ]
        counts[component.name] = len(pages) * component.slots_per_page
    return counts


def predict(
    model: BruteForce,
    sizes: Sizes,
    slot_nbytes: dict[str, int],
    snapshot: Snapshot,
    sequence: tuple[object, tuple[int, ...]],
    limit: int,
) -> Prediction:
    """The anchors of a sequence."""
    namespace, tokens = sequence
    on_device = {each.name: snapshot.on_device(each) for each in model.components}
    readable = {each.name: snapshot.readable(each) for each in model.components}
    deepest = model.deepest(readable, namespace, tokens, limit)
    device = model.deepest(on_device, namespace, tokens, limit)
    anchor = deepest
    if sizes.load is not None and device < deepest:
        nbytes = 0
        state_missing = False
        for component in model.components:
            held = snapshot.held[component.name].device
            absent = [
                page
                for page in model.prefixes(component, namespace, tokens, deepest)
                if page not in held
            ]
            state_missing |= component.is_state and bool(absent)
            if not component.is_state:
                arriving = snapshot.held[component.name].arriving
                moved = sum(page not in arriving for page in absent)
                nbytes += moved * component.slots_per_page * slot_nbytes[component.name]
        load_s = sizes.load.latency_s + nbytes / sizes.load.bandwidth_bytes_s
        compute_s = (deepest - device) * model.page_size / sizes.load.prefill_tokens_s
        if not state_missing and compute_s < load_s:
            anchor = device
    return Prediction(deepest, device, anchor)


def adopted(
    model: BruteForce,
    before: Snapshot,
    offered: dict[str, dict[Prefix, tuple[int, ...] | None]],
) -> dict[str, dict[Prefix, tuple[int, ...] | None]]:
    """Of what a request offers, what the tree must take: empty cells of use (I1, I4, T4)."""
    result: dict[str, dict[Prefix, tuple[int, ...] | None]] = {}
    there = {name: set(held.device) for name, held in before.held.items()}
    for component in sorted(model.components, key=lambda each: len(model.strictly_wider(each))):
        mine = {
            page: slots
            for page, slots in offered[component.name].items()
            if page not in there[component.name]
            and all(page in there[wider.name] for wider in model.strictly_wider(component))
        }
        result[component.name] = mine
        there[component.name] |= mine.keys()
    return result
