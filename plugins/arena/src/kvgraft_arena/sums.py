"""Sums that name a prefix: one number for each boundary, independent of how nodes are split.

A sum depends on the tokens before the boundary and their positions, so an evicted node and a prompt
that would have found it have the same one. It has 64 bits: if two prefixes collide, one hit too
many is counted. Policies have sums of their own (`kvgraft.policies.policy`), one for each 1,024
tokens of a key; these are of nodes, which end at any page.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["PageSums"]

UINT64 = np.uint64
GOLDEN = 0x9E3779B97F4A7C15
ODD = 0xD6E8FEB86659FD93


class PageSums:
    """Sums over pages of one size.

    Args:
        page_size: tokens per page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._weights = _mixed(np.arange(1, page_size + 1, dtype=UINT64)) | UINT64(1)

    def of_root(self, ident: int) -> int:
        """The sum of zero pages, below a root."""
        return int(_mixed(np.array([ident + 1], dtype=UINT64))[0])

    def after(
        self, before: int, tokens: bytes | bytearray, first: int, page: int, n_pages: int
    ) -> npt.NDArray[np.uint64]:
        """The sums at the ends of `n_pages` pages, uint64 `[n_pages]`.

        Args:
            before: the sum at their start.
            tokens: int32 bytes.
            first: the first page, counted from the start of `tokens`.
            page: its position in the sequence.
            n_pages: how many.
        """
        size = self._page_size
        offset, count = first * size * 4, n_pages * size
        numbers = np.frombuffer(tokens, np.uint32, count, offset).astype(UINT64)
        pages = _mixed((numbers.reshape(n_pages, size) * self._weights).sum(axis=1))
        places = _mixed(np.arange(page + 1, page + 1 + n_pages, dtype=UINT64)) | UINT64(1)
        sums: npt.NDArray[np.uint64] = np.cumsum(pages * places) + UINT64(before)
        return sums


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Each number with its bits mixed over all 64."""
    mixed: npt.NDArray[np.uint64] = numbers * UINT64(GOLDEN)
    mixed ^= mixed >> UINT64(32)
    mixed *= UINT64(ODD)
    mixed ^= mixed >> UINT64(29)
    return mixed
