"""The reference's table of calls by stage agrees with the cache."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from kvgraft import Cache, LeaseError, Request, TokenKey

from ..commands import ROOT

ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \| \S", re.MULTILINE)
STAGES = ("LEASED", "ADMITTED", "CLOSED")
TABLE = ROW.findall((ROOT / "docs" / "reference" / "requests.md").read_text(encoding="utf-8"))
ALLOWED = {name: dict(zip(STAGES, cells)) for name, *cells in TABLE}

ARGUMENTS = {
    **dict.fromkeys(("allocate", "computed"), (0,)),
    **dict.fromkeys(("table", "private_slots"), ("full",)),
    "host_table": ("hisparse",),
    "state_slot": ("mamba",),
}


def cache_for(call: str) -> Cache:
    """A cache that has the component that a call asks for."""
    components: dict[str, dict[str, Any]] = {"full": {}, "mamba": {}}
    if call == "host_table":
        components = {"hisparse": {"hot_tokens": 64}}
    return Cache.open(components, device_tokens=1024, host_tokens=1024)


def in_stage(cache: Cache, stage: str) -> Request:
    request = cache.begin(TokenKey(range(100)))
    if stage == "CLOSED":
        cache.abort(request)
    if stage == "ADMITTED":
        assert cache.admit(request).admitted
        assert cache.allocate(request, 10)
    assert request.stage.name == stage
    return request


def test_every_call_with_a_request_is_in_the_table() -> None:
    calls = {
        name
        for name, call in inspect.getmembers(Cache, inspect.isfunction)
        if not name.startswith("_")
        and {"request", "awaited"} & {*inspect.signature(call).parameters}
    }
    assert {*ALLOWED} == calls


@pytest.mark.one_in(3)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("call", ALLOWED)
def test_a_call_is_allowed_in_the_stages_of_the_table(call: str, stage: str) -> None:
    with cache_for(call) as cache:
        request = in_stage(cache, stage)

        def made() -> None:
            method: Callable[..., Any] = getattr(cache, call)
            answer = method(request, *ARGUMENTS.get(call, ()))
            if inspect.iscoroutine(answer):
                asyncio.run(answer)

        if ALLOWED[call][stage] == "yes":
            made()
        else:
            assert ALLOWED[call][stage] == "`LeaseError`"
            with pytest.raises(LeaseError, match=f"request is {request.stage.value}"):
                made()
            assert request.stage.name == stage
        cache.check_integrity()
