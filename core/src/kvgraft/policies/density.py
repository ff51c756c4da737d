"""The policy `density`: data that is expected to come back least per time it stays leaves first.

Data is sorted by the class of its last use, see `Density.classify`, and its age. How likely data
of a class comes back at an age is learnt while serving (`kvgraft.policies.prefixes`). There is
nothing to tune, no clock but the slots given out, and no randomness. Until something is learnt, and
among equals, what was used least recently leaves first.

    q[class, bin] = (reused + 10 * pooled) / (reached + 10)
    score[class, bin] = expected reuses within tau / expected stay within tau

where `tau` is how long data stays: the capacity of the base component's pool on that tier. For
each slot given out one is given back, so data stays on average while as many are given out as the
pool has (Little's law).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

from kvgraft.policies.greedy_dual import GreedyDualQueue
from kvgraft.policies.policy import Hint, Order, Pool, Use, class_of
from kvgraft.policies.prefixes import N_BINS, Prefixes, bin_of, bin_width
from kvgraft.policies.recency import LEFT_BEHIND, RecencyQueue
from kvgraft.types import Tier

__all__ = ["Density", "DensityOrder"]

AGAIN, RETURNING = 1, 2
HINTS = {Hint.CONTINUES: 4, Hint.TURN_ENDED: 8, Hint.OVER: 12}
HINT_BITS = 12

LEARN_EVERY = 100
"""Requests between two computations of the scores."""

PRIOR = 10
"""How many prefixes the mean of all classes counts for in each."""

USES_KEPT = 1 << 15
"""Uses whose time is known exactly; of older ones every other is forgotten."""

NEVER = 1 << 62
"""A time that does not come, in slots given out."""


class Clock:
    """Slots the base pool had given out when each use was made."""

    def __init__(self) -> None:
        self.now = 0
        self._stamps: list[int] = [-LEFT_BEHIND]
        self._allocated: list[int] = [0]

    def note(self, stamp: int, allocated: int) -> None:
        """Stamps from here on are made at that time."""
        self.now = allocated
        self._stamps.append(stamp)
        self._allocated.append(allocated)
        if len(self._stamps) > USES_KEPT:
            half = USES_KEPT // 2
            self._stamps[:half] = self._stamps[:half:2]
            self._allocated[:half] = self._allocated[:half:2]

    def at(self, stamp: int) -> int:
        """Slots that had been given out when a use was made."""
        return self._allocated[bisect_right(self._stamps, stamp) - 1]


class Density:
    """Expected reuses per stay, learnt per class and age."""

    name = "density"
    classifies = True

    def __init__(self) -> None:
        self.clock = Clock()
        self.orders: list[DensityOrder] = []
        self._stays: dict[Tier, int] = {}
        """Capacity of the base component's pool by tier."""
        self.prefixes = Prefixes(1, 1)
        self._n_uses = 0

    def order(self, pool: Pool) -> Order:
        """By what losing data costs, where that differs; else by what was learnt."""
        if pool.cost is not None:
            return GreedyDualQueue(pool.cost)
        order = DensityOrder(self._stays.setdefault(pool.tier, pool.capacity), self.clock)
        self.orders.append(order)
        return order

    def opened(self, base_tokens: int) -> None:
        """The cache is open; tokens of the base component that its largest tier holds."""
        self.prefixes = Prefixes(self._stays[Tier.DEVICE], base_tokens)
        for order in self.orders:
            order.unit = self.prefixes.unit

    def classify(self, use: Use) -> tuple[int, Any]:
        """Whether half of the prompt was seen before, also what was evicted since, and how often.

        How often is that of the longest prefix seen: more than once or not.
        """
        sums = self.prefixes.sums(use.namespace, use.tokens, use.prompt_tokens)
        n_seen, n_uses = self.prefixes.remembered(sums)
        its_class = RETURNING if n_seen and 2 * n_seen >= len(sums) else 0
        if n_uses > 1:
            its_class |= AGAIN
        return its_class, (sums, its_class)

    def admitted(self, use: Use, stamp: int) -> None:
        """Count the prefixes of the prompt as used."""
        sums, its_class = use.memo
        self.clock.note(stamp, use.allocated)
        self.prefixes.used(sums, its_class, use.allocated)
        self._n_uses += 1
        if self._n_uses % LEARN_EVERY == 0:
            rates = _rates(self.prefixes)
            for order in self.orders:
                order.learn(rates)

    def finished(self, use: Use, stamp: int, hint: Hint | None) -> int:
        """The request's class, with what the engine said of its future."""
        sums, its_class = use.memo
        self.clock.note(stamp, use.allocated)
        if hint is not None:
            its_class |= HINTS[hint]
        sums = self.prefixes.sums(use.namespace, use.tokens, len(use.tokens) // 4, sums)
        self.prefixes.ended(sums, its_class, use.allocated)
        return int(its_class)

    def describe(self, use_class: int) -> str:
        """Tell what was known of the request."""
        words = ["half of it seen before" if use_class & RETURNING else "mostly new"]
        if use_class & AGAIN:
            words.append("used more than once")
        words += [hint.value for hint, bits in HINTS.items() if use_class & HINT_BITS == bits]
        return ", ".join(words)


def _rates(prefixes: Prefixes) -> dict[int, list[float]]:
    """How likely data that reached a bin comes back in it, by class; -1 for classes never seen."""
    reached, reused = prefixes.reached, prefixes.reused
    none = [0] * N_BINS
    all_reached = [sum(row[b] for row in reached.values()) for b in range(N_BINS)]
    all_reused = [sum(row[b] for row in reused.values()) for b in range(N_BINS)]
    mean = sum(all_reused) / max(1, sum(all_reached))
    pooled = [(all_reused[b] + PRIOR * mean) / (all_reached[b] + PRIOR) for b in range(N_BINS)]
    rates = {-1: [min(each, 1.0) for each in pooled]}
    for its_class, row in reached.items():
        back = reused.get(its_class, none)
        rates[its_class] = [
            min((back[b] + PRIOR * pooled[b]) / (row[b] + PRIOR), 1.0) for b in range(N_BINS)
        ]
    return rates


def _scores(rates: list[float], tau: float) -> list[float]:
    """Expected reuses per stay within `tau` units, for data that just reached each bin."""
    scores = []
    for first in range(N_BINS):
        unused, reuses, stay, left = 1.0, 0.0, 0.0, max(tau, 1e-9)
        number = first
        while left > 0 and unused > 1e-6:
            width, rate = float(bin_width(number)), rates[number]
            if left < width:
                rate = 1 - (1 - rate) ** (left / width)
                width = left
            reuses += unused * rate
            stay += unused * width * (1 - rate / 2)
            unused *= 1 - rate
            left -= width
            number = min(number + 1, N_BINS - 1)
        scores.append(reuses / stay)
    return scores


class _Bucket(RecencyQueue):
    """Candidates of one class and bin of age.

    Attributes:
        its_class, number: of which class and bin.
        due: the policy's clock when the first of them grows too old for the bin.
    """

    __slots__ = ("due", "its_class", "number")

    def __init__(self, its_class: int, number: int) -> None:
        super().__init__()
        self.its_class = its_class
        self.number = number
        self.due = NEVER


class DensityOrder:
    """The candidates of one pool in buckets by class and age.

    Those that grow older move from bucket to bucket, at most 13 times in their lives.

    Attributes:
        unit: width of the first bin of age.
        tau: slots that the base pool gives out in the mean stay of data in this pool.
    """

    def __init__(self, tau: int, clock: Clock) -> None:
        self.unit = 1
        self.tau = tau
        self._clock = clock
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._scores: dict[int, list[float]] = {}
        self._sorted: list[list[_Bucket]] | None = None
        """The buckets in groups of one score, lowest first; None where it must be computed."""
        self._due = NEVER

    def push(self, stamp: int, node: Any) -> None:
        """Enter a candidate."""
        clock = self._clock
        at, unit = clock.at(stamp), self.unit
        place = class_of(stamp), bin_of(clock.now - at, unit)
        number = place[1]
        bucket = self._buckets.get(place)
        if bucket is None:
            bucket = self._buckets[place] = _Bucket(*place)
            self._sorted = None
        if number < N_BINS - 1:
            due = at + (unit << number)
            if due < bucket.due:
                bucket.due = due
                self._due = min(self._due, due)
        bucket.push(stamp, node)

    def pop(self) -> tuple[int, Any] | None:
        """Take the candidate of the lowest score; the oldest one of equal ones."""
        if self._clock.now >= self._due:
            self._move_on()
        if self._sorted is None:
            self._sorted = self._sort()
        for group in self._sorted:
            if len(group) == 1:
                entry = group[0].pop()
                if entry is not None:
                    return entry
                continue
            heads = [(each.first_stamp(), number) for number, each in enumerate(group)]
            present = [(head, number) for head, number in heads if head is not None]
            if present:
                return group[min(present)[1]].pop()
        return None

    def learn(self, rates: dict[int, list[float]]) -> None:
        """New rates of reuse by class."""
        tau = self.tau / self.unit
        self._scores = {each: _scores(row, tau) for each, row in rates.items()}
        self._sorted = None

    def keep(self, wanted: Callable[[Any], object]) -> None:
        """Drop every candidate that is not wanted; O(candidates)."""
        for bucket in self._buckets.values():
            bucket.keep(wanted)

    def score(self, stamp: int) -> float:
        """Expected reuses in a stay of `tau`; 0 until something is learnt."""
        age = self._clock.now - self._clock.at(stamp)
        score = self._score(class_of(stamp), bin_of(age, self.unit))
        return score * self.tau / self.unit

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Every candidate with its stamp, in no order."""
        for bucket in self._buckets.values():
            yield from bucket

    # -- inside

    def _score(self, its_class: int, number: int) -> float:
        if not self._scores:
            return 0.0
        row = self._scores.get(its_class)
        return (self._scores[-1] if row is None else row)[number]

    def _sort(self) -> list[list[_Bucket]]:
        by_score: dict[float, list[_Bucket]] = {}
        for each in self._buckets.values():
            by_score.setdefault(self._score(each.its_class, each.number), []).append(each)
        return [by_score[score] for score in sorted(by_score)]

    def _move_on(self) -> None:
        """Move candidates that grew older to the buckets where they belong now."""
        clock = self._clock
        now = clock.now
        for bucket in [each for each in self._buckets.values() if each.due <= now]:
            width = self.unit << bucket.number
            bucket.due = NEVER
            while (head := bucket.first_stamp()) is not None:
                due = clock.at(head) + width
                if due > now:
                    bucket.due = due
                    break
                self.push(*bucket.take())
        self._due = min([each.due for each in self._buckets.values()], default=NEVER)
