"""A hook that was slow once, as on a busy machine, is told from nothing else."""

from __future__ import annotations

import resource
import time
from itertools import count

import pytest

from kvgraft.packages.registry import load_plugin
from kvgraft_hisparse import plugin as hisparse
from kvgraft_testing.production.engine import timing
from kvgraft_testing.production.engine.timing import Stopwatch, Timed
from kvgraft_testing.production.running import beside


def test_a_hook_that_is_asked_again_for_its_time_is_noted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plugin = load_plugin("hisparse", hisparse)
    quick = beside(plugin, {})
    calls = count()
    monkeypatch.setattr(Timed, "is_slow", lambda self, hook: next(calls) % 3 == 0)
    slow = beside(plugin, {})
    assert next(calls) > 3
    assert quick.difference(slow, "quick", "slow") is None


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="the system counts no waits")
@pytest.mark.parametrize("waits", [True, False])
def test_time_in_which_others_have_the_processor_is_not_the_calls(
    monkeypatch: pytest.MonkeyPatch, *, waits: bool
) -> None:
    watch, now = Stopwatch(), time.perf_counter
    monkeypatch.setattr(timing, "perf_counter", lambda: now() + 3600)
    if waits:
        time.sleep(0.001)
    else:
        monkeypatch.setattr(timing, "_n_waits", lambda before=watch._waits: before)
    assert (watch.seconds() > 3600) == waits
