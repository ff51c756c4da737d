"""An engine makes the copies of a pool all at once: all sources are read before any target (N3)."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from kvgraft import Cache, TokenKey
from kvgraft_scheduling import SlotCopies

N_SLOTS = 8


def slots(*numbers: int) -> bytes:
    return np.array(numbers, np.int32).tobytes()


@pytest.mark.rule("N3")
def test_gathered_before_they_are_scattered_they_give_the_bytes_of_one_after_the_other() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        copies = SlotCopies(SimpleNamespace())
        before = np.arange(N_SLOTS)
        wanted = before.copy()
        for _ in range(rng.randrange(1, 12)):
            source, target = rng.sample(range(N_SLOTS), 2)
            copies.add(slots(source), slots(target))
            wanted[target] = wanted[source]
        sources, targets = copies.take()
        found = before.copy()
        found[targets] = before[sources]
        assert found.tolist() == wanted.tolist()
        assert len(copies.take()[0]) == 0


@pytest.mark.rule("N3")
def test_states_that_an_engine_copies_before_each_pass_are_those_that_the_cache_names() -> None:
    """The second request resumes from a state that is kept in the same pass."""
    with Cache.open({"full": {}, "mamba": {"states": 16}}, page_size=4, device_tokens=256) as cache:
        (states,) = (each.component.device for each in cache.mounted if each.name == "mamba")
        copies = SlotCopies(states)

        def run(slot: int, n_tokens: int) -> None:
            """A pass of the model: the copies, then the state counts the tokens."""
            sources, targets = copies.take()
            for plane in states.planes:
                plane[targets.tolist()] = plane[sources.tolist()]
                plane[slot] += n_tokens

        for length in (14, 30):
            request = cache.begin(TokenKey(range(length)), chunk=12)
            assert cache.admit(request).admitted
            while request.computed < length:
                n_tokens = cache.next_chunk(request)
                assert cache.allocate(request, n_tokens)
                slot = cache.state_slot(request, "mamba")
                if request.fresh:
                    for plane in states.planes:
                        plane[slot] = 0
                run(slot, n_tokens)
                cache.computed(request, n_tokens)
            for plane in states.planes:
                assert (plane[slot] == length).all()
            cache.finish(request)
