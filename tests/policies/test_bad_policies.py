"""`check_policy` finds out each bad policy, by the rule that it breaks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count
from time import perf_counter_ns
from typing import Any, ClassVar

import pytest

from kvgraft.errors import ConfigError, ContractViolation
from kvgraft.optional import Published
from kvgraft.packages import registry as packages
from kvgraft.policies import Hint, Order, Pool, Use
from kvgraft.policies.policy import class_of
from kvgraft.policies.recency import LeastRecentlyUsed, RecencyQueue
from kvgraft_density.policy import Density
from kvgraft_testing.policies import check_policy

from .publishing import publish

Entry = tuple[int, Any]


def ordering_by(make: Callable[[], Order]) -> Callable[[], LeastRecentlyUsed]:
    """A policy without classes that has these orders."""

    class Bad(LeastRecentlyUsed):
        def order(self, pool: Pool) -> Any:
            del pool
            return make()

    return Bad


# -- orders that lose or invent candidates


class Forgetful(RecencyQueue):
    def push(self, stamp: int, node: Any) -> None:
        if node % 50:
            super().push(stamp, node)


class Withdrawing(RecencyQueue):
    """Drops the next victim as well."""

    def withdraw(self, stamp: int, node: Any) -> None:
        super().withdraw(stamp, node)
        super().pop()


class Hoarding(RecencyQueue):
    """Drops nothing."""

    def withdraw(self, stamp: int, node: Any) -> None:
        pass


class Miscounting(RecencyQueue):
    def __len__(self) -> int:
        return super().__len__() + 1


class Doubling(RecencyQueue):
    def push(self, stamp: int, node: Any) -> None:
        super().push(stamp, node)
        if not node % 50:
            super().push(stamp, node)


class Restamping(RecencyQueue):
    def pop(self) -> Entry | None:
        entry = super().pop()
        return None if entry is None else (entry[0] + 1, entry[1])


class Reluctant(RecencyQueue):
    """Gives the last candidate to nobody."""

    def pop(self) -> Entry | None:
        return super().pop() if len(self) > 1 else None


class Inventive(RecencyQueue):
    def pop(self) -> Entry | None:
        return super().pop() or (0, -1)


class Breaking(RecencyQueue):
    def push(self, stamp: int, node: Any) -> None:
        if node == 100:
            raise KeyError(node)
        super().push(stamp, node)


class Raising(RecencyQueue):
    def pop(self) -> Entry | None:
        entry = super().pop()
        if entry is None:
            raise IndexError("pop from an empty order")
        return entry


# -- orders that are not the same on every rank


class Gambling(RecencyQueue):
    def pop(self) -> Entry | None:
        return _pop_either(self, second=random.random() < 0.5)


class Timing(RecencyQueue):
    def pop(self) -> Entry | None:
        return _pop_either(self, second=perf_counter_ns() // 64 % 2 == 0)


class Sharing(RecencyQueue):
    """All orders of a process count on."""

    numbers: ClassVar[Iterator[int]] = count()

    def pop(self) -> Entry | None:
        return _pop_either(self, second=next(self.numbers) % 3 == 0)


class Numbered(RecencyQueue):
    """By the order's own number."""

    numbers: ClassVar[Iterator[int]] = count()

    def __init__(self) -> None:
        super().__init__()
        self.number = next(self.numbers)

    def pop(self) -> Entry | None:
        return _pop_either(self, second=self.number % 2 == 0)


def _pop_either(queue: RecencyQueue, *, second: bool) -> Entry | None:
    first = RecencyQueue.pop(queue)
    if not second or first is None:
        return first
    other = RecencyQueue.pop(queue)
    queue.push(*first)
    return other or RecencyQueue.pop(queue)


class Touchy(RecencyQueue):
    """To be asked for a score changes the order."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def score(self, stamp: int) -> float | None:
        self.asked += 1
        return None

    def pop(self) -> Entry | None:
        return _pop_either(self, second=self.asked % 5 == 4)


# -- orders that do not go by their scores


class Untrue(RecencyQueue):
    def score(self, stamp: int) -> float | None:
        return -stamp


class Latest(RecencyQueue):
    """Of equal scores the latest one."""

    def pop(self) -> Entry | None:
        entries = sorted(self)
        if not entries:
            return None
        self.withdraw(*entries[-1])
        return entries[-1]

    def score(self, stamp: int) -> float | None:
        return 0.0


class ChangingItsMind(RecencyQueue):
    """Candidates that were entered go by another score in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.sign = 1

    def push(self, stamp: int, node: Any) -> None:
        self.sign = 1 if node < 600 else -1
        super().push(stamp, node)

    def score(self, stamp: int) -> float | None:
        return self.sign * stamp


# -- orders that take too long


