"""The store as the tier's parts use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvgraft_storage import Address, Completions, Storage

__all__ = ["StoreLink"]


class StoreLink(NamedTuple):
    """One store, shared by the parts of a tier.

    Attributes:
        storage: the store under supervision.
        done: queue of ended tickets of all parts.
        address: gives the address of a vLLM key.
        clock: monotonic, in seconds.
    """

    storage: Storage
    done: Completions
    address: Callable[[bytes], Address]
    clock: Callable[[], float]

    def addresses(self, keys: Iterable[bytes]) -> list[Address]:
        """The addresses of some keys."""
        return [self.address(key) for key in keys]
