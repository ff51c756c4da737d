"""The pools of both components; loaded when a cache is built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kvgraft import Direction, Everything, Reach, Span, StateAt, TransferQuery
from kvgraft.pools import (
    BuildContext,
    Component,
    DevicePool,
    HostMirror,
    PlaneSpec,
    PrivatePool,
    SlotAllocator,
    attention_planes,
    paged_pools,
    slot_index,
)
from kvgraft.transfers import PlaneCopy

if TYPE_CHECKING:
    from kvgraft_frozen.pages import PagesOptions
    from kvgraft_frozen.states import StatesOptions


@dataclass(slots=True, kw_only=True)
class PagesComponent(Component):
    """Keeps what its hooks were asked."""

    page_size: int
    scratch: int
    calls: Counter[str] = field(default_factory=Counter)
    held: list[list[Span]] = field(default_factory=list)
    moving: int = 0


def build_pages(options: PagesOptions, context: BuildContext) -> PagesComponent:
    planes = attention_planes(options, context.page_size)
    device, host = paged_pools(options, context, planes)
    scratch = PrivatePool("scratch", SlotAllocator(4 * options.scratch))
    return PagesComponent(
        Reach(Everything()),
        device,
        host,
        1,
        (scratch,),
        page_size=context.page_size,
        scratch=options.scratch,
    )


def copies(component: PagesComponent, query: TransferQuery) -> Sequence[PlaneCopy]:
    """Every plane of a page, layer by layer."""
    assert component.host is not None
    device_rows, host_rows = slot_index(query.device_slots), slot_index(query.host_slots)
    made = []
    for spec, device, host in zip(
        component.device.specs, component.device.lanes, component.host.lanes
    ):
        if query.direction is Direction.BACKUP:
            made.append(PlaneCopy(spec.layer, device, host, device_rows, host_rows))
        else:
            made.append(PlaneCopy(spec.layer, host, device, host_rows, device_rows))
    return made


def build_states(options: StatesOptions, context: BuildContext) -> Component:
    planes = [
        PlaneSpec(layer=layer, name="state", shape=(options.width,), dtype=torch.float32)
        for layer in options.layer_numbers
    ]
    device = DevicePool(planes, options.states, context.device)
    host = HostMirror(planes, options.states, pin=context.pin_host) if context.host_tokens else None
    return Component(reach=Reach(StateAt()), device=device, host=host)
