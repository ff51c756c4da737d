"""Kills writers at work and looks at their files; run by `test_crash`.

python -m plugins.file.tests.crashing DIRECTORY ROUNDS SEED
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from kvgraft_storage import Status, Storage
from kvgraft_testing.storage.traffic import FINGERPRINT, addresses, fetched, settled, stored

from .store import open_store

BATCH = 6
BATCHES = 8
NBYTES = 21_000
CAPACITY, SEGMENT = 256 << 20, 1 << 18


def write(directory: Path, round_number: int, acknowledged: int) -> None:
    """Store and flush batch after batch, saying so after each flush."""
    storage = Storage(FINGERPRINT, open_store(directory, CAPACITY, SEGMENT))
    places = addresses(BATCH * BATCHES, first=round_number * BATCH * BATCHES)
    for batch in range(BATCHES):
        stored(storage, places[batch * BATCH : (batch + 1) * BATCH], NBYTES)
        if batch % 2:
            flushed = storage.flush()
            settled(flushed)
            assert flushed.value is True
            os.write(acknowledged, bytes([batch + 1]))
    signal.pause()


def main(directory: Path, rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    durable, partial, torn = 0, 0, 0
    for round_number in range(rounds):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            write(directory, round_number, writing)
        os.close(writing)
        n_flushed = 0
        for _ in range(chance.randrange(BATCHES // 2 + 1)):
            n_flushed = os.read(reading, 1)[0] * BATCH
        time.sleep(chance.random() * 0.004)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(reading, 1):
            n_flushed = more[0] * BATCH
        os.close(reading)
        storage = Storage(FINGERPRINT, open_store(directory, CAPACITY, SEGMENT))
        places = addresses(BATCH * BATCHES, first=round_number * BATCH * BATCHES)
        told = fetched(storage, places, NBYTES)
        lost = [number for number in range(n_flushed) if told[number] is not Status.OK]
        assert not lost, f"round {round_number}: acknowledged as durable and not there: {lost}"
        durable += n_flushed
        partial += sum(status is Status.OK for status in told[n_flushed:])
        torn += sum(status is Status.CORRUPT for status in told)
        storage.close()
    sys.stdout.write(json.dumps({"durable": durable, "not_flushed": partial, "torn": torn}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
