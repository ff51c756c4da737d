"""Boundaries at which a prefill captures its state."""

from __future__ import annotations

import pytest

from kvgraft import MatchView
from kvgraft_mamba.checkpoints import CheckpointRule


def view(anchor: int, base: int, limit: int) -> MatchView:
    return MatchView(anchor=anchor, device_anchor=anchor, base=base, limit=limit, host_slots=0)


def rule(*, interval: int | None = None, most: int = 8) -> CheckpointRule:
    return CheckpointRule(interval, most)


def test_without_an_interval_nothing_is_asked_for() -> None:
    assert rule().boundaries(view(anchor=2, base=5, limit=9)) == ()


def test_regular_checkpoints_are_multiples_of_the_interval_above_the_anchor() -> None:
    regular = rule(interval=4)
    assert regular.boundaries(view(anchor=0, base=0, limit=12)) == (4, 8, 12)
    assert regular.boundaries(view(anchor=4, base=4, limit=11)) == (8,)
    assert regular.boundaries(view(anchor=0, base=0, limit=3)) == ()


@pytest.mark.parametrize("most", range(1, 9))
def test_a_long_prompt_never_captures_more_than_it_may(most: int) -> None:
    marks = rule(interval=1, most=most).boundaries(view(anchor=0, base=5, limit=1000))
    assert 0 < len(marks) <= most


def test_thinned_checkpoints_are_among_those_a_shorter_prompt_captures() -> None:
    regular = rule(interval=2, most=8)
    few = regular.boundaries(view(anchor=0, base=0, limit=40))
    many = regular.boundaries(view(anchor=0, base=0, limit=16))
    assert many == (2, 4, 6, 8, 10, 12, 14, 16)
    assert few == (8, 16, 24, 32, 40)
    assert set(few) & set(many) == {8, 16}


def test_a_pool_without_room_for_checkpoints_captures_no_state() -> None:
    assert rule(interval=1, most=0).boundaries(view(anchor=0, base=5, limit=9)) == ()
