"""A device that fails while copies are in flight: what a cache does then, on any device.

    python -m tests.devices.lost cuda FIXED | SHARED

makes the context of a CUDA device fail, so it is a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from kvgraft import Cache, Request, TokenKey, WritePolicy

__all__ = ["lose_amid_copies", "settings"]

FIRST, SECOND = range(100, 120), range(200, 220)

POOLS: dict[str, dict[str, Any]] = {
    "FIXED": {"device_tokens": 64},
    "SHARED": {"device_memory": "64MiB"},
}
"""A budget that pools share takes memory by CUDA's own calls."""


def settings(device: str, pools: str = "FIXED") -> dict[str, Any]:
    """Those of a small cache; a copy that never ends would be waited for beyond a test's time."""
    shape = {"n_layers": 2, "n_kv_heads": 1, "head_dim": 16}
    return {
        "components": {"full": shape, "swa": {**shape, "window": 8}},
        "page_size": 2,
        "host_tokens": 256,
        "write_policy": WritePolicy.WRITE_THROUGH,
        "load": None,
        "transfer_timeout_s": 1000.0,
        "device": device,
        **POOLS[pools],
    }


def lose_amid_copies(cache: Cache, stall: Callable[[], None], lose: Callable[[], None]) -> None:
    """Every copy ends as failed, with the device's name; calls go on, and the cache closes.

    Args:
        cache: opened with `settings`.
        stall: the device gets no further with what it is given from now on.
        lose: it fails.
    """
    device = cache.config.device
    cache.finish(computed(cache, FIRST))
    assert cache.drain()
    evict(cache)
    loaded = cache.begin(TokenKey([*FIRST, 1]))
    assert cache.admit(loaded).admitted
    assert cache.load_back(loaded)
    assert cache.drain()  # kernels of both directions are there
    cache.abort(loaded)
    evict(cache)
    stall()
    cache.finish(computed(cache, SECOND))
    request = cache.begin(TokenKey([*FIRST, 1]))
    assert cache.admit(request).admitted
    loads = cache.load_back(request)
    in_flight = cache.stats()
    assert in_flight.backups.in_flight
    assert in_flight.load_backs.in_flight == len(loads) > 0
    backups = [each.ticket for queue in cache.journal.queues.values() for each in queue]
    lose()
    assert cache.drain()
    assert not cache.journal.n_in_flight
    assert request.load_failed
    for ticket in backups:
        assert str(ticket.error).startswith(f"{device}:0, stream "), ticket.error
    cache.restart(request)
    assert cache.admit(request).admitted  # as a miss
    cache.abort(request)
    again = cache.begin(TokenKey([*FIRST, 1]))
    assert again.anchor_tokens > again.device_tokens
    assert cache.admit(again).admitted
    cache.load_back(again)
    cache.poll()
    assert again.load_failed
    cache.abort(again)
    evict(cache)
    cache.check_integrity()
    assert cache.stats().load_backs.failed == len(loads) + 1
    cache.close()


def evict(cache: Cache) -> None:
    """Evict all computed data from the device."""
    for each in cache.mounted:
        cache.evict(each.name, 10)


def computed(cache: Cache, tokens: range) -> Request:
    """A request whose prompt is computed: its pages are written, as the device gets there."""
    request = cache.begin(TokenKey(tokens), reserve=0)
    assert cache.admit(request).admitted
    cache.load_back(request)
    while request.computed < request.prompt:
        n_tokens = cache.next_chunk(request)
        assert cache.allocate(request, n_tokens)
        for each in cache.mounted:
            slot = int(cache.table(request, each.name)[-1])
            for plane in each.component.device.planes:
                plane[slot].fill_(1)
        cache.computed(request, n_tokens)
    return request


def fail_on_the_device() -> None:
    """A kernel fails an assertion, seconds from now: what comes behind it never runs."""
    torch.cuda._sleep(6_000_000_000)  # type: ignore[no-untyped-call]
    torch._assert_async(torch.zeros(1, dtype=torch.bool, device="cuda"))


def main(device: str, pools: str) -> None:
    """Lose a device of CUDA's."""
    there = torch.zeros(1, dtype=torch.bool, device=device)  # its kernels are loaded
    torch._assert_async(~there)
    torch.accelerator.synchronize()
    lose_amid_copies(Cache.open(**settings(device, pools)), fail_on_the_device, lambda: None)
    sys.stdout.write("closed\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
