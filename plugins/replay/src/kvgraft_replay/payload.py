"""Stamps: payloads that identify the prefix that a slot was computed for.

A replay runs no model, so it writes into each slot an identifier of its content: a digest of all
tokens up to the end of the page (or up to the state's boundary), spread over every plane of the
slot. Comparing every byte of a slot shows whether it still has the request's data after evictions,
load-backs, splits and copies.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import cached_property
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch

from kvgraft.pools import SLOT_BYTES, DevicePool, HostMirror, PlaneSpec

__all__ = ["STAMPS", "PageDigests", "Pool", "Verify", "matching_rows", "read_rows", "write_rows"]

Pool = DevicePool | HostMirror

STAMPS = "stamps 1"
"""Version of the payloads: raise it when they change, or stored ones would be reported as wrong."""

_MIX = np.uint64(0x9E3779B97F4A7C15)


class Verify(enum.Enum):
    """How much reused data is compared."""

    FULL = "full"
    SAMPLED = "sampled"
    OFF = "off"


class PageDigests:
    """Digests of every page-aligned prefix of one token sequence.

    Args:
        tokens: int32 `[n_tokens]`.
        page_size: tokens per page.
    """

    def __init__(self, tokens: npt.NDArray[np.int32], page_size: int) -> None:
        self.page_size = page_size
        self._tokens = tokens

    @cached_property
    def _digests(self) -> npt.NDArray[np.int64]:
        """Int64 `[n_pages]`; computed at first use."""
        tokens, page_size = self._tokens, self.page_size
        n_pages = -(-len(tokens) // page_size)
        if n_pages * page_size != len(tokens):
            rest = np.full(n_pages * page_size - len(tokens), -1, dtype=np.int32)
            tokens = np.concatenate([tokens, rest])
        weights = np.arange(1, page_size + 1, dtype=np.int64) * 0x5851F42D4C957F2D
        with np.errstate(over="ignore"):
            sums = (tokens.reshape(n_pages, page_size).astype(np.int64) * weights).sum(axis=1)
            mixed = sums.view(np.uint64)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * _MIX
            positions = np.arange(1, n_pages + 1, dtype=np.uint64) * _MIX
            return np.cumsum(mixed ^ positions, dtype=np.uint64).view(np.int64)

    def pages(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Stamps of pages `[start, end)`, int64."""
        return self._digests[start:end]

    def state(self, n_tokens: int) -> npt.NDArray[np.int64]:
        """The stamp of a state after `n_tokens` tokens, int64 `[1]`."""
        page, rest = divmod(n_tokens, self.page_size)
        base = self._digests[page - 1 : page] if page else np.zeros(1, dtype=np.int64)
        with np.errstate(over="ignore"):
            return np.asarray(base + np.int64(rest), dtype=np.int64)


def _pattern(stamps: npt.NDArray[np.int64], width: int, spec: PlaneSpec) -> torch.Tensor:
    """The expected rows of a plane for each stamp, int64 `[n, width]`.

    Planes are identified by layer and name, as in copies: pool and mirror may have different
        planes.
    """
    first = crc32(f"{spec.layer} {spec.name}".encode()) * 1_000_003
    lanes = np.arange(first, first + width, dtype=np.int64)
    with np.errstate(over="ignore"):
        return torch.from_numpy(stamps[:, None] + lanes[None, :])


def write_rows(pool: Pool, slots: npt.NDArray[np.int64], stamps: npt.NDArray[np.int64]) -> None:
    """Fill whole slots, in every plane, with their stamps' pattern."""
    rows = torch.from_numpy(slots)
    for spec, tensor in zip(pool.specs, pool.lanes):
        tensor[rows] = _pattern(stamps, tensor.shape[1], spec).to(tensor.dtype).to(tensor.device)


def matching_rows(pool: Pool, slots: npt.NDArray[np.int64], stamps: npt.NDArray[np.int64]) -> int:
    """The number of slots that hold their stamp's pattern in every plane."""
    rows = torch.from_numpy(slots)
    good = torch.ones(len(slots), dtype=torch.bool)
    for spec, tensor in zip(pool.specs, pool.lanes):
        want = _pattern(stamps, tensor.shape[1], spec).to(tensor.dtype)
        good &= (tensor[rows].cpu() == want).all(dim=1)
    return int(good.sum())


def read_rows(slots: bytes) -> npt.NDArray[np.int64]:
    """Slot bytes as an int64 index."""
    assert len(slots) % SLOT_BYTES == 0
    return np.frombuffer(slots, dtype=np.int32).astype(np.int64)


Sampler = Callable[[int], npt.NDArray[np.int64]]
"""Chooses the positions to verify among `n`."""
