"""Address space of a CUDA device that has memory mapped into it, block by block."""

from __future__ import annotations

import weakref
from contextlib import suppress

import torch

from kvgraft.errors import ConfigError
from kvgraft.sizes import format_nbytes
from kvgraft_accelerator.cuda_driver import CudaDriver

__all__ = ["MappedSpace"]


class MappedSpace:
    """Address space on a CUDA device; memory is mapped to the first blocks of each part.

    Memory reads as zeros when it is mapped. Before blocks are unmapped the device finishes all
    submitted work, so no queued kernel can read them. Mapped memory is freed with the last tensor
    of the space.

    Args:
        driver: of the device.
        nbytes: how much address space each part has; rounded up to whole blocks.
        device: where.
        n_parts: how many parts there are, one behind the other.

    Attributes:
        mapped_nbytes: how much of each part has memory now.
        slack_nbytes: most bytes that it takes beyond the requested ones.

    Raises:
        ConfigError: the device lacks address space.
    """

    def __init__(
        self, driver: CudaDriver, nbytes: int, device: torch.device, n_parts: int = 1
    ) -> None:
        self.device = device
        self.nbytes, self.n_parts = nbytes, n_parts
        self.mapped_nbytes = 0
        self._driver = driver
        self._block = driver.block_nbytes(device)
        self.slack_nbytes = n_parts * (self._block - 1)
        self._stride = self._rounded(max(1, nbytes))
        self._reserved = n_parts * self._stride
        try:
            self._address = driver.reserve(self._reserved, device)
        except OSError as error:
            raise ConfigError(
                f"pool: {format_nbytes(n_parts * nbytes)} of address space on {device}, {error}; "
                "lower the budget"
            ) from error
        self._handles: dict[int, int] = {}
        """Of the blocks that are mapped, by their place in the reservation."""
        self._end = weakref.finalize(
            self, _give_all_back, driver, device, self._address, self._reserved, self._handles
        )
        self._end.atexit = False  # the driver, and the memory with it, may be gone by then

    @staticmethod
    def is_there() -> bool:
        """Whether CUDA's driver is there and offers virtual memory."""
        return CudaDriver.find() is not None

    @classmethod
    def on(cls, device: torch.device, nbytes: int, n_parts: int) -> MappedSpace:
        """Address space on a device; needs `is_there`."""
        driver = CudaDriver.find()
        assert driver is not None, "see is_there"
        return cls(driver, nbytes, device, n_parts)

    def tensor(self) -> torch.Tensor:
        """All of it, uint8 `[n_parts, nbytes]`; only mapped bytes may be touched.

        Maps the first blocks if nothing is mapped, because torch asks the driver for the address's
            device.
        """
        if not self._handles:
            self.resize(1)
        memory = self._driver.tensor(self._address, self._reserved, self.device, self)
        return memory.view(self.n_parts, self._stride)[:, : self.nbytes]

    def resize(self, nbytes: int) -> None:
        """Map memory for the first `nbytes` bytes of every part, rounded up to blocks.

        Raises:
            MemoryError: the device does not have that much; the mapping stays as it was.
        """
        wanted, mapped = self._rounded(min(nbytes, self.nbytes)), self.mapped_nbytes
        if wanted > mapped:
            self._map(mapped, wanted)
        elif wanted < mapped:
            self._driver.synchronize(self.device)
            self._unmap(wanted)
        self.mapped_nbytes = wanted

    def _map(self, first: int, end: int) -> None:
        """Map memory block by block, so that each can be unmapped by itself."""
        parts = range(0, self._reserved, self._stride)
        for start in (part + at for part in parts for at in range(first, end, self._block)):
            try:
                handle = self._driver.map(self._address + start, self._block, self.device)
            except OSError as error:
                self._unmap(first)
                raise MemoryError(
                    f"pool: {format_nbytes(len(parts) * (end - first))} more on {self.device}, "
                    f"{error}"
                ) from error
            self._handles[start] = handle
        for part in parts:
            start = self._address + part + first
            self._driver.tensor(start, end - first, self.device, self).zero_()
        self._driver.synchronize(self.device)  # copies run on other streams

    def _unmap(self, end: int) -> None:
        """Unmap the blocks of every part from `end` on."""
        for start in [start for start in self._handles if start % self._stride >= end]:
            self._driver.unmap(self._address + start, self._block, self._handles.pop(start))

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._block) * self._block


def _give_all_back(
    driver: CudaDriver,
    device: torch.device,
    address: int,
    nbytes: int,
    handles: dict[int, int],
) -> None:
    with suppress(RuntimeError, OSError):  # a lost device: the process's end frees all of it
        driver.synchronize(device)
        block = driver.block_nbytes(device)
        for start, handle in handles.items():
            driver.unmap(address + start, block, handle)
        handles.clear()
        driver.free_address(address, nbytes)
