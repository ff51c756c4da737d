"""The public calls in any order, with arguments that are right and wrong ones.

Counts are never negative, a refusal is one line of a `KvgraftError`, and the books balance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvgraft import Cache, KvgraftError, Request, TokenKey

from ..serving import life

numbers = st.sampled_from((-1, 0, 1, 1, 1, 2, 3, 4, 5, 9, 40))
picks = st.integers(0, 7)
lists = st.lists(picks, max_size=4)
calls = st.one_of(
    st.tuples(st.just("begin"), st.integers(0, 30), numbers, st.sampled_from((None, 1, 4, 0))),
    st.tuples(st.just("prefilled"), st.integers(1, 30), numbers),
    st.tuples(
        st.sampled_from(
            ("admit", "load_back", "restart", "checkpoint", "finish", "retract", "abort", "again")
        ),
        picks,
    ),
    st.tuples(
        st.sampled_from(("next_chunk", "allocate", "computed", "extend")),
        picks,
        numbers,
    ),
    st.tuples(st.just("step"), lists, st.booleans(), numbers, st.none() | numbers),
    st.tuples(st.just("passes"), st.integers(1, 9)),
    st.tuples(st.just("fork"), picks, numbers),
    st.tuples(st.just("read"), picks, st.sampled_from(("full", "swa", "mamba", "none"))),
    st.tuples(st.just("evict"), st.sampled_from(("full", "swa", "mamba")), numbers),
    st.tuples(st.just("truncate"), picks, numbers),
    st.tuples(st.just("pin"), picks, st.none() | numbers),
    st.tuples(st.sampled_from(("poll", "drain", "clear", "unpin"))),
)

SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"components": {"full": {}}},
    "all": {"components": {"full": {}, "swa": {"window": 6}, "mamba": {"states": 6}}},
    "all, HOST": {
        "components": {"full": {}, "swa": {"window": 6}, "mamba": {"states": 6}},
        "host_tokens": 96,
        "write_policy": "write-through",
    },
    "guarded": {
        "components": {"full": {}, "swa": {"window": 6}, "mamba": {"states": 6}},
        "guard": "on",
    },
}

AFTER: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("admit", "load_back", "restart", "checkpoint"), ()),
    **dict.fromkeys(("next_chunk", "allocate", "computed"), (1,)),
    "abort": (),
}
"""Calls behind `close`."""


class Player:
    """Makes calls as they were drawn."""

    def __init__(self, **given: Any) -> None:
        components = given.pop("components")
        common = {"page_size": 4, "device_tokens": 96, "payload": False, "max_tokens": 64}
        self.cache = Cache.open(components, **{**common, **given})
        self.requests: list[Request] = []

    def request(self, pick: int) -> Request:
        """One of the last requests, ended ones among them."""
        recent = self.requests[-8:]
        return recent[pick % len(recent)]

    def play(self, name: str, *given: Any) -> object:  # noqa: PLR0911 - one a call
        if name in ("begin", "prefilled", "poll", "drain", "clear", "unpin", "evict", "passes"):
            return self._of_cache(name, *given)
        if not self.requests:
            return None
        if name == "step":
            return self._step(*given)
        request, rest = self.request(given[0]), given[1:]
        if name in ("extend", "truncate"):
            given = ([3] * max(0, rest[0] % 5),) if name == "extend" else rest
            getattr(request.key, name)(*given)
            return None
        if name == "again":
            return self._began(self.cache.begin(copy(request.key)))
        if name == "fork":
            return self._began(self.cache.fork(request, [5] * (rest[0] % 2), reserve=rest[0]))
        if name == "pin":
            return self.cache.pin(request.key, owner="o", max_tokens=rest[0]).tokens
        if name == "read":
            calls: list[Callable[..., object]] = [
                self.cache.table,
                self.cache.host_table,
                self.cache.state_slot,
                self.cache.private_slots,
            ]
            for call in calls:
                self.refusable(call, request, *rest)
            return None
        found: object = getattr(self.cache, name)(request, *rest)
        return found

    def _began(self, request: Request) -> object:
        self.requests.append(request)
        return request.anchor_tokens

    def _of_cache(self, name: str, *given: Any) -> object:
        if name == "begin":
            length, reserve, chunk = given
            key = TokenKey([1 + at // 9 % 2 for at in range(length)])
            return self._began(self.cache.begin(key, reserve=reserve, chunk=chunk))
        if name == "prefilled":
            self._of_cache("begin", *given, None)
            request = self.requests[-1]
            if not self.cache.admit(request).admitted:
                return None
            self.cache.load_back(request)
            self.cache.drain()
            life.prefill(self.cache, request)
            return None
        if name == "passes":
            return self._passes(*given)
        if name == "unpin":
            return self.cache.unpin_all("o")
        if name == "evict":
            return self.cache.evict(*given)
        found: object = getattr(self.cache, name)()
        return found

    def _passes(self, n: int) -> object:
        """Passes of those that can decode."""
        ready = [each for each in self.requests[-8:] if each.stage.name == "ADMITTED"]
        ready = [each for each in ready if each.prompt <= each.computed == each.key.n_tokens]
        for at in range(n):
            ready = self.cache.step(ready, [at] * len(ready)).requests
        return self.cache.step(ready, n_tokens=0).seq_lens.tolist()

    def _step(self, chosen: list[int], named: bool, n: int, n_computed: int | None) -> object:  # noqa: FBT001
        requests = [self.request(pick) for pick in chosen]
        tokens = [6] * len(requests) if named else None
        step = self.cache.step(requests, tokens, n_tokens=n, n_computed=n_computed)
        return step.seq_lens.tolist()

    def refusable(self, call: Callable[..., object], *given: Any) -> None:
        """Make a call; a refusal is one line that says something, counts are not negative."""
        try:
            found = call(*given)
        except KvgraftError as error:
            said = str(error)
            assert said.strip()
            assert "\n" not in said
            return
        assert all(number >= 0 for number in counts_in(found)), (given, found)

    def check(self) -> None:
        self.cache.check_integrity()
        assert all(number >= 0 for number in counts_in(self.cache.stats()))
        for request in self.requests:
            for name in ("computed", "allocated", "anchor_tokens", "device_tokens", "cached"):
                assert getattr(request, name) >= 0
            assert request.computed <= request.allocated * 4 or request.stage.name == "CLOSED"


def counts_in(value: object) -> Iterator[float]:
    """The numbers of a result, however deep."""
    if isinstance(value, (int, float)):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from counts_in(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from counts_in(getattr(value, field.name))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from counts_in(each)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=2 * settings().max_examples)
@given(program=st.lists(calls, min_size=10, max_size=40))
def test_calls_in_any_order_count_right_and_refuse_in_a_line(
    name: str, program: list[tuple[Any, ...]]
) -> None:
    player = Player(**SETTINGS[name])
    for drawn in program:
        player.refusable(player.play, *drawn)
        player.check()
    player.cache.close()
    for request in player.requests:
        for call, arguments in AFTER.items():
            player.refusable(getattr(player.cache, call), request, *arguments)
