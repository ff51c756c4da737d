"""Host memory that CUDA page-locks in place.

Torch's allocator for page-locked memory takes powers of two: up to twice the requested size. Huge
pages are used if the system has them, because they are locked faster.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from contextlib import suppress

import torch

from kvgraft_accelerator.cuda_driver import CudaDriver

__all__ = ["page_locked"]


def page_locked(driver: CudaDriver, nbytes: int) -> torch.Tensor:
    """Zeroed page-locked memory, uint8 `[nbytes]`; it is unlocked with its last tensor.

    Raises:
        MemoryError: the system has not that much, or CUDA does not lock it.
    """
    try:
        memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        owner = _Locked(driver, memory)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{nbytes} page-locked bytes of the host: {error}") from error
    found = (ctypes.c_char * max(1, nbytes)).from_address(owner.address)
    found.owner = owner  # type: ignore[attr-defined]
    return torch.frombuffer(found, dtype=torch.uint8)[:nbytes]


class _Locked:
    """Page-locked memory; it is unlocked when it is freed.

    Args:
        driver: locks it.
        memory: whole pages.

    Attributes:
        address: of the first byte.
    """

    def __init__(self, driver: CudaDriver, memory: mmap.mmap) -> None:
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        driver.lock(self.address, len(memory))
        # the arguments keep the memory until it is unlocked
        end = weakref.finalize(self, _unlock, driver, self.address, memory)
        end.atexit = False  # the driver may be gone by then, and the memory with it


def _unlock(driver: CudaDriver, address: int, memory: mmap.mmap) -> None:
    del memory
    with suppress(OSError):  # a lost device: the lock ends with the process
        driver.unlock(address)
