"""The policy `density`: data that is expected to come back least per time it stays leaves first.

Data is sorted by the class of its last use, see `Density.classify`, and its age. How likely data
of a class comes back at an age is learnt while serving (`kvgraft.policies.rates`). There is nothing
to tune, no clock but the slots given out, and no randomness. Until something is learnt, and among
equals, what was used least recently leaves first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from math import isqrt
from typing import Any

from kvgraft.policies.greedy_dual import GreedyDualQueue
from kvgraft.policies.policy import PIECE_TOKENS, Hint, Order, Pool, Use, class_of
from kvgraft.policies.prefixes import N_BINS, OLDEST, YOUNGEST, Prefixes, Visit, bin_of
from kvgraft.policies.rates import Rates
from kvgraft.policies.recency import LEFT_BEHIND
from kvgraft.policies.sums import prefix_sums
from kvgraft.types import Tier

__all__ = ["Density", "DensityOrder"]

AGAIN, RETURNING = 1, 2
HINTS = {Hint.CONTINUES: 4, Hint.TURN_ENDED: 8, Hint.OVER: 12}
HINT_BITS = 12
PACE_SHIFT = 4
"""Bits above hold one more than the bin of the pace; 0 where there is none."""

COARSER = (AGAIN | RETURNING, ~HINT_BITS)
"""Bits of the coarser classes, see `Rates`: the prompt's, and those with the pace."""

LEARN_EVERY = 400
"""Requests between two computations of the scores."""

LEARN_AT_FIRST = 100
"""Requests between those before that."""

AGE_EVERY = 20
"""Requests between two counts of prefixes that grew older."""

GENERATIONS_KEPT = 1 << 15
"""Generations whose stamps are known exactly; of older ones every other is forgotten."""


class Clock:
    """Generations: how often the base pool has given out as many slots as the first bin is wide.

    Attributes:
        unit: that width, in slots.
        now: the generation.
    """

    def __init__(self) -> None:
        self.unit = 1
        self.now = 0
        self._stamps: list[int] = [-LEFT_BEHIND]
        self._generations: list[int] = [0]

    def note(self, stamp: int, allocated: int) -> None:
        """Stamps after this one are made when so many slots were given out."""
        now = allocated // self.unit
        if now == self.now:
            return
        self.now = now
        self._stamps.append(stamp)
        self._generations.append(now)
        if len(self._stamps) > GENERATIONS_KEPT:
            half = GENERATIONS_KEPT // 2
            self._stamps[:half] = self._stamps[:half:2]
            self._generations[:half] = self._generations[:half:2]

    def at(self, stamp: int) -> int:
        """The generation in which a use was made."""
        if stamp > self._stamps[-1]:
            return self.now
        return self._generations[max(0, bisect_left(self._stamps, stamp) - 1)]


