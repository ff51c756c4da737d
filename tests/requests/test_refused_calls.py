"""A call that is refused leaves a cache as it was, whatever its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraft import Cache, ConfigError, LeaseError, TokenKey

pytestmark = pytest.mark.plain_build  # compiled classes have no attributes to be walked over

OPAQUE = (FunctionType, MethodType, ModuleType, type, torch.Tensor, torch.device)

SCRATCH = frozenset({"use_class", "use_retention", "stale"})
"""Of the call that is under way, or a row that is to be read again: no state."""


def state_of(cache: Cache) -> list[object]:
    """All that can be reached from a cache, in one order; objects by the place they came in."""
    places: dict[int, int] = {}
    held: list[object] = []
    found: list[object] = []
    left: list[object] = [cache]
    while left:
        each = left.pop()
        if isinstance(each, (int, float, str, bytes, bytearray, type(None))):
            found.append(bytes(each) if isinstance(each, bytearray) else each)
            continue
        if id(each) in places:
            found.append(("seen", places[id(each)]))
            continue
        places[id(each)] = len(places)
        held.append(each)  # so that no other object gets its id
        found.append(type(each).__qualname__)
        if isinstance(each, np.ndarray):
            found.append(each.tobytes())
        elif isinstance(each, dict):
            left += [part for item in each.items() for part in item]
        elif isinstance(each, (list, tuple)) or type(each).__name__ == "deque":
            left += list(each)  # type: ignore[call-overload]
        elif isinstance(each, (set, frozenset)):
            found.append(len(each))
        elif type(each).__module__.startswith("kvgraft") and not isinstance(each, OPAQUE):
            left += [part for item in attributes_of(each) for part in item]
    return found


def attributes_of(thing: object) -> Iterator[tuple[str, object]]:
    """Its attributes, of slots or not, by name."""
    names = {name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())}
    if "_newest_first" in names:  # runs that are joined when they are read
        names = {name for name in names if not name.startswith("_")} | {"runs"}
    for name in sorted({*names, *getattr(thing, "__dict__", {})} - SCRATCH - {"__weakref__"}):
        if hasattr(thing, name):
            yield name, getattr(thing, name)


class Scene:
    """A cache with requests in every stage; the keys of three are not those of their data."""

    def __init__(self, write_policy: str, n_computed: int) -> None:
        self.cache = Cache.open(
            {"full": {}, "mamba": {"states": 24}},
            page_size=2,
            device_tokens=96,
            host_tokens=64,
            write_policy=write_policy,
        )
        self.ended = self.admitted(range(100, 108))
        self.compute(self.ended, 8)
        self.cache.finish(self.ended)
        self.running = self.admitted(range(16), reserve=8)
        self.compute(self.running, n_computed)
        self.ahead = self.admitted(range(200, 208), reserve=8)
        self.compute(self.ahead, 8)
        assert self.cache.allocate(self.ahead, 4)
        self.cache.computed(self.ahead, 4)
        self.moved = self.admitted(range(300, 308))
        self.compute(self.moved, 8)
        self.moved.key.namespace = "other"
        self.cut = self.cache.begin(TokenKey(range(400, 408)), resume_at=4)
        assert self.cache.admit(self.cut).admitted
        self.compute(self.cut, 4)
        self.cut.key.truncate(2)
        self.cache.step([self.running], n_tokens=0)  # it has a row in the tables from here on
        self.leased = self.cache.begin(TokenKey(range(100, 109)))
        self.pin = self.cache.pin(TokenKey(range(100, 108)), owner="me")
        self.cache.unpin(self.pin)
        self.cache.drain()

    def admitted(self, tokens: range, reserve: int = 0) -> Any:
        request = self.cache.begin(TokenKey(tokens), reserve=reserve)
        assert self.cache.admit(request).admitted
        return request

    def compute(self, request: Any, n_tokens: int) -> None:
        end = request.computed + n_tokens
        while request.computed < end:
            n = min(self.cache.next_chunk(request), end - request.computed)
            assert self.cache.allocate(request, n)
            self.cache.computed(request, n)


CALLS: dict[str, Callable[[Cache, Scene], object]] = {
    "begin without tokens": lambda cache, s: cache.begin(TokenKey([])),
    "begin to reserve less than none": lambda cache, s: cache.begin(TokenKey([1]), reserve=-1),
    "begin with no chunk": lambda cache, s: cache.begin(TokenKey([1]), chunk=0),
    "begin with no hint": lambda cache, s: cache.begin(TokenKey([1]), hint="soon"),
    "begin with no priority": lambda cache, s: cache.begin(TokenKey([1]), priority=9),
    "begin with no time": lambda cache, s: cache.begin(TokenKey([1]), ttl_s=-1.0),
    "begin with no prefetch": lambda cache, s: cache.begin(
        TokenKey([1]),
        priority=1,
        prefetch=s,  # type: ignore[arg-type]
    ),
    "begin with a key that runs": lambda cache, s: cache.begin(s.running.key, ttl_s=1.0),
    "admit twice": lambda cache, s: cache.admit(s.running),
    "admit the ended": lambda cache, s: cache.admit(s.ended),
    "load back what waits": lambda cache, s: cache.load_back(s.leased),
    "restart the ended": lambda cache, s: cache.restart(s.ended),
    "restart in another namespace": lambda cache, s: cache.restart(s.moved),
    "chunk of less than none": lambda cache, s: cache.next_chunk(s.running, -1),
    "allocate less than none": lambda cache, s: cache.allocate(s.running, -1),
    "compute more than there are slots": lambda cache, s: cache.computed(s.running, 64),
    "compute without a fence": lambda cache, s: cache.computed(
        s.running,
        0,
        fence=3,  # type: ignore[arg-type]
    ),
    "checkpoint under a key that was cut": lambda cache, s: cache.checkpoint(s.cut),
    "checkpoint in another namespace": lambda cache, s: cache.checkpoint(s.moved),
    "finish without tokens": lambda cache, s: cache.finish(s.ahead, priority=2, hint="over"),
    "finish in another namespace": lambda cache, s: cache.finish(s.moved, ttl_s=3.0),
    "finish with no hint": lambda cache, s: cache.finish(s.running, hint="soon", priority=2),
    "finish with no priority": lambda cache, s: cache.finish(s.running, priority=2.5),  # type: ignore[arg-type]
    "finish the leased": lambda cache, s: cache.finish(s.leased, priority=2),
    "retract without tokens": lambda cache, s: cache.retract(s.ahead),
    "fork under a key that was cut": lambda cache, s: cache.fork(s.cut),
    "fork to reserve less than none": lambda cache, s: cache.fork(s.running, reserve=-1),
    "fork with no token": lambda cache, s: cache.fork(s.running, [-1]),
    "abort the ended": lambda cache, s: cache.abort(s.ended),
    "step one twice": lambda cache, s: cache.step([s.running, s.running]),
    "step the leased": lambda cache, s: cache.step([s.running, s.leased]),
    "step with no token": lambda cache, s: cache.step([s.running], [-1]),
    "step of more than there are slots": lambda cache, s: cache.step([s.running], n_computed=9),
    "evict less than none": lambda cache, s: cache.evict("full", -1),
    "evict of no component": lambda cache, s: cache.evict("fool", 1),
    "move memory without a budget": lambda cache, s: cache.move_memory("full", "mamba"),
    "pin for nobody": lambda cache, s: cache.pin(TokenKey(range(100, 108)), owner=""),
    "pin less than none": lambda cache, s: cache.pin(TokenKey([1]), owner="me", max_tokens=-1),
    "unpin twice": lambda cache, s: cache.unpin(s.pin),
    "clear no namespace": lambda cache, s: cache.clear([1]),
    "a tracer that is none": lambda cache, s: cache.add_tracer(3),
}


@settings(max_examples=6)
@given(write_policy=st.sampled_from(["write-back", "write-through"]), n_computed=st.integers(0, 16))
def test_a_refused_call_leaves_a_cache_as_it_was(write_policy: str, n_computed: int) -> None:
    scene = Scene(write_policy, n_computed)
    for name, call in CALLS.items():
        before = state_of(scene.cache)
        with pytest.raises((ConfigError, LeaseError)):
            call(scene.cache, scene)
        after = state_of(scene.cache)
        assert len(before) == len(after) > 500, name
        changed = [pair for pair in zip(before, after) if pair[0] != pair[1]]
        assert not changed, f"{name}: {changed[:3]}"
    scene.cache.close()
