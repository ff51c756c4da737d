"""One worker prefills, another decodes; the first dies and comes back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from .asking import ask
from .conversations import Alone, Reply, conversation, talk
from .programs import START_S, Frontend, Worker, wait_until

pytest.importorskip("kvgraft_nixl")

N_TURNS = 3
LOOPBACK = {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp", "NIXL_LOG_LEVEL": "FATAL"}
"""UCX and NIXL stay on this machine."""


class Fleet(NamedTuple):
    frontend: Frontend
    prefill: Worker
    decode: Worker
    alone: Alone

    def said(self) -> str:
        return "\n".join(each.said() for each in (self.frontend, self.prefill, self.decode))


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    home = tmp_path_factory.mktemp("roles")
    os.environ.update(LOOPBACK, UCX_HANDLE_ERRORS="none", UCX_LOG_LEVEL="fatal")
    prefill = Worker(model, home, "prefill", "--role", "prefill")
    decode = Worker(model, home, "decode", "--role", "decode")
    frontend = Frontend("kv", 8903, home)
    with ExitStack() as ends:
        for program in (prefill, decode, frontend):
            ends.enter_context(program)
        alone = Alone(model)
        ends.callback(alone.close)
        fleet = Fleet(frontend, prefill, decode, alone)
        wait_until(lambda: hands_over(frontend), fleet.said, START_S)
        yield fleet


def hands_over(frontend: Frontend) -> bool:
    """Whether two workers take part in a request."""
    if not frontend.serves("tiny"):
        return False
    (reply,) = talk(conversation(1, 1), lambda messages: ask(frontend, messages))
    return reply.prefill_worker not in (None, reply.worker)


def status(frontend: Frontend) -> int:
    """The status of a short request."""
    asked = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 1}
    return frontend.ask("completions", **asked).status_code


def talked(fleet: Fleet, seed: int) -> list[Reply]:
    """A conversation, whose answers are those of one engine."""
    lines = conversation(seed, N_TURNS)
    replies = [*talk(lines, lambda messages: ask(fleet.frontend, messages))]
    expected = [*talk(lines, fleet.alone.answer)]
    assert [each[:2] for each in replies] == [each[:2] for each in expected]
    return replies


def test_a_prompt_is_prefilled_in_one_process_and_decoded_in_another(fleet: Fleet) -> None:
    for seed in (600, 700, 800):
        for reply in talked(fleet, seed):
            assert reply.prefill_worker not in (None, reply.worker)
            assert reply.cached_tokens >= reply.prompt_tokens - 2 * 64, (reply, fleet.said())
    assert "computed again" not in fleet.decode.said()


def test_a_worker_that_prefills_can_be_killed_and_started_again(fleet: Fleet) -> None:
    fleet.prefill.kill()
    assert status(fleet.frontend) == 503
    fleet.prefill.start()
    wait_until(lambda: status(fleet.frontend) == 200, fleet.said, START_S)
    for reply in talked(fleet, 900):
        assert reply.prefill_worker not in (None, reply.worker)


def test_the_worker_that_decodes_ends_by_a_signal(fleet: Fleet) -> None:
    assert fleet.decode.stop() == 0, fleet.said()
    assert "Traceback" not in fleet.decode.said(), fleet.decode.said()
