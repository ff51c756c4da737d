"""How many functions of the core a checkpoint calls, and how many of another file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from kvgraft import Cache, TokenKey

from .sources import CORE

MOST = {
    "full": (52, 24),
    "full+swa+mamba": (90, 40),
}
"""Calls, and those of them that another file makes. The numbers may only fall."""

OPTIONS: dict[str, dict[str, Any]] = {"swa": {"window": 256}, "mamba": {"states": 64}}


def calls_of(call: Callable[[], object]) -> list[tuple[str, str]]:
    """The files of each function of the core that is called, and of its caller."""
    found: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        del arg
        path, above = frame.f_code.co_filename, frame.f_back
        if event == "call" and path.startswith(str(CORE)):
            found.append((path, "" if above is None else above.f_code.co_filename))

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
    assert sum(path != above for path, above in found) <= most_across
