"""One of several processes that serve prompts over one directory; run by `test_processes`.

python -m tests.storage_tier.serving_process URL SEED REQUESTS [FLUSHED]

Prompts overlap and every byte that is read is compared with the computed one. Now and then stored
data is made durable, and the last prompt added to the file FLUSHED, a line of JSON.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from kvgraft import TokenKey
from kvgraft_storage import Storage
from kvgraft_storage.settings import PrefetchPolicy

from ..serving.server import Server
from ..serving.setups import Setup, installed
from .shelf import settings, tier_of

__all__ = ["SETUP", "SIZES", "main", "prompt"]

SETUP: Setup = installed("full", "swa", "mamba")
SIZES = {"device_tokens": 64, "host_tokens": 128}
FAMILIES = 8


def prompt(chance: random.Random) -> list[int]:
    """One of a few families of prompts that share their beginnings."""
    family = 1000 * chance.randrange(FAMILIES)
    branch = family + 100 * chance.randrange(1, 3)
    return [*range(family, family + 12), *range(branch, branch + chance.choice([9, 17]))]


def main(url: str, seed: int, n_requests: int, flushed: Path | None = None) -> dict[str, int]:
    """Serve; returns counts of events, by name."""
    chance = random.Random(seed)
    given = settings(url=url, prefetch=PrefetchPolicy.WAIT_COMPLETE)
    cache = SETUP.open(storage=given, **SIZES)  # type: ignore[arg-type]
    server, tier, gained = Server(cache), tier_of(cache), 0
    for number in range(n_requests):
        prefetch = tier.prefetch(TokenKey(prompt(chance)))
        assert cache.drain()
        request = cache.begin(prefetch.key, prefetch=prefetch)
        gained += request.storage_tokens
        assert cache.admit(request).admitted
        server.load_back(request)
        server.prefill(request)
        cache.finish(request)
        if number % 8 == 7:
            cache.check_integrity()
            if flushed is not None:
                assert cache.drain()
                acknowledge(tier.client, prefetch.key, flushed)
    assert cache.drain()
    cache.check_integrity()
    assert tier.prefetching.nbytes_in_flight == tier.storing.nbytes_in_flight == 0
    cache.close()
    counts = {**tier.counts(), "gained": gained, "served": n_requests}
    if tier.client.last_error is not None:
        sys.stderr.write(f"{tier.client.last_error}\n")
    return counts


def acknowledge(storage: Storage, key: TokenKey, flushed: Path) -> None:
    """Make stored data durable and say so."""
    ticket = storage.flush()
    assert ticket.wait(20)
    if ticket.value is True:
        tokens = memoryview(bytes(key.data)).cast("i").tolist()
        with flushed.open("a") as file:
            file.write(json.dumps(tokens) + "\n")


if __name__ == "__main__":
    file = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    sys.stdout.write(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), file)))
