"""Checks of eviction policies: any calls, compared with the rules K1 to K3.

from kvgraft_testing.policies import check_policy

def test_my_policy():
check_policy(MyPolicy)
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from kvgraft.errors import ConfigError, ContractViolation
from kvgraft.packages.registry import missing_members
from kvgraft.policies.policy import (
    CLASS_BITS,
    MAX_CLASSES,
    EvictionPolicy,
    Hint,
    Order,
    Use,
    class_of,
)
from kvgraft.policies.recency import RecencyQueue
from kvgraft.refusals import of_type
from kvgraft.types import Tier

__all__ = ["check_policy"]

N_TOKENS = 1 << 14
CAPACITY = 64

FEW, MANY = 64, 1024
"""Candidates, for the steps that taking and entering one is made of."""

MOST_GROWTH = 4
"""Most steps among many candidates per step among few; a full search takes 16 times as many."""


class _Pool(NamedTuple):
    component: str
    tier: Tier
    capacity: int
    cost: Callable[[Any], int] | None = None


def _cost(node: int) -> int:
    """The cost of losing a candidate; as in a tree, costs differ widely."""
    return node * 2654435761 % 65536


class _Twin:
    """One policy under test, the same calls going to each of two."""

    def __init__(self, make: Callable[[], EvictionPolicy]) -> None:
        self.policy = make()
        self.orders: list[Order] = [
            self.policy.order(_Pool("base", Tier.DEVICE, CAPACITY)),
            self.policy.order(_Pool("base", Tier.HOST, 4 * CAPACITY)),
            self.policy.order(_Pool("state", Tier.DEVICE, CAPACITY // 8, _cost)),
        ]
        self.policy.opened(N_TOKENS)


@contextmanager
def _told(call: str, rule: str = "P5") -> Iterator[None]:
    """Name the call whose code raises."""
    try:
        yield
    except ContractViolation:
        raise
    except Exception as error:
        said = f"`{call}` raised {type(error).__name__}: {error}"
        raise ContractViolation(rule, None, said) from error


def check_policy(make: Callable[[], EvictionPolicy], *, n_steps: int = 4000, seed: int = 0) -> None:
    """Drive two instances of a policy with the same random calls.

    Requests arrive, are admitted and finish with and without hints; their data is entered in the
    orders of three pools, taken and dropped, as a tree does it. One of the two instances gets more
    queries than the other: `classify`, `describe`, `score`, the length of an order and its
    candidates. Then an order is filled with few candidates, and another one with many, and each
    candidate is taken and entered again.

    Args:
        make: makes the policy, without arguments.
        n_steps: calls.
        seed: of the calls.

    Raises:
        ConfigError: `make` is no function and no class.
        ContractViolation: K1 (a candidate that was never entered, an invalid class or score, or a
            missing member), K2 (a candidate returned twice, lost, or before one of a lower score;
            an order that raises), K3 (two instances differ), E7 (taking a candidate searches all of
            them) or P5 (the policy raises), with the step.
    """
    if not callable(make):
        raise ConfigError(
            f"check_policy: {of_type(make)} makes no policy; give the class, or a function of no "
            "arguments"
        )
    missing = missing_members(make())
    if missing:
        raise ContractViolation("K1", None, f"the policy has no {', '.join(missing)}")
    driver = _Driver(make, random.Random(seed))
    for step in range(n_steps):
        driver.step(step)
    driver.empty()
    _check_steps(make)


class _Driver:
    """Random calls, and what must come of them.

    Attributes:
        entered: per order, the candidates that are in it, with their stamps.
    """

    def __init__(self, make: Callable[[], EvictionPolicy], chance: random.Random) -> None:
        self.twins = [_Twin(make), _Twin(make)]
        self.chance = chance
        self.entered: list[dict[int, int]] = [{} for _ in self.twins[0].orders]
        self.clock = 0
        self.allocated = 0
        self.number = 0
        self.running: list[list[Use]] = []

    def step(self, number: int) -> None:
        call = self.chance.choice([self._begin, self._finish, self._push, self._push, self._pop])
        call(number)
        if self.chance.random() < 0.1:
            self._withdraw(number)
        if self.chance.random() < 0.01:
            self._rank(number)
        if self.chance.random() < 0.05:
            self._look()

    def empty(self) -> None:
        """Take all that is left."""
        for at, entered in enumerate(self.entered):
            while entered:
                self._take(at, "at the end")
            if self._taken(at) is not None:
                raise ContractViolation("K1", None, "an order gives what was never entered")

    # -- calls

    def _begin(self, number: int) -> None:
        if not self.twins[0].policy.classifies:
            self._tick(0)
            return
        uses = [self._use()]
        uses.append(Use("space", uses[0].tokens, uses[0].prompt_tokens, self.allocated, []))
        classes = []
        for twin, its in zip(self.twins, uses):
            with _told("classify"):
                its_class, its.memo = twin.policy.classify(its)
            classes.append(its_class)
        self._tick(self._expect_class(number, "classify", classes))
        for twin, its in zip(self.twins, uses):
            with _told("admitted"):
                twin.policy.admitted(its, self.clock)
        self.running.append(uses)
        self.allocated += self.chance.randrange(16)

    def _finish(self, number: int) -> None:
        if not self.running:
            return
        uses = self.running.pop(self.chance.randrange(len(self.running)))
        hint = self.chance.choice([None, *Hint])
        for each in uses:
            each.allocated = self.allocated
        with _told("finished"):
            told = [
                twin.policy.finished(its, self.clock, hint) for twin, its in zip(self.twins, uses)
            ]
        self._tick(self._expect_class(number, "finished", told))

    def _push(self, number: int) -> None:
        del number
        at = self.chance.randrange(len(self.entered))
        stamp = self.clock
        if self.chance.random() < 0.3:  # data whose use was a while ago
            stamp = max(0, stamp - (self.chance.randrange(200) << CLASS_BITS))
        self.number += 1
        self.entered[at][self.number] = stamp
        for each in self.twins:
            with _told("push", "K2"):
                each.orders[at].push(stamp, self.number)

    def _look(self) -> None:
        """Ask one of the two for what changes nothing; a request may begin and be given up."""
        twin = self.twins[self.chance.randrange(2)]
        order = twin.orders[self.chance.randrange(len(self.entered))]
        with _told("score, len or iter", "K2"):
            order.score(self.clock)
            if len(order) != len(list(order)):
                raise ContractViolation("K2", None, "an order's `len` is not what it iterates over")
        with _told("describe or classify"):
            twin.policy.describe(class_of(self.clock))
            if twin.policy.classifies:
                twin.policy.classify(self._use())

    def _use(self) -> Use:
        """A new request."""
        sequence = self.chance.randrange(12)
        n_tokens = self.chance.randrange(1, 9) * 1024
        tokens = bytearray(sequence.to_bytes(4, "little") * n_tokens)
        return Use("space", tokens, n_tokens, self.allocated, [])

    def _rank(self, number: int) -> None:
        """Ask how data is ranked, as `explain` does."""
        its_class, stamp = class_of(self.clock), self.clock
        at = self.chance.randrange(len(self.entered))
        with _told("describe"):
            words = [each.policy.describe(its_class) for each in self.twins]
        with _told("score", "K2"):
            scores = [each.orders[at].score(stamp) for each in self.twins]
        if not isinstance(words[0], str):
            raise ContractViolation(
                "K1", None, f"step {number}: describe gives {words[0]!r:.40}; give a str"
            )
        if scores[0] is not None and type(scores[0]) not in (int, float):
            raise ContractViolation(
                "K1", None, f"step {number}: score gives {scores[0]!r:.40}; give a number or None"
            )
        if words[0] != words[1] or scores[0] != scores[1]:
            raise ContractViolation(
                "K3", None, f"step {number}: two instances with equal calls rank data differently"
            )

    def _pop(self, number: int) -> None:
        at = self.chance.randrange(len(self.entered))
        if self.entered[at]:
            self._take(at, f"step {number}")
        elif self._taken(at) is not None:
            raise ContractViolation("K1", None, f"step {number}: an empty order gives a victim")

    def _withdraw(self, number: int) -> None:
        """Drop a candidate, as one that is used again or may not leave any more."""
        at = self.chance.randrange(len(self.entered))
        if not self.entered[at]:
            return
        node = self.chance.choice(sorted(self.entered[at]))
        stamp = self.entered[at].pop(node)
        for each in self.twins:
            with _told("withdraw", "K2"):
                each.orders[at].withdraw(stamp, node)
            there = sorted(node for _, node in each.orders[at])
            if there != sorted(self.entered[at]) or len(each.orders[at]) != len(there):
                raise ContractViolation(
                    "K2",
                    None,
                    f"step {number}: {len(there)} candidates after `withdraw`, wanted were "
                    f"{len(self.entered[at])}",
                )

    # -- what must come of them

    def _take(self, at: int, when: str) -> None:
        found = self._taken(at)
        entered = self.entered[at]
        if found is None:
            raise ContractViolation(
                "K2", None, f"{when}: an order of {len(entered)} candidates gives none"
            )
        stamp, node = found
        if node not in entered:
            raise ContractViolation("K2", None, f"{when}: a candidate is given that is not entered")
        if stamp != entered.pop(node):
            raise ContractViolation(
                "K2", None, f"{when}: a candidate comes back with stamp {stamp}, not its own"
            )
        self._expect_first(at, stamp, when)

    def _expect_first(self, at: int, taken: int, when: str) -> None:
        """No candidate left has a lower score, or that score and a smaller stamp.

        Orders without scores go by what they know, but for the plain `RecencyQueue`.
        """
        score, other = [each.orders[at].score for each in self.twins]
        if score(taken) != other(taken):
            raise ContractViolation(
                "K3", None, f"{when}: two instances with equal calls rank data differently"
            )
        if score(taken) is None and type(self.twins[0].orders[at]) is not RecencyQueue:
            return
        first = min(((score(each) or 0, each) for each in self.entered[at].values()), default=None)
        rank = (score(taken) or 0, taken)
        if first is not None and first < rank:
            raise ContractViolation(
                "K2",
                None,
                f"{when}: stamp {taken} of score {rank[0]} is taken before stamp {first[1]} of "
                f"score {first[0]}",
            )

    def _taken(self, at: int) -> tuple[int, Any] | None:
        with _told("pop", "K2"):
            first, second = [each.orders[at].pop() for each in self.twins]
        if first != second:
            raise ContractViolation(
                "K3",
                None,
                f"two instances with equal calls give victims {first} and {second}; one was "
                "asked more often for what changes nothing",
            )
        return first

    def _tick(self, its_class: int) -> None:
        self.clock = ((self.clock >> CLASS_BITS) + 1 << CLASS_BITS) + its_class
        assert class_of(self.clock) == its_class

    def _expect_class(self, number: int, call: str, answers: list[int]) -> int:
        """The class that both give."""
        its_class = answers[0]
        if type(its_class) is not int or not 0 <= its_class < MAX_CLASSES:
            raise ContractViolation(
                "K1",
                None,
                f"step {number}: {call} gives class {its_class!r:.40}; give an int from 0 to "
                f"{MAX_CLASSES - 1}",
            )
        if its_class != answers[1]:
            raise ContractViolation(
                "K3",
                None,
                f"step {number}: two instances with equal calls answer {call} differently",
            )
        return its_class


class _Counted(int):
    """A number that counts how often numbers of its kind are compared."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        _Counted.compared += 1
        return int(self) < int(other)

    def __gt__(self, other: int) -> bool:
        _Counted.compared += 1
        return int(self) > int(other)

    def __eq__(self, other: object) -> bool:
        _Counted.compared += 1
        return isinstance(other, int) and int(self) == int(other)

    __hash__ = int.__hash__


def _check_steps(make: Callable[[], EvictionPolicy]) -> None:
    """Taking a candidate is no search of all of them (E7)."""
    for at in range(len(_Twin(make).orders)):
        few, many = _steps(make, at, FEW), _steps(make, at, MANY)
        if many > MOST_GROWTH * few:
            raise ContractViolation(
                "E7",
                None,
                f"to take a candidate and enter another takes {few:.0f} lines and comparisons "
                f"among {FEW}, and {many:.0f} among {MANY}",
            )


def _steps(make: Callable[[], EvictionPolicy], at: int, n_candidates: int) -> float:
    """Lines of Python and comparisons of candidates, for each that is taken and entered."""
    order = _Twin(make).orders[at]
    for number in range(n_candidates):
        order.push(_Counted(number << CLASS_BITS), _Counted(number))
    n_lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal n_lines
        del frame, argument
        n_lines += event == "line"
        return trace

    before, compared = sys.gettrace(), _Counted.compared
    sys.settrace(trace)
    try:
        for number in range(n_candidates, 2 * n_candidates):
            order.pop()
            order.push(_Counted(number << CLASS_BITS), _Counted(number))
    finally:
        sys.settrace(before)
    return (n_lines + _Counted.compared - compared) / n_candidates
