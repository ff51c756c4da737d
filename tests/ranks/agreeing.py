"""Two ranks in one process, whose messages go from one to the other."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvgraft.errors import TransferError
from kvgraft.transfers import Ticket
from kvgraft_ranks.agreement import MESSAGE_NBYTES, Agreement
from kvgraft_ranks.copies import AgreedTicket
from kvgraft_ranks.errors import RanksDivergedError
from kvgraft_ranks.stores import AgreedCall
from kvgraft_storage import Status, StorageTicket

__all__ = ["CHECKS", "Post"]

N_RANKS = 2
OK, MISS = Status.OK, Status.MISS


class Post:
    """Carries messages between ranks of one process."""

    def __init__(self, rank: int, boxes: list[list[queue.SimpleQueue[bytes]]]) -> None:
        self.rank, self.size, self.timeout_s = rank, N_RANKS, 2.0
        self.sizes: list[int] = []
        self._boxes = boxes

    def start(self, message: bytes) -> None:
        """Put the message into everybody's box for this rank."""
        self.sizes.append(len(message))
        for receiver in range(N_RANKS):
            self._boxes[receiver][self.rank].put(message)

    def finish(self) -> Sequence[bytes]:
        """The next message of every rank."""
        return [box.get(timeout=self.timeout_s) for box in self._boxes[self.rank]]


class Pair:
    """Two agreements; rank 1's clock is ahead."""

    def __init__(self) -> None:
        boxes: list[list[queue.SimpleQueue[bytes]]]
        boxes = [[queue.SimpleQueue() for _ in range(N_RANKS)] for _ in range(N_RANKS)]
        self.now = 1.0
        self.posts = [Post(rank, boxes) for rank in range(N_RANKS)]
        clocks: list[Callable[[], float]] = [lambda: self.now, lambda: self.now + 1000.0]
        self.ranks = [Agreement(*each) for each in zip(self.posts, clocks)]

    def poll(self) -> None:
        """One message of each."""
        for each in self.ranks:
            each.start()
        for each in self.ranks:
            each.finish()

    def copy(self) -> tuple[list[Ticket], list[AgreedTicket]]:
        """A copy of each rank."""
        real = [Ticket(()) for _ in self.ranks]
        agreed = [AgreedTicket(*each) for each in zip(real, self.ranks)]
        for rank, ticket in zip(self.ranks, agreed):
            rank.add_copy(ticket)
        return real, agreed

    def call(
        self, *statuses: Sequence[Status | None]
    ) -> tuple[list[StorageTicket], list[AgreedCall]]:
        """A call of each rank's store, with its statuses by rank; None while they are unknown."""
        real = [_ticket(each) for each in statuses]
        agreed = [AgreedCall(*each) for each in zip(real, self.ranks)]
        for rank, call in zip(self.ranks, agreed):
            rank.add_call(call)
        return real, agreed


def _ticket(statuses: Sequence[Status | None]) -> StorageTicket:
    ticket = StorageTicket(len(statuses), lambda: None, lambda verb, told: None)
    ticket.statuses[:] = statuses
    if None in statuses:
        ticket.queue(None)  # type: ignore[arg-type]
    return ticket


def a_copy_ends_when_it_has_ended_on_all_ranks() -> None:
    """By MIN: the slower rank decides (D2)."""
    for slower in range(N_RANKS):
        pair = Pair()
        real, agreed = pair.copy()
        real[1 - slower].finish()
        pair.poll()
        assert [each.done for each in agreed] == [False, False]
        real[slower].finish()
        pair.poll()
        assert [each.done for each in agreed] == [True, True]
        assert [each.error for each in agreed] == [None, None]


def a_copy_fails_on_all_if_it_failed_on_one() -> None:
    """A failure on one rank is one on all (D3)."""
    pair = Pair()
    real, agreed = pair.copy()
    (fine, _), (later, last) = pair.copy()
    del later, last
    real[0].finish()
    real[1].finish(TransferError("a fault"))
    fine.finish()
    pair.poll()
    assert [each.done for each in agreed] == [True, True]
    assert "rank 1" in str(agreed[0].error)
    assert "a fault" in str(agreed[1].error)


def a_later_copy_may_end_before_an_earlier_one() -> None:
    """Copies of two directions do not wait for one another."""
    pair = Pair()
    _, first = pair.copy()
    real, second = pair.copy()
    for each in real:
        each.finish()
    pair.poll()
    assert [each.done for each in first] == [False, False]
    assert [each.done for each in second] == [True, True]


