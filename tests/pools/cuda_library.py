# ruff: noqa: N802 - the names are CUDA's
"""A stand-in for `libcuda.so`: its calls for virtual memory, over memory of the host.

It keeps the rules of CUDA's documentation and refuses what breaks them: whole blocks, reserved
addresses, nothing mapped twice, no access to what has no access set, nothing unmapped in part, no
reservation that ends while something is mapped.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch

from kvgraft_accelerator.cuda_driver import CudaDriver

__all__ = ["BLOCK", "SimulatedDriver", "SimulatedLibrary"]

BLOCK = 1 << 16
"""Bytes of a block; a GPU has 2 MiB."""

INVALID, OUT_OF_MEMORY = 1, 2
"""`CUDA_ERROR_INVALID_VALUE`, `CUDA_ERROR_OUT_OF_MEMORY`"""


class SimulatedLibrary:
    """A device with `capacity` bytes.

    Attributes:
        used: bytes of memory that was created and not released.
        reserved: bytes by address of every reservation.
        mapped: handle by address of every block.
        accessible: addresses of blocks that may be read and written.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.accessible: set[int] = set()
        self._memory: dict[int, mmap.mmap] = {}
        self._handles: dict[int, int] = {}
        self._next = 1

    def cuMemGetAllocationGranularity(self, found: Any, properties: Any, flag: int) -> int:
        if not _on_device(properties._obj) or flag != 0:
            return INVALID
        found._obj.value = BLOCK
        return 0

    def cuMemAddressReserve(self, found: Any, size: Any, align: Any, at: Any, flags: Any) -> int:
        if size.value % BLOCK or not size.value or align.value or at.value or flags.value:
            return INVALID
        if size.value > 1 << 40:
            return OUT_OF_MEMORY
        memory = mmap.mmap(-1, size.value, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.reserved[address], self._memory[address] = size.value, memory
        found._obj.value = address
        return 0

    def cuMemAddressFree(self, address: Any, size: Any) -> int:
        start = address.value
        inside = any(start <= block < start + size.value for block in self.mapped)
        if self.reserved.get(start) != size.value or inside:
            return INVALID
        del self.reserved[start]
        return 0

    def cuMemCreate(self, handle: Any, size: Any, properties: Any, flags: Any) -> int:
        if not _on_device(properties._obj) or size.value % BLOCK or flags.value:
            return INVALID
        if self.used + size.value > self.capacity:
            return OUT_OF_MEMORY
        self.used += size.value
        self._handles[self._next] = size.value
        handle._obj.value = self._next
        self._next += 1
        return 0

    def cuMemMap(self, address: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        start = address.value
        inside = any(at <= start < at + nbytes for at, nbytes in self.reserved.items())
        is_whole = self._handles.get(handle.value) == size.value == BLOCK
        if not inside or not is_whole or start in self.mapped or offset.value or flags.value:
            return INVALID
        self.mapped[start] = handle.value
        ctypes.memset(start, 0xAB, BLOCK)  # what another process left there
        return 0

    def cuMemSetAccess(self, address: Any, size: Any, access: Any, count: Any) -> int:
        wanted = access._obj
        if address.value not in self.mapped or size.value != BLOCK or count.value != 1:
            return INVALID
        if (wanted.location.type, wanted.location.id, wanted.flags) != (1, 0, 3):
            return INVALID
        self.accessible.add(address.value)
        return 0

    def cuMemUnmap(self, address: Any, size: Any) -> int:
        if address.value not in self.mapped or size.value != BLOCK:
            return INVALID
        ctypes.memset(address.value, 0xCD, BLOCK)  # it is somebody else's
        del self.mapped[address.value]
        self.accessible.discard(address.value)
        return 0

    def cuMemRelease(self, handle: Any) -> int:
        if handle.value not in self._handles or handle.value in self.mapped.values():
            return INVALID
        self.used -= self._handles.pop(handle.value)
        return 0

    def cuGetErrorString(self, error: int, text: Any) -> int:
        text._obj.value = b"out of memory" if error == OUT_OF_MEMORY else b"invalid argument"
        return 0


class SimulatedDriver(CudaDriver):
    """The calls of the real driver, to a stand-in; tensors are on the CPU.

    Attributes:
        library: the stand-in.
        waits: how often all work of the device was waited for.
    """

    def __init__(self, capacity: int) -> None:
        self.library = SimulatedLibrary(capacity)
        self.waits = 0
        super().__init__(self.library)  # type: ignore[arg-type]

    def synchronize(self, device: torch.device) -> None:
        self.waits += 1

    def tensor(
        self, address: int, nbytes: int, device: torch.device, owner: object
    ) -> torch.Tensor:
        memory = (ctypes.c_char * nbytes).from_address(address)
        memory.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)


def _on_device(properties: Any) -> bool:
    place = properties.location
    return (properties.type, properties.handle_types, place.type, place.id) == (1, 0, 1, 0)
