"""One request served by a real cache, with every page and state stamped and compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvgraft import Cache, Kind, Request, Tier, TokenKey

__all__ = ["Served", "serve"]


class Served(NamedTuple):
    """A request's hits and its data left behind, in tokens.

    Attributes:
        anchor: the prefix it resumed from.
        device: how much of that was on DEVICE.
        cached: the tokens it left behind.
    """

    anchor: int
    device: int
    cached: int


def serve(cache: Cache, key: TokenKey, decode: Sequence[int] = ()) -> Served:
    """Begin, admit, load back, compute in chunks, checkpoint, decode, finish."""
    assert cache.drain()  # data being copied now cannot be evicted
    request = cache.begin(key, reserve=len(decode), chunk=8)
    decision = cache.admit(request)
    assert decision.admitted, decision
    cache.load_back(request)
    assert cache.drain()
    assert not request.load_failed
    anchor, device = request.anchor_tokens, request.device_tokens
    while request.computed < request.prompt:
        step = cache.next_chunk(request)
        assert step
        _step(cache, request, step)
        cache.checkpoint(request)
    for token in decode:
        key.extend([token])
        _step(cache, request, 1)
    return Served(anchor, device, cache.finish(request))


def _step(cache: Cache, request: Request, n_tokens: int) -> None:
    """Play the model: read the prefix, write the computed tokens."""
    assert cache.allocate(request, n_tokens)
    computed, size = request.computed, cache.config.page_size
    stamp = _stamp(request, computed + n_tokens)
    for each in cache.mounted:
        if each.plugin.declaration.home is not Tier.DEVICE:
            continue  # its own tests know where its payload is
        lanes = each.component.device.lanes
        if each.plugin.declaration.kind is Kind.STATE:
            slot = cache.state_slot(request, each.name)
            if computed:
                _expect(lanes, slot, _stamp(request, computed))
            _write(lanes, slot, stamp)
            continue
        table = cache.table(request, each.name).reshape(-1, each.component.slots_per_page)
        for page in range(computed // size):
            for slot in table[page].tolist():
                if slot >= 0:
                    _expect(lanes, slot, _stamp(request, (page + 1) * size))
        for page in range(computed // size, -(-(computed + n_tokens) // size)):
            full = min((page + 1) * size, request.key.n_tokens)
            for slot in table[page].tolist():
                _write(lanes, slot, _stamp(request, full))
    cache.computed(request, n_tokens)


def _stamp(request: Request, n_tokens: int) -> int:
    """A small number that depends on the whole prefix."""
    value = 1
    for token in request.key.tokens()[:n_tokens]:
        value = (31 * value + int(token)) % 97
    return value + 1


def _write(lanes: Sequence[torch.Tensor], slot: int, stamp: int) -> None:
    for plane in lanes:
        plane[slot] = stamp


def _expect(lanes: Sequence[torch.Tensor], slot: int, stamp: int) -> None:
    for plane in lanes:
        assert bool((plane[slot] == stamp).all()), f"slot {slot} holds {plane[slot]}, not {stamp}"
