"""Nobody in the line starves, large or small (A13)."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft.errors import ConfigError
from kvgraft_scheduling.waiting import WaitingPlace, WaitingQueue


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
    max_overtakes, capacity, longest = random.randint(0, 6), 10, 5
    queue: WaitingQueue[Job] = WaitingQueue(lookahead, max_overtakes)
    running: list[Job] = []
    watched = [Job(random.randint(1, capacity), random.randint(1, longest)) for _ in range(6)]
    for job in watched:
        queue.append(job)
    # once max_overtakes is spent, the first waits for those that run; before, it is overtaken
    bound = (max_overtakes + lookahead + longest + 1) * len(watched)
    for _ in range(bound):
        queue.append(Job(random.randint(1, 3), random.randint(1, longest)))
        serve(queue, capacity, running)
    assert all(job.left < job.rounds or job in running for job in watched)


def test_a_large_request_lets_small_ones_pass_and_then_no_more() -> None:
    queue: WaitingQueue[str] = WaitingQueue(lookahead=2, max_overtakes=3)
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


def test_a_retracted_request_returns_without_starting_anybodys_wait_again() -> None:
    queue: WaitingQueue[str] = WaitingQueue(lookahead=2, max_overtakes=3)
    queue.append("large")
    overtaken = 0
    for number in range(30):
        queue.append(f"small {number}")
        line = [item for item in queue.round() if item != "large"]
        for item in line:
            place = queue.take(item)
            overtaken += 1
        if line and number % 2:
            # one of those that ran is retracted: it is behind the one that came before it
            assert not place.waiting
            queue.put_back(place)
            assert list(queue)[:2] == ["large", line[-1]]
    assert overtaken == 3, "a retracted request reset the max_overtakes of the one before it"


def test_requests_that_return_keep_the_order_of_arrival() -> None:
    queue: WaitingQueue[int] = WaitingQueue(lookahead=6)
    for number in range(6):
        queue.append(number)
    places = [queue.take(number) for number in (0, 1, 2, 4)]
    assert [place.overtaken for place in places] == [0] * 4
    for place in reversed(places):
        queue.put_back(place)
    assert list(queue) == [0, 1, 2, 3, 4, 5]
    (passed,) = (place for place in [queue.take(3)] if place.overtaken)
    assert passed.overtaken == 1, "4 went first once"
    queue.put_back(passed)
    assert queue.take(3).overtaken == 1
    with pytest.raises(ConfigError, match="0 is in the queue; put it back once it was taken"):
        queue.put_back(places[0])


def test_equal_requests_end_in_order_of_arrival_though_some_make_room() -> None:
    """Each grows by one slot a round; the one that arrived last makes room."""
    queue: WaitingQueue[Job] = WaitingQueue()
    jobs = [Job(2, 7) for _ in range(6)]
    for job in jobs:
        queue.append(job)
    running: list[WaitingPlace[Job]] = []
    ended: list[int] = []
    retracted = 0

    def held() -> int:
        return sum(place.item.size for place in running)

    while len(ended) < 6:
        for job in queue.round():
            if held() + job.size > 12:
                break
            running.append(queue.take(job))
        for place in list(running):
            if place not in running:
                continue
            place.item.size += 1
            place.item.left -= 1
            if not place.item.left:
                running.remove(place)
                ended.append(jobs.index(place.item))
        while held() > 12:
            last = max(running, key=lambda each: each.arrived)
            running.remove(last)
            queue.put_back(last)
            retracted += 1
    assert ended == [0, 1, 2, 3, 4, 5]
    assert retracted > 3


def test_a_rejected_request_leaves_the_line() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    for name in ("never fits", "next"):
        queue.append(name)
    queue.take("never fits")
    assert list(queue.round()) == ["next"]
    assert len(queue) == 1
    with pytest.raises(ConfigError, match="'never fits' is not in the queue of 1; append it first"):
        queue.take("never fits")


@pytest.mark.parametrize(
    ("lookahead", "max_overtakes", "said"),
    [
        (0, 8, "WaitingQueue: lookahead 0; give a whole number, 1 or more"),
        (4, -1, "WaitingQueue: max_overtakes -1; give a whole number, 0 or more"),
        (True, 8, "WaitingQueue: lookahead True; give a whole number, 1 or more"),
    ],
)
def test_a_line_in_which_nobody_is_tried_is_refused(
    lookahead: int, max_overtakes: int, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        WaitingQueue(lookahead, max_overtakes)
    assert str(refused.value) == said


def test_an_object_that_is_no_place_is_not_put_back() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    for foreign in (None, "x"):
        with pytest.raises(ConfigError, match="is no place; give what `take` returned"):
            queue.put_back(foreign)  # type: ignore[arg-type]
