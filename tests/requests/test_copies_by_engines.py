"""An engine that owns the memory copies the states."""

from __future__ import annotations

from kvgraft import Cache, TokenKey

COMPONENTS = {"full": {}, "mamba": {"states": 16}}


def test_an_engine_is_told_of_copies_in_order_and_the_pool_makes_none() -> None:
    with Cache.open(COMPONENTS, page_size=4, device_tokens=256) as cache:
        (states,) = (each.component.device for each in cache.mounted if each.name == "mamba")
        told: list[tuple[int, int]] = []
        states.on_copy = lambda *slots: told.append(
            (int.from_bytes(slots[0], "little"), int.from_bytes(slots[1], "little"))
        )
        live = []
        for _ in range(2):
            request = cache.begin(TokenKey(range(14)), chunk=12)
            assert cache.admit(request).admitted
            while request.computed < request.prompt:
                n_tokens = cache.next_chunk(request)
                assert cache.allocate(request, n_tokens)
                for plane in states.planes:
                    plane[cache.state_slot(request, "mamba")] = 1
                cache.computed(request, n_tokens)
            live.append(cache.state_slot(request, "mamba"))
            cache.finish(request)
        # kept behind page 3 of the first request; the second resumes from it
        (first, kept), (source, second) = told
        assert (first, second) == (live[0], live[1])
        assert kept == source != first
        for plane in states.planes:
            assert not plane[kept].any()
