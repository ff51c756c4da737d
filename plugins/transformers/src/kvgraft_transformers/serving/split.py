"""Describes how a server's pools divide its memory, for the log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvgraft import Cache, Component
from kvgraft.sizes import format_nbytes
from kvgraft_transformers.memory import ModelMemory

__all__ = ["memory_split"]


def memory_split(memory: ModelMemory) -> Iterator[str]:
    """The model's kind and the bytes of all pools, then a line for each component's.

    A line has the component's layers, the bytes of a token or a state in them, and for each tier
    the tokens or states that fit, their bytes and their share.
    """
    cache, plans = memory.cache, memory.architecture.components
    device = {each.name: _device_nbytes(each.component) for each in cache.mounted}
    host = {each.name: _host_nbytes(each.component) for each in cache.mounted}
    on_host = f", {format_nbytes(sum(host.values()))} on the host" if any(host.values()) else ""
    yield (
        f"{memory.model.config.model_type}, {len(memory.layers)} layers: pools of "
        f"{format_nbytes(sum(device.values()))} on {cache.config.device}{on_host}"
    )
    for each in cache.mounted:
        layers = _ranges(plans[each.name]["layers"])
        parts = [f"  {each.name}: layers {layers}", f"{_of_one(cache, each.component)}"]
        for tier, nbytes in ((cache.config.device, device), ("host", host)):
            if nbytes[each.name]:
                share = nbytes[each.name] / sum(nbytes.values())
                room = _room(cache, each.component, on_host=nbytes is host)
                parts.append(f"{tier} {room}, {format_nbytes(nbytes[each.name])}, {share:.1%}")
        yield "; ".join(parts)


def _device_nbytes(component: Component) -> int:
    pool = component.device
    return pool.capacity * pool.slot_nbytes


def _host_nbytes(component: Component) -> int:
    mirror = component.host
    return 0 if mirror is None else mirror.allocator.capacity * mirror.slab_nbytes


def _of_one(cache: Cache, component: Component) -> str:
    """The bytes of one token, or of one state."""
    nbytes = component.device.slot_nbytes
    if component.reach.is_state:
        return f"{format_nbytes(nbytes)} a state"
    return f"{format_nbytes(nbytes * component.slots_per_page // cache.config.page_size)} a token"


def _room(cache: Cache, component: Component, *, on_host: bool) -> str:
    """The tokens or states of one tier's pool."""
    if on_host:
        assert component.host is not None
        slots = component.host.allocator.capacity
    else:
        slots = component.device.capacity
    if component.reach.is_state:
        return f"{slots:,} states"
    return f"{slots // component.slots_per_page * cache.config.page_size:,} tokens"


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3, 5` for `[0, 1, 2, 3, 5]`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
