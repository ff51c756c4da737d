"""Requests that wait in line, and how often each is overtaken (A13)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvgraft.admission import Outcome
from kvgraft.cache import Cache
from kvgraft.tree.keys import TokenKey
from kvgraft_scheduling.waiting import WaitingQueue
from kvgraft_testing.machine.judging import Judge, as_violation

__all__ = ["WaitingLine"]

LOOKAHEAD = 3
MAX_OVERTAKEN = 2


@dataclass(eq=False)
class _Waiting:
    """One in line: its demand, and how often others went first."""

    number: int
    tokens: tuple[int, ...]
    reserve: int
    overtaken: int = 0


class WaitingLine:
    """The core's queue of waiting requests beside a plain list of them.

    Args:
        cache: admits them; an admitted request ends at once.
        judge: raises broken rules.
        begins: called before every request that begins.
    """

    def __init__(self, cache: Cache, judge: Judge, begins: Callable[[], object]) -> None:
        self.cache = cache
        self.judge = judge
        self.begins = begins
        self.queue: WaitingQueue[_Waiting] = WaitingQueue(LOOKAHEAD, MAX_OVERTAKEN)
        self.waiting: list[_Waiting] = []
        self._joined = 0

    def join(self, tokens: tuple[int, ...], reserve: int) -> None:
        """One more request, last in line."""
        self._joined += 1
        one = _Waiting(self._joined, tokens, reserve)
        self.queue.append(one)
        self.waiting.append(one)

    def go_round(self) -> None:
        """Try the next requests, in the queue's order."""
        expected = list(self.waiting[:LOOKAHEAD])
        stopped = False
        for one in self.queue.round():
            due = expected.pop(0) if expected else None
            self._expect(
                one is due and not stopped,
                f"number {one.number} is tried, number {due.number if due else 'none'} was due"
                + (f", and a request was overtaken {MAX_OVERTAKEN} times" if stopped else ""),
            )
            if not self._tried(one):
                stopped = stopped or one.overtaken >= MAX_OVERTAKEN
        self._expect(
            stopped or not expected,
            f"{[one.number for one in expected]} were not tried; no request had been overtaken "
            f"{MAX_OVERTAKEN} times",
        )

    def _tried(self, one: _Waiting) -> bool:
        """Whether a request left the line."""
        self.begins()
        request = self.cache.begin(TokenKey(one.tokens), reserve=one.reserve)
        try:
            outcome = self.cache.admit(request).outcome
        except Exception as error:
            raise as_violation(error, "admit") from error
        self.cache.abort(request)
        if outcome is Outcome.DEFERRED:
            return False
        self.queue.take(one)
        for passed in self.waiting[: self.waiting.index(one)]:
            passed.overtaken += 1
            self._expect(
                passed.overtaken <= MAX_OVERTAKEN,
                f"number {passed.number} was overtaken {passed.overtaken} times; "
                f"{MAX_OVERTAKEN} are allowed",
            )
        self.waiting.remove(one)
        return True

    def _expect(self, condition: bool, said: str) -> None:  # noqa: FBT001
        self.judge.expect(condition, "A13", None, lambda: f"in line, {said}")
