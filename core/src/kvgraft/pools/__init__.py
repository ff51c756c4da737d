"""Memory: slots, device pools in layer order, host mirrors page first.

Plugins own the instances; these classes are their building blocks.
"""

from __future__ import annotations

from kvgraft.pools.attention import attention_planes, torch_dtype
from kvgraft.pools.component import BuildContext, Component, PrivatePool
from kvgraft.pools.device import DevicePool, slot_index
from kvgraft.pools.host import SLAB_ALIGNMENT, HostMirror
from kvgraft.pools.paged import paged_pools
from kvgraft.pools.planes import PlaneSpec, plane_nbytes
from kvgraft.slots import SLOT_BYTES, SlotAllocator

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
