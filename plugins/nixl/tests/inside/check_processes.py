"""Two processes, NIXL between them."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from kvgraft import TokenKey
from kvgraft_nixl import Stage

from ..contents import LARGE, PAGE, SETS, words
from .peer import Node, Peer

PROMPT = 500
PLAIN = {"guard": "off", "host_tokens": 0}


@pytest.fixture(params=[*SETS])
def sides(request: pytest.FixtureRequest) -> Iterator[tuple[Peer, Node]]:
    sender = Peer(request.param)
    receiver = Node(request.param)
    yield sender, receiver
    receiver.close()
    sender.end()


@pytest.fixture
def large() -> Iterator[tuple[Peer, Node]]:
    sender = Peer(LARGE, PLAIN, hold_s=3.0)
    receiver = Node(LARGE, PLAIN, timeout_s=2.0)
    yield sender, receiver
    receiver.close()
    sender.process.kill()
    sender.process.join(30)


def test_requests_go_to_another_process_and_prefixes_are_fetched_from_one(
    sides: tuple[Peer, Node],
) -> None:
    sender, receiver = sides
    tokens, others = words(PROMPT, 1), words(PROMPT, 2)
    assert sender.ask("compute", 1, tokens) == 0
    arrival = receiver.handed.accept(
        sender.ask("offer", 1), TokenKey([*tokens, 7]), reserve=16, chunk=64
    )
    assert receiver.until(lambda: arrival.ended)
    request = arrival.take()
    assert request.computed == PROMPT // PAGE * PAGE
    receiver.engine.expect(request, PROMPT // PAGE)
    receiver.engine.prefill(request)
    receiver.cache.finish(request)
    assert receiver.engine.serve([*tokens, 7]) == PROMPT // PAGE * PAGE

    sender.ask("compute", 2, others)
    sender.ask("finish", 2)
    fetched = receiver.handed.fetch(sender.ask("address"), TokenKey(others), chunk=64)
    assert receiver.until(lambda: fetched.ended)
    request = fetched.take()
    receiver.engine.expect(request, request.computed // PAGE)
    receiver.cache.abort(request)

    sender.ask("wrong_digests", 1)
    sender.ask("compute", 3, words(PROMPT, 3))
    wrong = receiver.handed.accept(
        sender.ask("offer", 3), TokenKey([*words(PROMPT, 3), 7]), chunk=64
    )
    assert receiver.until(lambda: wrong.ended)
    assert "is not the sender's" in wrong.reason
    assert receiver.engine.serve([*words(PROMPT, 3), 7]) == 0
    assert receiver.until(lambda: sender.ask("held") == (0, 0))


def test_a_sender_that_is_killed_is_noticed_and_nothing_is_published(
    large: tuple[Peer, Node],
) -> None:
    sender, receiver = large
    tokens = words(PROMPT, 4)
    sender.ask("compute", 1, tokens)
    arrival = receiver.handed.accept(sender.ask("offer", 1), TokenKey([*tokens, 7]), chunk=64)
    assert receiver.until(lambda: bool(arrival.reads))
    assert arrival.stage is Stage.PULLING
    sender.kill()
    assert receiver.until(lambda: arrival.ended)
    assert arrival.failed
    assert receiver.until(lambda: receiver.handed.n_arrivals == 0)
    assert receiver.engine.serve([*tokens, 7]) == 0


def test_a_sender_that_hangs_fails_in_time_and_its_reads_write_to_no_other_request(
    large: tuple[Peer, Node],
) -> None:
    sender, receiver = large
    tokens = words(PROMPT, 5)
    sender.ask("compute", 1, tokens)
    arrival = receiver.handed.accept(sender.ask("offer", 1), TokenKey([*tokens, 7]), chunk=64)
    assert receiver.until(lambda: bool(arrival.reads))
    sender.signal(signal.SIGSTOP)
    start = time.monotonic()
    assert receiver.until(lambda: arrival.ended, 10.0)
    assert arrival.failed, "the read of 16 MiB had ended already"
    assert time.monotonic() - start < 2.0 + 1.0
    assert receiver.handed.n_arrivals == 1, "its slots are kept"
    others = [receiver.engine.begin(TokenKey(words(PROMPT, seed)), chunk=64) for seed in (6, 7)]
    for other in others:
        assert other is not None
        receiver.engine.prefill(other)
    sender.signal(signal.SIGCONT)
    assert receiver.until(lambda: receiver.handed.n_arrivals == 0)
    for other in others:
        assert other is not None
        receiver.engine.expect(other, PROMPT // PAGE)
        receiver.cache.abort(other)


def test_a_receiver_that_is_killed_leaves_no_pin_behind(large: tuple[Peer, Node]) -> None:
    taker, node = large  # here the other process takes over
    tokens = words(PROMPT, 8)
    request = node.engine.begin(TokenKey(tokens), chunk=64)
    assert request is not None
    node.engine.prefill(request)
    node.handed._sending._hold_s = 1.0
    offer = node.handed.offer(request)
    node.cache.finish(request)
    assert offer is not None
    assert taker.ask("accept", 1, bytes(offer), [*tokens, 7])
    assert node.until(lambda: node.handed.sending.pulled > 0)
    taker.kill()
    assert node.handed.n_offers == 1
    assert node.until(lambda: node.handed.n_offers == 0, 10.0)
    assert node.handed.sending.expired == 1
    assert node.engine.serve(tokens) == PROMPT // PAGE * PAGE
