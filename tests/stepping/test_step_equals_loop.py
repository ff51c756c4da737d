"""A step is equal to a loop over the requests, in everything that can be seen."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvgraft import BudgetError, Cache, TokenKey
from tests.stepping.twins import Twins

STEMS = ((1,) * 9 + (2,) * 9, (1,) * 9 + (3,) * 9, (4, 5) * 9)

SETS: dict[str, dict[str, dict[str, Any]]] = {
    "full": {"full": {}},
    "full + swa": {"full": {}, "swa": {"window": 6}},
    "swa": {"swa": {"window": 5}},
    "full + mamba": {"full": {}, "mamba": {"states": 14}},
    "full + swa + mamba": {"full": {}, "swa": {"window": 7}, "mamba": {"states": 14}},
    "swa + mamba": {"swa": {"window": 9}, "mamba": {"states": 14}},
    "hisparse": {"hisparse": {"n_layers": 1, "hot_tokens": 8, "max_running": 8}},
}

SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {"payload": False},
    "copied": {"payload": True, "decode_interval_tokens": 1},
    "kept at intervals": {"payload": True, "decode_interval_tokens": 8},
    "with HOST": {"payload": False, "host_tokens": 160},
    "written through": {"payload": False, "host_tokens": 96, "write_policy": "write-through"},
    "guarded": {"payload": False, "guard": "on"},
    "guarded now and then": {"payload": False, "guard": "sampled", "guard_sample": 0.2},
    "tenants": {
        "payload": False,
        "tenants": {"a": {"namespaces": ["a"], "guarantee": 0.25}},
    },
}

begins = st.tuples(
    st.just("begin"),
    st.sampled_from(STEMS),
    st.integers(1, 18),
    st.integers(0, 30),
    st.sampled_from((None, 3, 8)),
    st.sampled_from((None, None, "a")),  # namespace
)
steps = st.tuples(
    st.just("step"),
    st.integers(0, 2**6 - 1),  # which
    st.sampled_from((1, 1, 1, 1, 2, 3, 0)),
    st.booleans(),  # rejects
    st.sampled_from((True, True, True, False)),  # named
)
passes = st.tuples(st.just("passes"), st.integers(1, 12))
calls = st.tuples(
    st.sampled_from(("checkpoint", "finish", "retract", "abort", "note", "restart")),
    st.integers(0, 5),
)
pins = st.tuples(st.just("pin"), st.sampled_from(STEMS), st.integers(1, 18))
alone = st.tuples(st.sampled_from(("poll", "unpin", "clear")))
moves = st.one_of(begins, begins, steps, passes, passes, calls, calls, pins, alone)
programs = st.lists(moves, min_size=4, max_size=24)


MORE = 4
"""Examples of a component set, where others have one: each is of one of the settings."""


@pytest.mark.one_in(9)
@pytest.mark.parametrize("components", SETS)
@settings(max_examples=MORE * settings().max_examples)
@given(
    number=st.integers(0, len(SETTINGS) - 1), page_size=st.sampled_from((1, 4)), program=programs
)
def test_a_step_is_equal_to_a_loop(
    components: str, number: int, page_size: int, program: list[tuple[Any, ...]]
) -> None:
    fitting = [each for each in SETTINGS.values() if _fits(components, each)]
    chosen = fitting[number % len(fitting)]
    twins = Twins(SETS[components], page_size=page_size, device_tokens=96, **chosen)
    for call in program:
        play(twins, call)
        twins.compare()
    twins.close()


def _fits(components: str, setting: dict[str, Any]) -> bool:
    """Whether the set can have it: `hisparse` is at home on HOST."""
    return components != "hisparse" or "host_tokens" in setting


@pytest.mark.one_in(4)
@pytest.mark.parametrize("page_size", [1, 12, 16, 64])
@pytest.mark.parametrize("components", ["full + swa", "full + swa + mamba"])
def test_long_decodes_leave_the_same_behind(components: str, page_size: int) -> None:
    """Windows' pages are handed over once in 64 tokens; also where others split nodes meanwhile."""
    twins = Twins(
        SETS[components], page_size=page_size, device_tokens=4096, max_requests=8, max_tokens=1024
    )
    stem = tuple(range(300))
    twins.begin(stem[:256], 300)
    twins.begin((*stem[:200], 1, 2, 3), 300, 100)
    for at in range(260):
        if at in (10, 75):
            twins.begin((*stem[: 60 + at], 7, 8), 260)
        play(twins, ("passes", 1))
        if at % 13 in (0, 1):
            twins.compare()
    twins.close()


def play(twins: Twins, call: tuple[Any, ...]) -> None:
    name, *given = call
    if name == "begin":
        stem, length, reserve, chunk, namespace = given
        if len(twins.running) < 5:
            twins.begin(stem[:length], reserve, chunk, namespace)
    elif name == "step":
        which, n_tokens, rejects, named = given
        pairs = [pair for at, pair in enumerate(twins.running) if not which >> at & 1]
        tokens = None
        if named and n_tokens:
            tokens = np.full((len(pairs), 1), 1 + n_tokens, np.int64)
        twins.step(pairs, tokens, n_tokens, rejects=rejects)
    elif name == "passes":
        for _ in range(given[0]):
            twins.step(twins.running, np.full(len(twins.running), 6), 1, rejects=False)
    elif name in ("poll", "clear", "pin", "unpin"):
        said = [look_after(cache, name, *given) for cache in twins.caches]
        assert said[0] == said[1]
    elif twins.running:
        pair = twins.running[given[0] % len(twins.running)]
        if name in ("finish", "retract"):
            twins.end(pair, name)
        elif name == "abort":
            twins.abort(pair)
        elif name == "note":
            twins.note(pair)
        elif name == "checkpoint":
            twins.checkpoint(pair)
        else:
            twins.restart(pair)


def look_after(cache: Cache, name: str, *prompt: Any) -> str:
    """A call that is about no running request; why it was refused, if it was."""
    if name == "pin":
        stem, length = prompt
        try:
            cache.pin(TokenKey(stem[:length]), owner="operator")
        except BudgetError as error:
            return str(error)
    elif name == "unpin":
        cache.unpin_all("operator")
    elif name == "clear":
        cache.clear()
    else:
        cache.poll()
    return ""
