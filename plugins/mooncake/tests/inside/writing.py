"""A process that stores and removes the first pages: `python writing.py URL NBYTES`."""

from __future__ import annotations

import sys

from scene import FINGERPRINT, addresses, settled, stored

from kvgraft.storage import Status, Storage, open_storage

ROUNDS = 10


def main(url: str, nbytes: int) -> None:
    storage = Storage(FINGERPRINT, open_storage(url))
    places = addresses(8)
    for _ in range(ROUNDS):
        settled(storage.remove(places[::2]))
        assert stored(storage, places, nbytes) == [Status.OK] * 8
    assert storage.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
