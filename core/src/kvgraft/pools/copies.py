"""Copies between a device pool and a host mirror, plane by plane."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from kvgraft.devices.rows import PlaneCopy
from kvgraft.errors import TransferError
from kvgraft.pools.component import Component
from kvgraft.pools.device import slot_index
from kvgraft.types import Direction, TransferQuery

__all__ = ["PlaneCopy", "pair_planes", "run_copy"]


def pair_planes(component: Component, query: TransferQuery) -> list[PlaneCopy]:
    """Copies for every plane that pool and mirror both have, by layer and name.

    A component at home on HOST keeps more there than on DEVICE; planes without a partner are not
    copied. Pools without payload have nothing to copy.
    """
    mirror = component.host
    if mirror is None:
        raise TransferError("a component without a host mirror has nothing to transfer")
    if component.device.device.type == "meta":
        return []
    device_rows = slot_index(query.device_slots)
    host_rows = slot_index(query.host_slots)
    host_lanes = {(spec.layer, spec.name): lanes for spec, lanes in zip(mirror.specs, mirror.lanes)}
    copies = []
    for spec, lanes in zip(component.device.specs, component.device.lanes):
        partner = host_lanes.get((spec.layer, spec.name))
        if partner is None:
            continue
        if query.direction is Direction.BACKUP:
            copies.append(PlaneCopy(spec.layer, lanes, partner, device_rows, host_rows))
        else:
            copies.append(PlaneCopy(spec.layer, partner, lanes, host_rows, device_rows))
    copies.sort(key=attrgetter("layer"))
    return copies


def run_copy(copy: PlaneCopy) -> None:
    """Move the rows between CPU tensors; torch releases the interpreter lock while it works."""
    copy.target[copy.target_rows] = copy.source[copy.source_rows]


def layers_of(copies: Sequence[PlaneCopy]) -> list[int]:
    """The layers touched, in order, each once."""
    return sorted({copy.layer for copy in copies})
