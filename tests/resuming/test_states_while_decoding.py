"""While a request decodes, its state is copied at multiples of an interval, not at every page."""

from __future__ import annotations

from typing import Any

import pytest

from kvgraft import Cache, Component, TokenKey, hookimpl
from kvgraft.config import parse_config
from kvgraft.packages.registry import load_plugin
from kvgraft.pools import BuildContext, DevicePool

from ..serving.components import StateOptions, StatePackage
from ..serving.setups import INSTALLED

PAGE, PROMPT = 4, 20


class CountingPool(DevicePool):
    """Counts its copies, one call or several slots."""

    n_copies = 0

    def copy_slots(self, source: bytes, target: bytes) -> None:
        super().copy_slots(source, target)
        self.n_copies += 1


class CountedStates(StatePackage):
    @hookimpl
    def create_component(self, options: StateOptions, context: BuildContext) -> Component:
        component = super().create_component(options, context)
        pool = component.device
        component.device = CountingPool(pool.specs, pool.capacity, context.device)
        return component


def opened(**settings: Any) -> Cache:
    package = load_plugin("counted", CountedStates("counted"))
    config = {
        "components": {"full": {}, "counted": {}},
        "page_size": PAGE,
        "device_tokens": 512,
        **settings,
    }
    return Cache(parse_config(config), plugins=[*INSTALLED.values(), package])


def decoded(cache: Cache, n_tokens: int) -> tuple[int, int]:
    """A request that decodes: the copies while it did, and the tokens that it left cached."""
    key = TokenKey(range(PROMPT))
    request = cache.begin(key, reserve=n_tokens)
    assert cache.admit(request).admitted
    while request.computed < PROMPT:
        n_new = cache.next_chunk(request)
        assert cache.allocate(request, n_new)
        cache.computed(request, n_new)
    pool = cache.mounted[-1].component.device
    assert isinstance(pool, CountingPool)
    key.extend([900])
    assert cache.allocate(request, 1)  # keeps the state at the prompt's end
    cache.computed(request, 1)
    before = pool.n_copies
    for token in range(n_tokens - 1):
        key.extend([901 + token])
        assert cache.allocate(request, 1)
        cache.computed(request, 1)
    copies = pool.n_copies - before
    cache.check_integrity()
    return copies, cache.finish(request)


@pytest.mark.parametrize(
    ("interval", "copies", "left"),
    [(0, 10, 60), (1, 10, 60), (8, 5, 56), (10, 4, 60), (16, 2, 48), (256, 0, 20)],
)
def test_a_decode_copies_its_state_once_an_interval_and_leaves_the_last_copy(
    interval: int, copies: int, left: int
) -> None:
    # 20 tokens of prompt and 42 decoded ones pass the pages 24, 28 .. 60
    assert decoded(opened(decode_interval_tokens=interval), 42) == (copies, left)


def test_by_default_a_decode_of_256_tokens_copies_its_state_once() -> None:
    assert decoded(opened(), 257) == (1, 256)
    assert decoded(opened(decode_interval_tokens=0), 257)[0] == 64


def test_a_request_that_ends_on_a_page_leaves_its_state_there_whatever_the_interval() -> None:
    assert decoded(opened(), 44) == (0, 64)


def test_beside_a_window_the_next_turn_resumes_at_the_last_page_of_the_answer() -> None:
    """The window's pages before an earlier state would be gone."""
    cache = opened(components={"full": {}, "swa": {"window": 2 * PAGE}, "counted": {}})
    assert decoded(cache, 42)[1] == 60


@pytest.mark.parametrize("page_size", [4, 16])
def test_an_end_whose_state_has_lost_its_window_leaves_no_node_without_data(page_size: int) -> None:
    """The last boundary lay inside a pass, so that the state kept is of the one before."""
    with Cache.open(
        {"swa": {"window": page_size, "device_tokens": 10 * page_size}, "mamba": {"states": 8}},
        page_size=page_size,
        device_tokens=64 * page_size,
        decode_interval_tokens=0,
    ) as cache:
        request = cache.begin(TokenKey(range(page_size)), reserve=4 * page_size)
        assert cache.admit(request).admitted
        for n_tokens in (page_size, *[1] * (2 * page_size - 1), 2):
            lacking = request.computed + n_tokens - request.key.n_tokens
            request.key.extend([1] * max(0, lacking))
            assert cache.allocate(request, n_tokens)
            cache.computed(request, n_tokens)
        (states,) = request.state_components
        assert (request.computed, states.tracked_page) == (3 * page_size + 1, 2)
        cache.finish(request)
        cache.check_integrity()


def test_the_window_of_a_decodes_last_state_stays_the_requests_own() -> None:
    """Given up a page earlier, it could be evicted while no later state is kept (G3)."""
    components = {"full": {}, "swa": {"window": 5}, "counted": {}}
    cache = opened(components=components, page_size=1, decode_interval_tokens=5, max_drafts=2)
    key = TokenKey(range(PROMPT))
    request = cache.begin(key, reserve=4)
    assert cache.admit(request).admitted
    for n_tokens in (PROMPT - 1, 1, 1, 1, 1):
        key.extend([900] * (request.computed + n_tokens - key.n_tokens))
        assert cache.allocate(request, n_tokens)
        cache.computed(request, n_tokens)
    assert min(cache.table(request, "swa")[PROMPT - 5 :]) >= 0
    cache.check_integrity()
    cache.close()
