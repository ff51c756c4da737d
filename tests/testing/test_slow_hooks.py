"""A hook that was slow once, as on a busy machine, is told from nothing else."""

from __future__ import annotations

from itertools import count

import pytest

from kvgraft.packages.registry import load_plugin
from kvgraft.testing.production.engine.timing import Timed
from kvgraft.testing.production.running import beside
from kvgraft_hisparse import plugin as hisparse


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
