"""Boundaries at which a prefill captures its state."""

from __future__ import annotations

import pytest

from kvgraft import MatchView
from kvgraft_mamba.checkpoints import CheckpointRule


def view(anchor: int, base: int, limit: int) -> MatchView:
    return MatchView(anchor=anchor, device_anchor=anchor, base=base, limit=limit, host_slots=0)


def rule(*, interval: int | None = None, at_branch: bool = True, most: int = 8) -> CheckpointRule:
    return CheckpointRule(interval, at_branch, most)


def test_a_branch_off_a_known_prefix_is_captured() -> None:
    assert rule().boundaries(view(anchor=2, base=5, limit=9)) == (5,)


@pytest.mark.parametrize(
    "here",
    [
        view(anchor=5, base=5, limit=9),  # resumes at the branch: its state is there already
        view(anchor=0, base=0, limit=9),  # nothing known
        view(anchor=2, base=9, limit=8),  # never computes a token beyond the limit
    ],
)
def test_without_a_branch_ahead_nothing_is_captured(here: MatchView) -> None:
    assert rule().boundaries(here) == ()


def test_branches_are_left_alone_on_request() -> None:
    assert rule(at_branch=False).boundaries(view(anchor=2, base=5, limit=9)) == ()


def test_regular_checkpoints_are_multiples_of_the_interval_above_the_anchor() -> None:
    regular = rule(interval=4)
    assert regular.boundaries(view(anchor=0, base=0, limit=12)) == (4, 8, 12)
    assert regular.boundaries(view(anchor=4, base=4, limit=11)) == (8,)
    assert regular.boundaries(view(anchor=0, base=0, limit=3)) == ()


def test_a_branch_joins_the_regular_checkpoints_in_order_and_once() -> None:
    assert rule(interval=4).boundaries(view(anchor=0, base=5, limit=9)) == (4, 5, 8)
    assert rule(interval=4).boundaries(view(anchor=0, base=8, limit=9)) == (4, 8)


@pytest.mark.parametrize("most", range(1, 9))
@pytest.mark.parametrize("base", [0, 5])
def test_a_long_prompt_never_captures_more_than_it_may(most: int, base: int) -> None:
    marks = rule(interval=1, most=most).boundaries(view(anchor=0, base=base, limit=1000))
    assert 0 < len(marks) <= most
    assert not base or base in marks


def test_thinned_checkpoints_are_among_those_a_shorter_prompt_captures() -> None:
    regular = rule(interval=2, most=8)
    few = regular.boundaries(view(anchor=0, base=0, limit=40))
    many = regular.boundaries(view(anchor=0, base=0, limit=16))
    assert many == (2, 4, 6, 8, 10, 12, 14, 16)
    assert few == (8, 16, 24, 32, 40)
    assert set(few) & set(many) == {8, 16}


def test_a_pool_without_room_for_checkpoints_captures_none() -> None:
    assert rule(interval=1, most=0).boundaries(view(anchor=0, base=5, limit=9)) == ()
