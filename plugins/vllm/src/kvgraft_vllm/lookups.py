"""Looks up presence in the store: one call a step for all chunks, without waiting."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvgraft_storage import Access, BreakerState, Status, StorageTicket
from kvgraft_vllm.link import StoreLink

__all__ = ["AskedKeys", "Lookups"]


@dataclass(frozen=True, slots=True)
class AskedKeys:
    """Tag of a ticket that asks for the presence of these keys."""

    keys: tuple[bytes, ...]


@dataclass(slots=True)
class _Question:
    """A key without an answer yet, and the requests that asked."""

    begun: float
    requests: set[str] = field(default_factory=set)


class Lookups:
    """Answers by request and key; a request gets the same answer about a key until it ends.

    Answers are not shared with later requests: a failure says nothing about a key (S7).

    Args:
        link: the store.
        timeout_s: longest time for which a request waits for an answer.
    """

    def __init__(self, link: StoreLink, timeout_s: float) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._answers: dict[str, dict[bytes, Status]] = {}
        self._open: dict[bytes, _Question] = {}
        self._next: list[bytes] = []

    def ask(self, key: bytes, request: str) -> Status | None:
        """Whether a chunk is there (OK), or why not; None: ask again in the next step."""
        answers = self._answers.setdefault(request, {})
        known = answers.get(key)
        if known is not None:
            return known
        question = self._open.get(key)
        if question is None:
            known = self._known(key)
            if known is None:
                question = self._open[key] = _Question(self._link.clock())
                self._next.append(key)
        elif self._link.clock() - question.begun > self._timeout_s:
            known = Status.TIMEOUT
        if known is not None:
            answers[key] = known
        elif question is not None:
            question.requests.add(request)
        return known

    def _known(self, key: bytes) -> Status | None:
        if self._link.storage.state_of(Access.READ) is BreakerState.OPEN:
            return Status.DOWN
        # a known absence may be out of date and would cost a hit, so the store is asked
        return Status.OK if self._link.storage.probably_has([self._link.address(key)])[0] else None

    def flush(self) -> None:
        """Ask the store for everything new, in one call; at the end of a step."""
        if not self._next:
            return
        keys, self._next = tuple(self._next), []
        ticket = self._link.storage.exists(self._link.addresses(keys), self._timeout_s)
        self._link.done.watch(ticket, AskedKeys(keys))

    def settle(self, asked: AskedKeys, ticket: StorageTicket) -> None:
        """Take the store's answers."""
        for key, status in zip(asked.keys, ticket.statuses):
            question = self._open.pop(key)
            for request in question.requests:
                answers = self._answers.get(request)
                if answers is not None and status is not None:
                    answers.setdefault(key, status)

    def correct(self, keys: Iterable[bytes], statuses: Iterable[Status]) -> None:
        """Correct the answers to requests about keys that could not be loaded."""
        for key, status in zip(keys, statuses):
            for answers in self._answers.values():
                if answers.get(key) is Status.OK:
                    answers[key] = status

    def forget(self, request: str) -> None:
        """A request has ended."""
        self._answers.pop(request, None)

    @property
    def n_open(self) -> int:
        """Keys that the store has not answered for."""
        return len(self._open)
