"""One of several processes that store, fetch and evict in one directory; run by `test_sharing`.

python -m plugins.file.tests.sharing DIRECTORY SEED OPERATIONS
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path

from kvgraft_storage import Storage
from kvgraft_testing.storage.traffic import FINGERPRINT, addresses, fetched, settled, stored

from .store import open_store

PLACES = addresses(300)
NBYTES = 12_000
CAPACITY, SEGMENT = 2 << 20, 1 << 17


def main(directory: Path, seed: int, n: int) -> None:
    chance = random.Random(seed)
    counts: Counter[str] = Counter()
    storage = Storage(FINGERPRINT, open_store(directory, CAPACITY, SEGMENT, max_open_files=8))
    for number in range(n):
        first = chance.randrange(len(PLACES) - 8)
        places = PLACES[first : first + 8]
        what = chance.random()
        if what < 0.45:
            told = stored(storage, places, NBYTES)
        elif what < 0.9:
            told = fetched(storage, places, NBYTES)
        elif what < 0.98 or number < n // 2:
            told = settled(storage.remove(places[:2]))
        else:
            assert storage.ask("clear", lambda store: store.clear()).wait(20)
            told = []
        counts.update(status.value for status in told if status is not None)
    counts["errors"] = sum(
        value for name, value in storage.counters.snapshot().items() if name.endswith("errors")
    )
    if counts["errors"]:
        sys.stderr.write(f"{storage.last_error}\n")
    assert storage.close()
    sys.stdout.write(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
