"""A hand-over of 32K tokens to another process, beside one NIXL read of as many bytes.

    .venv/bin/python benchmarks/hand_over.py

Both use the same two agents in turn: a read of one piece, and a request from `accept` until its
engine can take it, with messages, digests and publication. The bar is 0.8 of the read's bandwidth.
Needs NIXL (`make test-nixl` installs it). UCX stays on the loopback device unless it is told
otherwise.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvgraft import Cache, ConfigError, TokenKey
from kvgraft_nixl import HandOver, NixlTransport, ReadState, Region

for _name, _value in (("UCX_NET_DEVICES", "lo"), ("UCX_TLS", "tcp"), ("NIXL_LOG_LEVEL", "ERROR")):
    os.environ.setdefault(_name, _value)

PAGE = 64
SETS: dict[str, dict[str, dict[str, Any]]] = {
    "full": {"full": {"n_layers": 4, "n_kv_heads": 2, "head_dim": 32}},
    "full + window of 4096 + states": {
        "full": {"n_layers": 4, "n_kv_heads": 2, "head_dim": 32},
        "swa": {"window": 4096, "n_layers": 4, "n_kv_heads": 2, "head_dim": 32},
        "mamba": {"states": 16, "n_layers": 4, "conv_dim": 64, "head_dim": 32, "state_dim": 16},
    },
}
BAR = 0.8


class Side:
    """One process: a cache, its hand-over, and memory for plain reads."""

    def __init__(self, components: str, n_tokens: int) -> None:
        self.cache = Cache.open(
            SETS[components], page_size=PAGE, device_tokens=n_tokens + 64 * PAGE, load=None
        )
        self.transport = NixlTransport()
        self.handed = HandOver(self.cache, self.transport, model="tiny", weights="1")

    def plain(self, nbytes: int) -> Region:
        """Registered memory of its own."""
        self.memory = np.ones(nbytes, np.uint8)
        region = Region(self.memory.ctypes.data, nbytes)
        self.transport.register([region])
        return region


def tokens_of(n_tokens: int, number: int) -> Any:
    return np.random.default_rng(number).integers(1, 30_000, n_tokens).astype(np.int32)


def sender(connection: Connection, components: str, n_tokens: int, nbytes: int) -> None:
    side = Side(components, n_tokens)
    connection.send((side.plain(nbytes), side.handed.address))
    random = np.random.default_rng(0)
    for each in side.cache.mounted:
        for plane in each.component.device.planes:
            rows = plane.view(-1).view(plane.dtype)
            rows.copy_(rows.new_tensor(random.standard_normal(rows.shape[0], np.float32)))
    while True:
        if not connection.poll(0.0002):
            side.cache.poll()
            side.handed.poll()
            continue
        number = connection.recv()
        if number is None:
            return
        while side.handed.n_offers:  # the last one's release is on its way
            side.handed.poll()
        key = TokenKey(tokens_of(n_tokens, number))
        request = side.cache.begin(key, chunk=2048)
        assert side.cache.admit(request).admitted
        while request.computed < request.prompt:
            n = side.cache.next_chunk(request)
            assert side.cache.allocate(request, n)
            side.cache.computed(request, n)
        offer = side.handed.offer(request)
        assert offer is not None
        side.cache.finish(request)
        connection.send(bytes(offer))


def raw(side: Side, peer: str, source: Region, target: Region) -> float:
    """Seconds of one read of one piece."""
    start = time.perf_counter()
    pieces = [np.array([[each.address, each.nbytes]], np.uint64) for each in (source, target)]
    read = side.transport.read(peer, *pieces)
    while read.state() is ReadState.MOVING:
        time.sleep(0.0002)
    assert read.state() is ReadState.DONE
    return time.perf_counter() - start


def handed_over(side: Side, offer: bytes, key: TokenKey) -> tuple[float, int]:
    """Seconds from `accept` until the request can be taken, and the bytes that were read."""
    start = time.perf_counter()
    arrival = side.handed.accept(offer, key, chunk=2048)
    while not arrival.ended:
        side.handed.poll()
        time.sleep(0.0002)
    seconds = time.perf_counter() - start
    request = arrival.take()
    side.cache.abort(request)
    side.cache.evict("full", side.cache.stats().components["full"].device.evictable)
    return seconds, arrival.nbytes


def measure(components: str, n_tokens: int, n_times: int) -> float:
    """Print one table; the share of the plain bandwidth."""
    print(f"\n{components}, {n_tokens:,} tokens, pages of {PAGE}\n")
    here = Side(components, n_tokens)
    nbytes = here.handed._receiving._memory.nbytes(0, n_tokens // PAGE)
    target = here.plain(nbytes)
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    other = context.Process(target=sender, args=(theirs, components, n_tokens, nbytes))
    other.start()
    theirs.close()
    source, address = connection.recv()
    peer = here.transport.connect(address)
    raw(here, peer, source, target)  # connects
    plain, handed = [], []
    for number in range(n_times):
        connection.send(number)
        offer = connection.recv()
        key = TokenKey([*tokens_of(n_tokens, number).tolist(), 7])
        gc.collect()
        plain.append(raw(here, peer, source, target))
        seconds, moved = handed_over(here, offer, key)
        assert moved == nbytes
        handed.append(seconds)
    connection.send(None)
    other.join()
    for name, times in (("one read of one piece", plain), ("hand-over, accept to take", handed)):
        middle = statistics.median(times)
        print(
            f"{name:32} {middle * 1e3:8.1f} ms ({min(times) * 1e3:.1f} to "
            f"{max(times) * 1e3:.1f})  {nbytes / middle / 1e6:8.1f} MB/s"
        )
    shares = [before / after for before, after in zip(plain, handed)]
    share = statistics.median(shares)
    print(f"{nbytes / 2**20:.1f} MiB; share of the read's bandwidth {share:.2f}, bar {BAR}")
    here.handed.close()
    here.cache.close()
    return share


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="3 times 4,096 tokens")
    given = parser.parse_args()
    n_tokens, n_times = (4096, 3) if given.quick else (given.tokens, given.times)
    try:
        shares = [measure(each, n_tokens, n_times) for each in SETS]
    except ConfigError as error:
        print(f"nothing is measured: {error}")
        return 0
    return 0 if given.quick or min(shares) >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
