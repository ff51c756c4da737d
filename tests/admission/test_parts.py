"""A request's part of every component: made by its lease, emptied at its end (I8, H8)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvgraft import Cache, TokenKey
from kvgraft.requests.components import RequestState
from kvgraft.requests.request import Request

COMPONENTS = {"full": {}, "swa": {"window": 64}, "mamba": {"states": 8}}


@pytest.fixture
def cache() -> Iterator[Cache]:
    with Cache.open(COMPONENTS, device_tokens=1024, page_size=16) as opened:
        yield opened


def running(cache: Cache) -> Request:
    """A request that holds pages and a state."""
    request = cache.begin(TokenKey(range(100)), reserve=8)
    assert cache.admit(request).admitted
    assert cache.allocate(request, cache.next_chunk(request))
    return request


def held(request: Request) -> list[bool]:
    """Per part, whether it holds slots or promises."""
    return [
        bool(
            part.account.promised or part.runs or (isinstance(part, RequestState) and part.owned())
        )
        for part in request.components
    ]


def test_a_request_has_one_part_per_component_in_the_order_of_the_tree(cache: Cache) -> None:
    request = cache.begin(TokenKey(range(100)))
    assert [part.component for part in request.components] == list(cache.tree.components)
    assert [part.component.name for part in request.state_components] == ["mamba"]
    assert [part.component.name for part in request.bounded_components] == ["swa"]
    assert held(request) == [False] * 3
    cache.abort(request)


def test_a_restart_makes_the_parts_anew_and_gives_back_those_it_had(cache: Cache) -> None:
    request = running(cache)
    old = request.components
    assert held(request) == [True] * 3
    cache.restart(request)
    assert not {id(part) for part in old} & {id(part) for part in request.components}
    assert held(request) == [False] * 3
    assert all(component.device.private == 0 for component in cache.tree.components)
    assert all(component.device.promised == 0 for component in cache.tree.components)
    assert cache.admit(request).admitted
    cache.abort(request)
    cache.check_integrity()


@pytest.mark.parametrize("end", [Cache.finish, Cache.retract, Cache.abort])
def test_the_parts_of_an_ended_request_are_empty(cache: Cache, end: object) -> None:
    request = running(cache)
    assert callable(end)
    end(cache, request)
    assert held(request) == [False] * 3
    assert all(component.device.private == 0 for component in cache.tree.components)