class ListOrder:
    """The least of a list."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def push(self, stamp: int, node: Any) -> None:
        self.entries.append((stamp, node))

    def pop(self) -> Entry | None:
        if not self.entries:
            return None
        first = min(self.entries)
        self.entries.remove(first)
        return first

    def withdraw(self, stamp: int, node: Any) -> None:
        self.entries.remove((stamp, node))

    def score(self, stamp: int) -> float | None:
        return stamp

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)


class Looping(ListOrder):
    """The same without comparing anything but whole numbers."""

    def pop(self) -> Entry | None:
        found = None
        for stamp, node in self.entries:
            if found is None or int(stamp) < found[0]:
                found = int(stamp), node
        if found is not None:
            self.entries = [entry for entry in self.entries if entry[1] is not found[1]]
        return found


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("order", "rule"),
    [
        (Forgetful, "K2"),
        (Withdrawing, "K2.*after `withdraw`"),
        (Hoarding, "K2.*after `withdraw`"),
        (Miscounting, "K2"),
        (Doubling, "K2.*(that is not entered|after `withdraw`)"),
        (Restamping, "K2.*not its own"),
        (Reluctant, "K2.*an order of 1 candidates gives none"),
        (Inventive, "K1.*gives a victim"),
        (Breaking, "K2.*`push` raised KeyError: 100"),
        (Raising, "K2.*`pop` raised IndexError"),
        (Gambling, "K3"),
        (Timing, "K3"),
        (Sharing, "K3"),
        (Numbered, "K3"),
        (Touchy, "K3"),
        (Untrue, "K2.*is taken before"),
        (Latest, "K2.*is taken before"),
        (ChangingItsMind, "K2.*is taken before"),
        (ListOrder, "E7.*lines and comparisons"),
        (Looping, "E7.*lines and comparisons"),
    ],
)
def test_a_bad_order_is_found_out(order: Callable[[], Order], rule: str) -> None:
    with pytest.raises(ContractViolation, match=rule):
        check_policy(ordering_by(order))


# -- policies that sort requests badly


class ClassifyingOutOfBounds(Density):
    def classify(self, use: Use) -> tuple[int, Any]:
        return 256, super().classify(use)[1]


class FinishingOutOfBounds(Density):
    def finished(self, use: Use, stamp: int, hint: Hint | None) -> int:
        super().finished(use, stamp, hint)
        return -1


class Affirming(Density):
    def finished(self, use: Use, stamp: int, hint: Hint | None) -> Any:
        return super().finished(use, stamp, hint) > 0


class Counting(LeastRecentlyUsed):
    """Changes something when it classifies: a request may never be admitted."""

    classifies = True

    def __init__(self) -> None:
        self.n_requests = 0

    def classify(self, use: Use) -> tuple[int, Any]:
        self.n_requests += 1
        return self.n_requests % 2, None


class Drawing(LeastRecentlyUsed):
    classifies = True

    def classify(self, use: Use) -> tuple[int, Any]:
        return random.randrange(2), None


class Failing(LeastRecentlyUsed):
    classifies = True

    def admitted(self, use: Use, stamp: int) -> None:
        raise ValueError(use.prompt_tokens)


class Speechless(LeastRecentlyUsed):
    def describe(self, use_class: int) -> Any:
        return None


class Wordy(RecencyQueue):
    def score(self, stamp: int) -> Any:
        return "high"


class Moody(RecencyQueue):
    def score(self, stamp: int) -> float | None:
        return random.random()


class Salted(Density):
    """By a number that each instance has of its own."""

    salts: ClassVar[Iterator[int]] = count()

    def __init__(self) -> None:
        super().__init__()
        self.salt = next(self.salts)

    def classify(self, use: Use) -> tuple[int, Any]:
        its_class, memo = super().classify(use)
        return class_of(its_class ^ self.salt), memo


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (ClassifyingOutOfBounds, "K1.*classify gives class 256; give an int from 0"),
        (FinishingOutOfBounds, "K1.*finished gives class -1; give an int from 0"),
        (Affirming, "K1.*finished gives class (True|False); give an int from 0"),
        (Counting, "K3.*answer classify differently"),
        (Drawing, "K3.*answer classify differently"),
        (Salted, "K3.*answer classify differently"),
        (Failing, "P5.*`admitted` raised ValueError"),
        (Speechless, "K1.*describe gives None; give a str"),
        (ordering_by(Wordy), "K1.*score gives 'high'; give a number or None"),
        (ordering_by(Moody), "K3.*rank data differently"),
        (object, "K1.*the policy has no name, classifies, order"),
    ],
)
def test_a_bad_policy_is_found_out(policy: Any, said: str) -> None:
    with pytest.raises(ContractViolation, match=said):
        check_policy(policy)


def test_a_policy_is_checked_by_its_class() -> None:
    with pytest.raises(ConfigError, match="a LeastRecentlyUsed makes no policy; give the class"):
        check_policy(LeastRecentlyUsed())  # type: ignore[arg-type]


def test_a_policy_of_another_name_than_its_entry_point_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = Published("mine", "kvgraft-mine", "1", ("kvgraft-mine",), lambda: LeastRecentlyUsed)
    publish(monkeypatch, point)
    with pytest.raises(ConfigError) as refused:
        packages.load_policy("mine")
    assert str(refused.value) == (
        "eviction policy 'mine': its `name` is 'lru'; entry point and name must agree"
    )
