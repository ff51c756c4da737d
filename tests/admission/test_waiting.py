"""Nobody in the line starves, large or small (A13)."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft.admission.waiting import WaitingQueue
from kvgraft.errors import ConfigError


class Job:
    """So much memory for so many rounds."""

    def __init__(self, size: int, rounds: int) -> None:
        self.size, self.rounds = size, rounds
        self.left = rounds
        self.waited = 0


def serve(queue: WaitingQueue[Job], capacity: int, running: list[Job]) -> None:
    """One round: some end, then waiting ones that fit are admitted in order."""
    for job in list(running):
        job.left -= 1
        if job.left <= 0:
            running.remove(job)
    for job in queue.round():
        if job.size <= capacity - sum(each.size for each in running):
            queue.take(job)
            running.append(job)


@given(random=st.randoms(use_true_random=False), lookahead=st.integers(1, 6))
def test_everybody_runs_though_newcomers_never_stop(random: Random, lookahead: int) -> None:
    patience, capacity, longest = random.randint(0, 6), 10, 5
    queue: WaitingQueue[Job] = WaitingQueue(lookahead, patience)
    running: list[Job] = []
    watched = [Job(random.randint(1, capacity), random.randint(1, longest)) for _ in range(6)]
    for job in watched:
        queue.append(job)
    # once patience is spent, the first waits for those that run; before, it is overtaken
    bound = (patience + lookahead + longest + 1) * len(watched)
    for _ in range(bound):
        queue.append(Job(random.randint(1, 3), random.randint(1, longest)))
        serve(queue, capacity, running)
    assert all(job.left < job.rounds or job in running for job in watched)


def test_a_large_request_lets_small_ones_pass_and_then_no_more() -> None:
    queue: WaitingQueue[str] = WaitingQueue(lookahead=2, patience=3)
    queue.append("large")
    passed = 0
    for number in range(10):
        queue.append(f"small {number}")
        line = list(queue.round())
        assert line[0] == "large"
        if len(line) > 1:
            queue.take(line[1])
            passed += 1
    assert passed == 3
    queue.take("large")
    assert next(iter(queue.round())).startswith("small")
    assert len(list(queue.round())) == 2


def test_a_retracted_request_goes_first_without_starting_anybodys_wait_again() -> None:
    queue: WaitingQueue[str] = WaitingQueue(lookahead=2, patience=3)
    queue.append("large")
    overtaken = 0
    for number in range(30):
        queue.append(f"small {number}")
        line = [item for item in queue.round() if item != "large"]
        for item in line:
            queue.take(item)
            overtaken += 1
        if number % 2:
            # one of those that ran is retracted, runs again at once
            queue.push_front("retracted")
            assert next(iter(queue.round())) == "retracted"
            queue.take("retracted")
    assert overtaken <= 3 + 2, "a retracted request reset the patience of the one behind it"


def test_a_rejected_request_leaves_the_line() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    for name in ("never fits", "next"):
        queue.append(name)
    queue.take("never fits")
    assert list(queue.round()) == ["next"]
    assert len(queue) == 1
    with pytest.raises(ConfigError, match="'never fits' is not in the line of 1; append it first"):
        queue.take("never fits")


@pytest.mark.parametrize(
    ("lookahead", "patience", "said"),
    [
        (0, 8, "WaitingQueue: lookahead 0; give a whole number, 1 or more"),
        (4, -1, "WaitingQueue: patience -1; give a whole number, 0 or more"),
        (True, 8, "WaitingQueue: lookahead True; give a whole number, 1 or more"),
    ],
)
def test_a_line_in_which_nobody_is_tried_is_refused(
    lookahead: int, patience: int, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        WaitingQueue(lookahead, patience)
    assert str(refused.value) == said