def a_key_is_there_if_it_is_on_all_ranks() -> None:
    """By AND, key by key (D2); what one rank does not know is no miss (S7)."""
    pair = Pair()
    _, agreed = pair.call([OK, OK, MISS, MISS], [OK, MISS, OK, MISS])
    _, unsure = pair.call([OK, OK], [OK, Status.TIMEOUT])
    _, full = pair.call([OK, OK], [OK, Status.FULL])
    pair.poll()
    assert [each.settled for each in agreed] == [False, False]
    pair.poll()
    for each in agreed:
        assert each.statuses == [OK, MISS, MISS, MISS]
        assert each.done
    assert [each.statuses for each in unsure] == [[OK, Status.TIMEOUT]] * 2
    (broken, _), version = pair.call([], [])
    assert broken.value is None
    version[1].real.value = True
    for _ in range(2):
        pair.poll()
    assert [each.value for each in version] == [None, None]
    assert [each.statuses for each in full] == [[OK, Status.FULL]] * 2


def answers_of_many_keys_come_over_several_polls() -> None:
    """In the order that all agreed on."""
    pair = Pair()
    one = [OK if at % 3 else MISS for at in range(20_000)]
    two = [OK if at % 5 else MISS for at in range(20_000)]
    _, many = pair.call(one, two)
    _, few = pair.call([OK], [OK])
    for _ in range(3):
        pair.poll()
        assert not any(each.settled for each in (*many, *few))
    for _ in range(2):
        pair.poll()
    for each in many:
        assert each.statuses == [OK if at % 3 and at % 5 else MISS for at in range(20_000)]
    assert [each.statuses for each in few] == [[OK], [OK]]


def a_call_ends_when_all_ranks_have_its_answer() -> None:
    """A rank without an answer holds up the others, not later calls."""
    pair = Pair()
    (_, real), agreed = pair.call([OK], [None])
    _, later = pair.call([OK], [MISS])
    for _ in range(3):
        pair.poll()
    assert [each.settled for each in agreed] == [False, False]
    assert [each.statuses for each in later] == [[MISS], [MISS]]
    with real.changing():
        real.settle_rest("get", 0, OK)
    for _ in range(2):
        pair.poll()
    assert [each.statuses for each in agreed] == [[OK], [OK]]


def the_time_is_rank_zeros() -> None:
    """No rank reads its own clock (D1)."""
    pair = Pair()
    for now in (5.0, 7.0):
        pair.now = now
        pair.poll()
        pair.now = 99.0
        assert [each.clock() for each in pair.ranks] == [now, now]


def stores_work_if_they_work_on_all_ranks() -> None:
    """A breaker that is open on one rank stops all (D3)."""
    pair = Pair()
    pair.ranks[1].local_working = lambda: 0b01
    pair.poll()
    assert [each.working & 0b11 for each in pair.ranks] == [0b01, 0b01]


def other_results_are_found_and_named() -> None:
    """With both sides' numbers, on both sides (D4)."""
    pair = Pair()
    for rank, each in enumerate(pair.ranks):
        each.log.note("begin", [1])
        each.log.note("admit", [rank])
        each.log.note("poll", [0])
    with ThreadPoolExecutor(N_RANKS) as threads:
        for error in threads.map(_diverged, pair.ranks):
            assert error is not None
            assert error.number == 2
            assert error.results == {0: "admit[0]", 1: "admit[1]"}


def a_call_that_one_rank_makes_alone_is_found() -> None:
    """Calls are counted, too."""
    pair = Pair()
    pair.ranks[0].log.note("begin", [1])
    with ThreadPoolExecutor(N_RANKS) as threads:
        for error in threads.map(_diverged, pair.ranks):
            assert error is not None
            assert error.results == {0: "begin[1]", 1: ""}


def _diverged(rank: Agreement) -> RanksDivergedError | None:
    try:
        rank.start()
        rank.finish()
    except RanksDivergedError as error:
        return error
    return None


def a_message_has_at_most_1024_bytes() -> None:
    """Whatever is in it."""
    pair = Pair()
    for _ in range(1000):
        pair.copy()
        pair.call([OK] * 50, [OK] * 50)
    for _ in range(3):
        pair.poll()
    assert {size for post in pair.posts for size in post.sizes} == {MESSAGE_NBYTES}
    assert MESSAGE_NBYTES <= 1024


CHECKS: list[Callable[[], None]] = [
    a_copy_ends_when_it_has_ended_on_all_ranks,
    a_copy_fails_on_all_if_it_failed_on_one,
    a_later_copy_may_end_before_an_earlier_one,
    a_key_is_there_if_it_is_on_all_ranks,
    answers_of_many_keys_come_over_several_polls,
    a_call_ends_when_all_ranks_have_its_answer,
    the_time_is_rank_zeros,
    stores_work_if_they_work_on_all_ranks,
    other_results_are_found_and_named,
    a_call_that_one_rank_makes_alone_is_found,
    a_message_has_at_most_1024_bytes,
]
