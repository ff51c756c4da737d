"""A process that uses a store beside others: `python -m kvgraft_testing.storage.stirring URL N`.

It repeatedly stores the first pages, `N` bytes each, and removes every second of them.
"""

from __future__ import annotations

import sys

from kvgraft_storage import Status, Storage, open_storage
from kvgraft_testing.storage.traffic import FINGERPRINT, addresses, settled, stored

__all__ = ["PLACES", "stir"]

PLACES = addresses(8)
"""Addresses that it stores and removes."""

ROUNDS = 10


def stir(url: str, nbytes: int) -> None:
    """Store and remove; all pages are stored at the end.

    Raises:
        AssertionError: the store refused a page, or could not be closed in time.
    """
    storage = Storage(FINGERPRINT, open_storage(url))
    for _ in range(ROUNDS):
        settled(storage.remove(PLACES[::2]))
        assert stored(storage, PLACES, nbytes) == [Status.OK] * len(PLACES)
    assert storage.close()


if __name__ == "__main__":
    stir(sys.argv[1], int(sys.argv[2]))