class Density:
    """Expected reuses per stay, learnt per class and age."""

    name = "density"
    classifies = True

    def __init__(self) -> None:
        self.clock = Clock()
        self.orders: list[DensityOrder] = []
        self._stays: dict[Tier, int] = {}
        """Slots of the base component's pool by tier."""
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
        self.clock.unit = self.prefixes.unit

    def classify(self, use: Use) -> tuple[int, Any]:
        """Whether half of the prompt was seen before, how often, and how fast it goes on.

        Evicted data counts as seen. The class notes whether the longest prefix seen was used more
        than once, and, from the third use on, the mean of the slots given out between its uses:
        each counts half as much as the one after it. The bins of that mean are those of ages.
        """
        visit = self.prefixes.visit(prefix_sums(use, use.prompt_tokens))
        last, n_seen = visit.trail, visit.n_seen
        if last is not None:
            its_class = AGAIN if n_seen <= last.n_seen else 0
            if 2 * n_seen >= len(visit.sums):
                its_class |= RETURNING
                visit.pace = max(0, use.allocated - last.clock)
                if last.pace is not None:
                    visit.pace = isqrt(visit.pace * last.pace)
                    its_class |= bin_of(visit.pace // self.prefixes.unit) + 1 << PACE_SHIFT
            visit.its_class = its_class
        return visit.its_class, visit

    def admitted(self, use: Use, stamp: int) -> None:
        """Count the prefixes of the prompt as used."""
        self.clock.note(stamp, use.allocated)
        self.prefixes.used(use.memo, use.allocated)
        self._n_uses += 1
        if self._n_uses % AGE_EVERY == 0:
            self.prefixes.age(use.allocated)
        every = LEARN_AT_FIRST if self._n_uses <= LEARN_EVERY else LEARN_EVERY
        if self._n_uses % every == 0 and self.prefixes.reached:
            rates = Rates(self.prefixes, COARSER)
            for order in self.orders:
                order.learn(rates)

    def finished(self, use: Use, stamp: int, hint: Hint | None) -> int:
        """The request's class, with what the engine said of its future."""
        visit: Visit = use.memo
        self.clock.note(stamp, use.allocated)
        its_class = visit.its_class if hint is None else visit.its_class | HINTS[hint]
        n_tokens = len(use.tokens) // 4
        sums = visit.sums
        if len(sums) < n_tokens // PIECE_TOKENS:
            sums = prefix_sums(use, n_tokens)
        self.prefixes.ended(visit, sums, its_class, use.allocated)
        return its_class

    def describe(self, use_class: int) -> str:
        """Tell what was known of the request."""
        words = ["half of it seen before" if use_class & RETURNING else "mostly new"]
        if use_class & AGAIN:
            words.append("used more than once")
        number = (use_class >> PACE_SHIFT) - 1
        if number >= 0:
            unit = self.prefixes.unit
            words.append(
                f"every {unit << number} slots or more"
                if number == N_BINS - 1
                else f"within {unit << number} slots"
            )
        words += [hint.value for hint, bits in HINTS.items() if use_class & HINT_BITS == bits]
        return ", ".join(words)


class _Class:
    """Candidates of one class by generation.

    Attributes:
        entries: pairs of stamp and node by the generation of the stamp.
        generations: those that have some, in order.
        heaps: those whose entries are a heap.
    """

    __slots__ = ("entries", "generations", "heaps")

    def __init__(self) -> None:
        self.entries: dict[int, list[tuple[int, Any]]] = {}
        self.generations: list[int] = []
        self.heaps: set[int] = set()

    def push(self, generation: int, entry: tuple[int, Any]) -> None:
        """Enter a candidate."""
        entries = self.entries.get(generation)
        if entries is None:
            self.entries[generation] = [entry]
            insort(self.generations, generation)
        elif generation in self.heaps:
            heappush(entries, entry)
        else:
            entries.append(entry)

    def bins(self, now: int) -> Iterator[int]:
        """The bins of age that have candidates."""
        generations = self.generations
        at = 0
        while at < len(generations):
            number = bin_of(now - generations[at])
            yield number
            at = bisect_left(generations, now - YOUNGEST[number] + 1, at)

    def oldest(self, number: int, now: int) -> int | None:
        """The oldest generation in a bin; None if it has no candidates. Its entries are a heap."""
        generations = self.generations
        at = bisect_left(generations, now - OLDEST[number])
        if at == len(generations) or generations[at] > now - YOUNGEST[number]:
            return None
        generation = generations[at]
        if generation not in self.heaps:
            heapify(self.entries[generation])
            self.heaps.add(generation)
        return generation

    def pop(self, generation: int) -> tuple[int, Any]:
        """Take the oldest candidate of a generation that is a heap."""
        entries = self.entries[generation]
        entry = heappop(entries)
        if not entries:
            del self.entries[generation]
            del self.generations[bisect_left(self.generations, generation)]
            self.heaps.remove(generation)
        return entry


class DensityOrder:
    """The candidates of one pool by class and age.

    Ages are told by generations, so that candidates grow older without being moved. Until something
    is learnt, all are of one class.

    Attributes:
        tau: slots that the base pool gives out in the mean stay of data in this pool.
    """

    def __init__(self, tau: int, clock: Clock) -> None:
        self.tau = tau
        self._clock = clock
        self._rates: Rates | None = None
        self._classes: dict[int, _Class] = {}
        self._line: list[tuple[float, int, int]] = []
        """Score below 0, class and bin of all candidates there are, the lowest score last."""
        self._listed: set[tuple[int, int]] = set()
        """Classes and bins in the line."""
        self._generation = -1
        """For which the line was made; below 0 where it must be made anew."""

    def push(self, stamp: int, node: Any) -> None:
        """Enter a candidate."""
        clock = self._clock
        generation = clock.at(stamp)
        its_class = 0 if self._rates is None else class_of(stamp)
        candidates = self._classes.get(its_class)
        if candidates is None:
            candidates = self._classes[its_class] = _Class()
        candidates.push(generation, (stamp, node))
        if self._generation == clock.now:
            number = bin_of(clock.now - generation)
            if (its_class, number) not in self._listed:
                insort(self._line, (-self._score(its_class, number), its_class, number))
                self._listed.add((its_class, number))

    def pop(self) -> tuple[int, Any] | None:
        """Take the candidate of the lowest score; the oldest one of equal ones."""
        now = self._clock.now
        if self._generation != now:
            self._sort()
        line = self._line
        while line:
            score, its_class, number = line[-1]
            candidates = self._classes[its_class]
            generation = candidates.oldest(number, now)
            if generation is None:
                line.pop()
                self._listed.remove((its_class, number))
                continue
            if len(line) > 1 and line[-2][0] == score:
                candidates, generation = self._oldest(score, candidates, generation)
            return candidates.pop(generation)
        return None

    def learn(self, rates: Rates) -> None:
        """New rates of reuse by class."""
        unsorted = self._rates is None
        self._rates = rates
        if unsorted:
            self._enter(list(self))
        self._generation = -1

    def keep(self, wanted: Callable[[Any], object]) -> None:
        """Drop every candidate that is not wanted; O(candidates)."""
        self._enter([entry for entry in self if wanted(entry[1])])

    def score(self, stamp: int) -> float:
        """Expected reuses in a stay of `tau`; 0 until something is learnt."""
        age = self._clock.now - self._clock.at(stamp)
        score = self._score(class_of(stamp), bin_of(age))
        return score * self.tau / self._clock.unit

    def __len__(self) -> int:
        return sum(len(found) for each in self._classes.values() for found in each.entries.values())

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Every candidate with its stamp, in no order."""
        for each in self._classes.values():
            for entries in each.entries.values():
                yield from entries

    # -- inside

    def _enter(self, entries: list[tuple[int, Any]]) -> None:
        """Have these candidates and no others."""
        self._classes = {}
        self._generation = -1
        for stamp, node in entries:
            self.push(stamp, node)

    def _sort(self) -> None:
        """Make the line anew; classes without candidates are dropped."""
        now = self._generation = self._clock.now
        self._classes = {each: found for each, found in self._classes.items() if found.entries}
        self._line = sorted(
            (-self._score(its_class, number), its_class, number)
            for its_class, candidates in self._classes.items()
            for number in candidates.bins(now)
        )
        self._listed = {(its_class, number) for _, its_class, number in self._line}

    def _oldest(self, score: float, candidates: _Class, generation: int) -> tuple[_Class, int]:
        """Of candidates with the lowest score the oldest."""
        for other_score, its_class, number in self._line[-2::-1]:
            if other_score != score:
                break
            others = self._classes[its_class]
            other = others.oldest(number, self._generation)
            if other is not None and (others.entries[other][0] < candidates.entries[generation][0]):
                candidates, generation = others, other
        return candidates, generation

    def _score(self, its_class: int, number: int) -> float:
        if self._rates is None:
            return 0.0
        return self._rates.scores(its_class, self.tau / self._clock.unit)[number]
