"""How many functions of the core a checkpoint and a request call, and how many of another file."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import pytest

from kvgraft import Cache, TokenKey

from ..counting import without_collections
from ..serving import life
from .sources import CORE

MOST = {
    "full": (52, 24),
    "full+swa+mamba": (90, 40),
}
"""Calls, and those of them that another file makes. The numbers may only fall."""

OPTIONS: dict[str, dict[str, Any]] = {"swa": {"window": 256}, "mamba": {"states": 64}}


class Call(NamedTuple):
    """A function of the core that is called.

    Attributes:
        path, above: its file, and its caller's.
        named: whether it is no comprehension, which newer Pythons do not call.
    """

    path: str
    above: str
    named: bool


def calls_of(call: Callable[[], object]) -> list[Call]:
    """The functions of the core that are called, one after the other."""
    found: list[Call] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        del arg
        path, above = frame.f_code.co_filename, frame.f_back
        if event == "call" and path.startswith(str(CORE)):
            named = not frame.f_code.co_name.startswith("<")
            found.append(Call(path, "" if above is None else above.f_code.co_filename, named))

    with without_collections():
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
    return found


@pytest.mark.parametrize("names", MOST)
def test_a_checkpoint_takes_few_calls(names: str) -> None:
    """The first of a new prompt, with two others before it that share nothing."""
    components = {name: OPTIONS.get(name, {}) for name in names.split("+")}
    sizes: dict[str, Any] = {"device_tokens": 65_536, "host_tokens": 65_536 if "+" in names else 0}
    with Cache.open(components, **sizes) as cache:
        for start in (0, 10, 20):
            request = cache.begin(TokenKey(range(start, start + 2048)), reserve=8)
            assert cache.admit(request).admitted
            n_tokens = cache.next_chunk(request)
            assert cache.allocate(request, n_tokens)
            cache.computed(request, n_tokens)
            found = calls_of(partial(cache.checkpoint, request))
            cache.finish(request)
            cache.drain()
    most, most_across = MOST[names]
    assert 0 < len(found) <= most
    assert sum(each.path != each.above for each in found) <= most_across


OF_A_REQUEST = {
    ("full", None): 184,
    ("full+swa+mamba", None): 576,
    # 987 and 791 alone; a few more where copies take longer, as beside other work
    ("full+swa+mamba", "write-through"): 1000,
    ("full+swa+mamba", "write-back"): 804,
}
"""Calls of functions that have a name. The numbers may only fall."""


@pytest.mark.parametrize(("names", "policy"), OF_A_REQUEST)
def test_a_request_takes_few_calls(names: str, policy: str | None) -> None:
    """On average, of conversations that go on and evict one another."""
    components = {name: OPTIONS.get(name, {}) for name in names.split("+")}
    on_host = {} if policy is None else {"host_tokens": 131_072, "write_policy": policy}
    sizes: dict[str, Any] = {"device_tokens": 65_536, "payload": False, "policy": "lru", **on_host}
    chosen = random.Random(1)
    conversations = [TokenKey([7] * 1024) for _ in range(24)]
    n_calls = n_requests = 0
    with Cache.open(components, **sizes) as cache:
        for number in range(140):
            key = chosen.choice(conversations)
            key.extend([chosen.randrange(30_000) for _ in range(512)])
            found = calls_of(partial(turn, cache, key))
            if number >= 40:
                n_calls += sum(each.named for each in found)
                n_requests += 1
    assert 0 < n_calls / n_requests <= OF_A_REQUEST[names, policy]


def turn(cache: Cache, key: TokenKey) -> None:
    life.serve(cache, key, reserve=16)
    cache.poll()
