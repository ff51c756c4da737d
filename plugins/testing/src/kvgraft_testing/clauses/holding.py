"""Objects that a component holds: pools, memory, and collections that its hooks may use."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from kvgraft.packages.dispatch import Mounted
from kvgraft.pools import Component
from kvgraft.reach import Reach
from kvgraft.types import DemandQuery, Direction, LockQuery, MatchView, TransferQuery

__all__ = ["collections_in", "memory", "owned", "use"]

DEEPEST = 6
"""Depth to which objects are followed from the component."""


def owned(component: Component) -> dict[int, str]:
    """Pools and allocators by `id`, with their names."""
    found: dict[int, str] = {id(component): "component"}
    for tier, pool in (("device", component.device), ("host", component.host)):
        if pool is not None:
            found[id(pool)] = f"{tier} pool"
            found[id(pool.allocator)] = f"slots of the {tier} pool"
    for private in component.private:
        found[id(private)] = f"pool {private.name!r}"
        found[id(private.allocator)] = f"slots of pool {private.name!r}"
    return found


def memory(component: Component) -> list[tuple[str, int, int]]:
    """Per plane of each pool its name and its half-open range of addresses."""
    found = []
    for tier, pool in (("device", component.device), ("host", component.host)):
        for spec, lanes in zip(pool.specs, pool.lanes) if pool is not None else ():
            if lanes.numel():
                start = lanes.data_ptr()
                steps = zip(lanes.shape, lanes.stride())
                last = sum((size - 1) * stride for size, stride in steps)
                end = start + (last + 1) * lanes.element_size()
                found.append((f"{tier} plane {spec.name!r} of layer {spec.layer}", start, end))
    return found


def collections_in(component: Component) -> dict[int, tuple[str, Any]]:
    """Collections and objects that the component holds besides its pools, by `id`, named."""
    found: dict[int, tuple[str, Any]] = {}
    pools = owned(component).keys() - {id(component)}
    stack: list[tuple[str, Any, int]] = [("component", component, 0)]
    while stack:
        name, value, depth = stack.pop()
        if depth > DEEPEST or id(value) in found or id(value) in pools or _is_plain(value):
            continue
        if value is not component and not isinstance(value, (tuple, frozenset)):
            found[id(value)] = (name, _contents(value))
        stack += [(each, held, depth + 1) for each, held in _inside(name, value)]
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, bytes, int, float, type, torch.Tensor, Reach)) or callable(value)


def _contents(value: Any) -> Any:
    """The compared content: a collection, or an object's attributes."""
    if isinstance(value, (dict, list, set, array, bytearray)):
        return value
    return vars(value) if hasattr(value, "__dict__") else value


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", held) for key, held in list(value.items()))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"{name}[{at}]", held) for at, held in enumerate(value))
    else:
        kinds = type(value).__mro__
        slots = chain.from_iterable(vars(kind).get("__slots__", ()) for kind in kinds)
        for attribute in (*slots, *getattr(value, "__dict__", ())):
            if hasattr(value, attribute):
                yield f"{name}.{attribute}", getattr(value, attribute)


def use(mounted: Mounted, page_size: int) -> None:
    """Call every hook as for a request and two transfers."""
    if mounted.finalize_match_result is not None:
        mounted.finalize_match_result(MatchView(3, 1, 4, 6, 2))
    if mounted.budget_contribution is not None:
        mounted.budget_contribution(DemandQuery(page_size, 0, 4, 12, 15, 2, 1))
    lock = mounted.lock_hooks
    if lock is not None:
        lock.acquire(LockQuery(2, page_size))
        segment = lock.acquire(LockQuery(4, page_size))
        if segment is not None:
            lock.release(segment)
    component = mounted.component
    hooks = mounted.transfer_hooks
    if component.host is not None and hooks is not None:
        device, host = component.device.allocator.allocate(2), component.host.allocator.allocate(2)
        if device is not None and host is not None:
            for direction in Direction:
                query = TransferQuery(direction, device, host)
                hooks.build(query)
                hooks.commit(query)
