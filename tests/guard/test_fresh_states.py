"""Under the guard a new state does not look like an initial one: an engine must write that."""

from __future__ import annotations

import pytest
import torch

from kvgraft import Cache, Request, TokenKey


def states_of(cache: Cache, request: Request) -> list[torch.Tensor]:
    (pool,) = [each.component.device for each in cache.mounted if each.name == "mamba"]
    slot = cache.state_slot(request, "mamba")
    return [plane[slot] for plane in pool.planes]


def prefill(cache: Cache, request: Request, value: float) -> None:
    while request.computed < request.prompt:
        n_tokens = cache.next_chunk(request)
        assert cache.allocate(request, n_tokens)
        for state in states_of(cache, request):
            state.fill_(value)
        cache.computed(request, n_tokens)


@pytest.mark.parametrize("guard", ["on", "sampled", "off"])
def test_only_a_request_that_starts_at_0_gets_a_state_that_shows(guard: str) -> None:
    with Cache.open(
        {"full": {}, "mamba": {"states": 8}}, page_size=4, device_tokens=256, guard=guard
    ) as cache:
        request = cache.begin(TokenKey(range(9)), reserve=8)
        assert cache.admit(request).admitted
        assert cache.allocate(request, cache.next_chunk(request))
        for state in states_of(cache, request):
            assert state.isnan().all() == (guard == "on")
        prefill(cache, request, 2.0)
        assert cache.allocate(request, 1)  # it goes on with what it has
        assert all((state == 2).all() for state in states_of(cache, request))
        cache.finish(request)
        again = cache.begin(TokenKey(range(9)))
        assert cache.admit(again).admitted
        assert again.anchor_tokens == 8
        assert cache.allocate(again, 1)
        assert all((state == 2).all() for state in states_of(cache, again))
