"""A frontend of Dynamo's and two workers answer conversations; a worker dies and comes back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from .asking import ask
from .conversations import Alone, Reply, conversation, talk
from .programs import START_S, Frontend, Worker, wait_until

N_CONVERSATIONS, N_TURNS = 5, 3
"""An odd number of conversations, so that round-robin sends a conversation's turns to both."""


class Fleet(NamedTuple):
    by_cache: Frontend
    in_turn: Frontend
    workers: list[Worker]
    alone: Alone


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    home = tmp_path_factory.mktemp("fleet")
    by_cache, in_turn = Frontend("kv", 8901, home), Frontend("round-robin", 8902, home)
    workers = [Worker(model, home, f"worker-{name}") for name in "ab"]
    with ExitStack() as ends:
        for program in (*workers, by_cache, in_turn):
            ends.enter_context(program)
        alone = Alone(model)
        ends.callback(alone.close)
        fleet = Fleet(by_cache, in_turn, workers, alone)
        for frontend in (by_cache, in_turn):
            wait_until(partial(knows_both, frontend), lambda: logs(fleet), START_S)
        yield fleet


def knows_both(frontend: Frontend) -> bool:
    """Whether both workers answer its requests."""
    if not frontend.serves("tiny"):
        return False
    asked = [ask(frontend, [{"role": "user", "content": str(n)}]) for n in range(8)]
    return len({each.worker for each in asked}) == 2


def logs(fleet: Fleet) -> str:
    return "\n".join(each.said() for each in (fleet.by_cache, fleet.in_turn, *fleet.workers))


def in_turns(frontend: Frontend, seed: int) -> list[list[Reply]]:
    """All conversations, turn by turn, one request at a time."""
    lines = [conversation(seed + n, N_TURNS) for n in range(N_CONVERSATIONS)]
    talks = [talk(each, lambda messages: ask(frontend, messages)) for each in lines]
    replies: list[list[Reply]] = [[] for _ in talks]
    for _ in range(N_TURNS):
        for each, got in zip(talks, replies):
            got.append(next(each))
    return replies


def expect_as_alone(fleet: Fleet, seed: int, replies: list[list[Reply]]) -> None:
    """Compare texts; not lengths of prompts, as a request that moved counts its first answer's."""
    for n, got in enumerate(replies):
        expected = [*talk(conversation(seed + n, N_TURNS), fleet.alone.answer)]
        assert [each.text for each in got] == [each.text for each in expected]


def hit_rate(replies: list[list[Reply]]) -> float:
    told = [each for got in replies for each in got]
    cached, asked = (
        sum(each.cached_tokens for each in told),
        sum(each.prompt_tokens for each in told),
    )
    return cached / asked


def test_routing_by_cache_hits_more_than_in_turn_and_answers_alike(fleet: Fleet) -> None:
    by_cache, in_turn = in_turns(fleet.by_cache, 100), in_turns(fleet.in_turn, 200)
    expect_as_alone(fleet, 100, by_cache)
    expect_as_alone(fleet, 200, in_turn)
    rates = hit_rate(by_cache), hit_rate(in_turn)
    assert rates[0] > rates[1] + 0.1, rates
    assert len({each.worker for got in by_cache for each in got}) == 2


def test_a_worker_that_is_killed_costs_no_answer_and_comes_back(fleet: Fleet) -> None:
    lines = [conversation(300 + n, N_TURNS) for n in range(N_CONVERSATIONS)]

    def whole(each: list[str]) -> list[Reply]:
        return [*talk(each, lambda messages: ask(fleet.by_cache, messages))]

    with ThreadPoolExecutor(3) as pool:
        talks = [pool.submit(whole, each) for each in lines]
        talks[0].result()
        fleet.workers[1].kill()
        replies = [each.result() for each in talks]
    expect_as_alone(fleet, 300, replies)
    known = {each.worker for got in replies for each in got}
    fleet.workers[1].start()
    unheard = itertools.count()

    def comes_back() -> bool:
        """Whether a prompt that nobody has cached reaches a worker that is new."""
        question = {"role": "user", "content": f"{next(unheard)} of many"}
        return ask(fleet.by_cache, [question]).worker not in known

    wait_until(comes_back, lambda: logs(fleet), START_S)
    replies = in_turns(fleet.by_cache, 400)
    expect_as_alone(fleet, 400, replies)
    assert len({each.worker for got in replies for each in got}) == 2


def test_workers_end_by_a_signal_without_a_word_of_failure(fleet: Fleet) -> None:
    assert [each.stop() for each in fleet.workers] == [0, 0], logs(fleet)
    for each in fleet.workers:
        assert "Traceback" not in each.said(), each.said()
