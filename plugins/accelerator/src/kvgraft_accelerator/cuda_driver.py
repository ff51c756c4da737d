"""CUDA's calls that torch does not offer.

They are virtual memory (reserve, create, map, unmap), page-locking of existing memory, and one call
for many copies. Names and values are those of `cuda.h` from CUDA 11 on. The call for many copies
needs 12.8; later drivers keep its older form beside that of CUDA 13. ADR 0030 says why
`cuda-bindings` is not used.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

import numpy as np
import torch

from kvgraft_accelerator.fragments import Fragments

__all__ = ["CudaDriver"]

PINNED = 1
"""`CU_MEM_ALLOCATION_TYPE_PINNED`: memory of a device that stays where it is."""

ON_DEVICE = 1
"""`CU_MEM_LOCATION_TYPE_DEVICE`"""

READ_WRITE = 3
"""`CU_MEM_ACCESS_FLAGS_PROT_READWRITE`"""

LEAST = 0
"""`CU_MEM_ALLOC_GRANULARITY_MINIMUM`"""

PORTABLE = 1
"""`CU_MEMHOSTREGISTER_PORTABLE`: page-locked for every device of the process."""

IN_STREAM_ORDER = 1
"""`CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: sources are read when the stream gets there."""

BESIDE_COMPUTE = 1
"""`CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE`"""


class _Location(ctypes.Structure):
    """`CUmemLocation`."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    """`CUmemAllocationProp.allocFlags`."""

    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    )


class _Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """`CUmemcpyAttributes`; locations are only read for managed memory."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class _Bytes:
    """Memory of a device as other libraries exchange it (`__cuda_array_interface__`, version 3)."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class CudaDriver:
    """A CUDA driver's calls; a refusal is an `OSError` with the driver's reason.

    Addresses are numbers; memory is identified by its handle. All sizes are multiples of
    `block_nbytes`.

    Args:
        library: the driver's library, loaded.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        attributes = _CopyAttributes(source_order=IN_STREAM_ORDER, flags=BESIDE_COMPUTE)
        first, one = ctypes.c_size_t(0), ctypes.c_size_t(1)
        self._for_all_copies = ctypes.byref(attributes), ctypes.byref(first), one

    @staticmethod
    @cache
    def find() -> CudaDriver | None:
        """The driver of this machine; None without one, or where torch is built for another."""
        if torch.version.cuda is None or not sys.platform.startswith("linux"):
            return None
        try:
            return CudaDriver(ctypes.CDLL("libcuda.so.1"))
        except OSError:
            return None

    def block_nbytes(self, device: torch.device) -> int:
        """Bytes of the smallest piece of memory that can be mapped."""
        found = ctypes.c_size_t()
        properties = ctypes.byref(_properties(device))
        self._call("cuMemGetAllocationGranularity", ctypes.byref(found), properties, LEAST)
        return found.value

    def reserve(self, nbytes: int, device: torch.device) -> int:
        """Reserve address space; returns its first address."""
        self.synchronize(device)  # makes the device's context this thread's
        found = ctypes.c_uint64()
        zero = ctypes.c_uint64(0)
        size, alignment = ctypes.c_size_t(nbytes), ctypes.c_size_t(0)
        self._call("cuMemAddressReserve", ctypes.byref(found), size, alignment, zero, zero)
        return found.value

    def free_address(self, address: int, nbytes: int) -> None:
        """End a reservation in which nothing is mapped."""
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    def map(self, address: int, nbytes: int, device: torch.device) -> int:
        """Take memory and map it, readable and writable; its handle."""
        properties, handle = _properties(device), ctypes.c_uint64()
        start, size, zero = ctypes.c_uint64(address), ctypes.c_size_t(nbytes), ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), zero)
        try:
            self._call("cuMemMap", start, size, ctypes.c_size_t(0), handle, zero)
        except OSError:
            self._call("cuMemRelease", handle)
            raise
        access = _Access(properties.location, READ_WRITE)
        try:
            self._call("cuMemSetAccess", start, size, ctypes.byref(access), ctypes.c_size_t(1))
        except OSError:
            self.unmap(address, nbytes, handle.value)
            raise
        return handle.value

    def unmap(self, address: int, nbytes: int, handle: int) -> None:
        """Unmap what one call mapped, and give the memory back."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def synchronize(self, device: torch.device) -> None:
        """Wait for all submitted work of the device."""
        torch.cuda.synchronize(device)

    def tensor(
        self, address: int, nbytes: int, device: torch.device, owner: object
    ) -> torch.Tensor:
        """Uint8 `[nbytes]` at an address; `owner` lives as long as the tensor."""
        return torch.as_tensor(_Bytes(address, nbytes, owner), device=device)

    def version(self) -> int:
        """The newest CUDA version that the driver supports: 1000 * major + 10 * minor."""
        found = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(found))
        return found.value

    def lock(self, address: int, nbytes: int) -> None:
        """Page-lock memory of the host, so that copies to and from it are asynchronous."""
        size, flags = ctypes.c_size_t(nbytes), ctypes.c_uint(PORTABLE)
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), size, flags)

    def unlock(self, address: int) -> None:
        """Undo `lock`, before the memory is freed."""
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    @property
    def can_batch(self) -> bool:
        """Whether it has a call for many copies."""
        return self._has("cuMemcpyBatchAsync_v2") or self._has("cuMemcpyBatchAsync")

    def copy_batch(self, fragments: Fragments, stream: int) -> None:
        """Submit copies that run in any order, on a stream that is not the default one.

        The arrays are read before it returns.

        Args:
            fragments: at least one, none empty.
            stream: its handle.
        """
        arrays = [np.ascontiguousarray(each) for each in fragments]
        sources, targets, nbytes = (ctypes.c_void_p(each.ctypes.data) for each in arrays)
        count = ctypes.c_size_t(len(fragments.nbytes))
        last: tuple[object, ...] = (ctypes.c_void_p(stream),)
        name = "cuMemcpyBatchAsync_v2"
        if not self._has(name):
            name, last = "cuMemcpyBatchAsync", (ctypes.byref(ctypes.c_size_t()), *last)
        self._call(name, targets, sources, nbytes, count, *self._for_all_copies, *last)

    def _has(self, name: str) -> bool:
        return hasattr(self._library, name)

    def _call(self, name: str, *arguments: object) -> None:
        """Call the driver.

        Raises:
            OSError: it refuses.
        """
        error = getattr(self._library, name)(*arguments)
        if error:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(error, ctypes.byref(text))
            reason = text.value.decode() if text.value else f"error {error}"
            raise OSError(f"{name}: {reason}")


def _properties(device: torch.device) -> _Properties:
    index = torch.cuda.current_device() if str(device) == "cuda" else device.index
    return _Properties(type=PINNED, location=_Location(ON_DEVICE, index))
