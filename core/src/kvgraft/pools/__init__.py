"""Memory: slots, device pools in layer order, host mirrors page first.

Plugins own the instances; these classes are their building blocks.

allocator     which slots of a pool are free
options       the options that give a payload its shape
component     the object a component package builds for one cache, and copies between its pools
device, host  a pool on a device, and its mirror in host memory
planes        one tensor's share of a slot
plan          memory that pools take, and memory that is available

Importing this package imports no torch; names that need it load it on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.pools.allocator import SLOT_BYTES, SlotAllocator

if TYPE_CHECKING:
    from kvgraft.pools.component import BuildContext, Component, PrivatePool, paged_pools
    from kvgraft.pools.device import DevicePool, slot_index
    from kvgraft.pools.host import SLAB_ALIGNMENT, HostMirror
    from kvgraft.pools.planes import PlaneSpec, attention_planes, plane_nbytes, torch_dtype

_LAZY = {
    name: module
    for module, names in {
        "component": ("BuildContext", "Component", "PrivatePool", "paged_pools"),
        "device": ("DevicePool", "slot_index"),
        "host": ("SLAB_ALIGNMENT", "HostMirror"),
        "planes": ("PlaneSpec", "attention_planes", "plane_nbytes", "torch_dtype"),
    }.items()
    for name in names
}

__all__ = [
    "SLAB_ALIGNMENT",
    "SLOT_BYTES",
    "BuildContext",
    "Component",
    "DevicePool",
    "HostMirror",
    "PlaneSpec",
    "PrivatePool",
    "SlotAllocator",
    "attention_planes",
    "paged_pools",
    "plane_nbytes",
    "slot_index",
    "torch_dtype",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
