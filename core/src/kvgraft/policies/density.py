"""The policy `density`: data that is expected to come back least per time it stays leaves first.

Data is sorted by the class of its last use, see `Density.classify`, and its age. How likely data
of a class comes back at an age is learnt while serving (`kvgraft.policies.rates`). There is nothing
to tune, no clock but the tokens that requests use, and no randomness. Until something is learnt,
and among equals, what was used least recently leaves first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from math import isqrt
from typing import Any, Final

from kvgraft.compiled import mypyc_attr
from kvgraft.policies.policy import (
    CLASS_BITS,
    MAX_CLASSES,
    PIECE_TOKENS,
    Hint,
    Order,
    Pool,
    Use,
    class_of,
)
from kvgraft.policies.prefixes import N_BINS, OLDEST, YOUNGEST, Prefixes, Visit, bin_of
from kvgraft.policies.rates import Rates
from kvgraft.policies.recency import LEFT_BEHIND, paired, untrack
from kvgraft.policies.sums import prefix_sums
from kvgraft.types import Tier

AGAIN: Final = 1
RETURNING: Final = 2
HINTS = {Hint.CONTINUES: 4, Hint.TURN_ENDED: 8, Hint.OVER: 12}
HINT_BITS: Final = 12
PACE_SHIFT: Final = 4
"""Bits above hold one more than the bin of the pace; 0 where there is none."""

COARSER: Final = (AGAIN | RETURNING, ~HINT_BITS)
"""Bits of the coarser classes, see `Rates`: the prompt's, and those with the pace."""

LEARN_EVERY: Final = 400
"""Requests between two computations of the scores."""

AGE_EVERY: Final = 100
"""Requests between two counts of prefixes that grew older."""

AT_FIRST_EVERY: Final = 25
"""Both at first: a small pool is short before it saw a hundred."""

GENERATIONS_KEPT: Final = 1 << 15
"""Generations whose stamps are known exactly; of older ones every other is forgotten."""

NOTHING_LEARNT = [0.0] * N_BINS
"""Scores until then, of data that costs as much as all other."""

AGE_ALONE = [1 / (youngest + 1) for youngest in YOUNGEST]
"""Scores until then where costs differ: what was used lately comes back soon, at any scale."""

KIND_BITS: Final = CLASS_BITS + 6
"""Bits of a kind: a class, and above it the level of the cost."""

KINDS: Final = 1 << KIND_BITS

MOST_LEVELS: Final = 1 << KIND_BITS - CLASS_BITS

WORTH = [2.0 ** (level / 2) for level in range(MOST_LEVELS)]
"""The work that a reuse of data saves, by the level of its cost."""


def level_of(cost: int) -> int:
    """The level of a cost: there are two to each doubling."""
    return min((cost * cost).bit_length(), MOST_LEVELS - 1)


class Clock:
    """Generations: how often requests computed or reused as much as the first bin is wide.

    Attributes:
        unit: that width, in slots of that pool.
        now: the generation.
        since: the last stamp before it.
    """

    def __init__(self) -> None:
        self.unit = 1
        self.now = 0
        self.since = -LEFT_BEHIND
        self._stamps: list[int] = [-LEFT_BEHIND]
        self._generations: list[int] = [0]

    def note(self, stamp: int, used: int) -> None:
        """Stamps after this one are made when so many slots' tokens were used."""
        now = used // self.unit
        if now == self.now:
            return
        self.now = now
        self.since = stamp
        self._stamps.append(stamp)
        self._generations.append(now)
        if len(self._stamps) > GENERATIONS_KEPT:
            half = GENERATIONS_KEPT // 2
            self._stamps[:half] = self._stamps[:half:2]
            self._generations[:half] = self._generations[:half:2]

    def at(self, stamp: int) -> int:
        """The generation in which a use was made."""
        if stamp > self.since:
            return self.now
        return self._generations[max(0, bisect_left(self._stamps, stamp) - 1)]


@mypyc_attr(allow_interpreted_subclasses=True)
class Density:
    """Expected reuses per stay, learnt per class and age."""

    name = "density"
    classifies = True

    def __init__(self) -> None:
        self.clock = Clock()
        self.orders: list[DensityOrder] = []
        self._bases: dict[Tier, Pool] = {}
        """The base component's pool by tier."""
        self.prefixes = Prefixes(1, 1)
        self._n_uses = 0
        self._n_tokens = 0  # of all prompts and outputs
        self._slots = self._slots_tokens = 1  # of the base component's largest pool

    def order(self, pool: Pool) -> Order:
        """By what was learnt, and by what losing data costs where that differs."""
        base = self._bases.setdefault(pool.tier, pool)
        order = DensityOrder(base, self.clock, pool.cost)
        self.orders.append(order)
        return order

    def opened(self, base_tokens: int) -> None:
        """The cache is open; tokens of the base component that its largest tier holds."""
        self.prefixes = Prefixes(self._bases[Tier.DEVICE].capacity, base_tokens)
        self.clock.unit = self.prefixes.unit
        self._slots = max([pool.capacity for pool in self._bases.values()])
        self._slots_tokens = max(1, base_tokens)

    def _used(self) -> int:
        """The time: tokens that requests used so far, in slots; hits do not slow it down."""
        return self._n_tokens * self._slots // self._slots_tokens

    def classify(self, use: Use) -> tuple[int, Any]:
        """Whether half of the prompt was seen before, how often, and how fast it goes on.

        Evicted data counts as seen. The class notes whether the longest prefix seen was used more
        than once, and, from the third use on, the mean of the tokens used between its uses: each
        counts half as much as the one after it. The bins of that mean are those of ages.
        """
        sums = prefix_sums(use, use.prompt_tokens)
        visit = self.prefixes.visit(sums)
        last = visit.trail
        if last is None:
            return 0, visit
        n_seen = visit.n_seen
        its_class = AGAIN if n_seen <= last.n_seen else 0
        if 2 * n_seen >= len(sums):
            its_class |= RETURNING
            pace = self._used() - last.clock
            if last.pace is not None:
                pace = isqrt(pace * last.pace)
                its_class |= bin_of(pace // self.clock.unit) + 1 << PACE_SHIFT
            visit.pace = pace
        visit.its_class = its_class
        return its_class, visit

    def admitted(self, use: Use, stamp: int) -> None:
        """Count the prefixes of the prompt as used."""
        self._n_tokens += use.prompt_tokens
        used = self._used()
        self.clock.note(stamp, used)
        self.prefixes.used(use.memo, used)
        self._n_uses += 1
        at_first = self._n_uses <= LEARN_EVERY
        if self._n_uses % (AT_FIRST_EVERY if at_first else AGE_EVERY):
            return
        self.prefixes.age(used)
        if self.prefixes.reused and (at_first or self._n_uses % LEARN_EVERY == 0):
            rates = Rates(self.prefixes, COARSER)
            for order in self.orders:
                order.learn(rates)

    def finished(self, use: Use, stamp: int, hint: Hint | None) -> int:
        """The request's class, with what the engine said of its future."""
        visit: Visit = use.memo
        n_tokens = len(use.tokens) // 4
        self._n_tokens += max(0, n_tokens - use.prompt_tokens)
        self.clock.note(stamp, self._used())
        its_class = visit.its_class if hint is None else visit.its_class | HINTS[hint]
        sums = visit.sums
        if len(sums) < n_tokens // PIECE_TOKENS:
            sums = prefix_sums(use, n_tokens)
        self.prefixes.ended(visit, sums, its_class, self._used())
        return its_class

    def describe(self, use_class: int) -> str:
        """Tell what was known of the request."""
        words = ["half of it seen before" if use_class & RETURNING else "mostly new"]
        if use_class & AGAIN:
            words.append("used more than once")
        number = (use_class >> PACE_SHIFT) - 1
        if number >= 0:
            n_tokens = (self.prefixes.unit << number) * self._slots_tokens // self._slots
            words.append(f"every {n_tokens} tokens used or so")
        words += [hint.value for hint, bits in HINTS.items() if use_class & HINT_BITS == bits]
        return ", ".join(words)


class DensityOrder:
    """The candidates of one pool by class, cost and age.

    Ages are told by generations, so that candidates grow older without being moved. A bucket holds
    the candidates of one kind (class and level of the cost) and generation; its key has the
    generation above the kind. Until something is learnt, all are of class 0.

    Where costs differ, a score counts as often as the cost of a reuse says. A cost is asked for
    when victims are taken. It may rise while a candidate waits, as others leave; it counts then.
    One that falls counts once as many victims were taken as there are candidates.

    Args:
        base: the base component's pool on this tier.
        clock: tells generations.
        cost: what losing a node costs, 0 or more; None where each costs as much as another.

    Attributes:
        tau: how far scores look ahead, in slots: the capacity of the base component's pool on this
            tier when they were learnt. Data stays so long, and longer where much is reused.
    """

    def __init__(self, base: Pool, clock: Clock, cost: Callable[[Any], int] | None = None) -> None:
        self._cost = cost
        self._entered: list[Any] = []
        """Stamps and nodes whose cost was not asked for yet, one behind the other."""
        self.tau = base.capacity
        self._base = base
        self._clock = clock
        self._rates: Rates | None = None
        self._class_bits = 0
        """Those of a stamp that tell the class."""
        self._waiting: dict[int, list[Any]] = {}
        """Buckets that no victim was looked for in: stamps and nodes, one behind the other."""
        self._heaps: dict[int, list[tuple[int, Any]]] = {}
        """The other ones, each a heap; one that victims were taken from may be empty."""
        self._generations: dict[int, list[int]] = {}
        """Those of the buckets of each kind, in order."""
        self._line: list[tuple[float, int]] = []
        """Score below 0 and place of all candidates there are, the lowest score last. A place is a
        bin and a kind; the bin stands above the kind."""
        self._listed: dict[int, float] = {}
        """The scores in the line by place."""
        self._generation = -1
        """For which the line was made; below 0 where it must be made anew."""
        self._first: list[tuple[int, Any]] = []
        """The heap that the next victim comes from, if it is known and has any."""
        self._level = 0
        """The level of the cost of the last victim looked for."""
        self._n_left = 0
        """Victims until costs are asked for again."""

    def push(self, stamp: int, node: Any) -> None:
        """Enter a candidate."""
        if self._cost is None:
            self._put(stamp, node, 0)
        else:
            self._entered += (stamp, node)

    def _put(self, stamp: int, node: Any, level: int) -> None:
        clock = self._clock
        generation = clock.now if stamp > clock.since else clock.at(stamp)
        kind = level << CLASS_BITS | stamp & self._class_bits
        key = generation << KIND_BITS | kind
        heap = self._heaps.get(key)
        if heap is not None:
            heappush(heap, (stamp, node))
            return
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting += (stamp, node)
            return
        waiting = self._waiting[key] = [stamp, node]
        untrack((waiting,))
        self._add(kind, generation)

    def pop(self) -> tuple[int, Any] | None:
        """Take the candidate of the lowest score; the oldest one of equal ones."""
        cost = self._cost
        if cost is None:
            return self._pop()
        self._n_left -= 1
        if self._n_left < 0:
            self._enter(list(self))
        if self._entered:
            entered, self._entered = self._entered, []
            for stamp, node in paired(entered):
                self._put(stamp, node, level_of(cost(node)))
        while (entry := self._pop()) is not None:
            stamp, node = entry
            level = level_of(cost(node))
            if level <= self._level:
                break
            self._put(stamp, node, level)
        return entry

    def _pop(self) -> tuple[int, Any] | None:
        heap = self._first
        if not heap or self._generation != self._clock.now:
            heap = self._find_first()
            if not heap:
                return None
        return heappop(heap)

    def learn(self, rates: Rates) -> None:
        """New rates of reuse by class."""
        unsorted = self._rates is None
        self._rates = rates
        self.tau = self._base.capacity
        self._class_bits = MAX_CLASSES - 1
        if unsorted:
            self._enter(list(self))
        self._generation = -1

    def keep(self, wanted: Callable[[Any], object]) -> None:
        """Drop every candidate that is not wanted; O(candidates)."""
        self._enter([entry for entry in self if wanted(entry[1])])

    def score(self, stamp: int) -> float | None:
        """Expected reuses in a stay of `tau`; 0 until something is learnt.

        None where costs differ: a stamp says nothing of them.
        """
        if self._cost is not None:
            return None
        age = self._clock.now - self._clock.at(stamp)
        return self._scores(class_of(stamp))[bin_of(age)] * self.tau / self._clock.unit

    def __len__(self) -> int:
        waiting = len(self._entered) + sum(map(len, self._waiting.values()))
        return waiting // 2 + sum(map(len, self._heaps.values()))

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Every candidate with its stamp, in no order."""
        yield from paired(self._entered)
        for entries in self._waiting.values():
            yield from paired(entries)
        for heap in self._heaps.values():
            yield from heap

    # -- inside

    def _enter(self, entries: list[tuple[int, Any]]) -> None:
        """Have these candidates and no others."""
        self._waiting, self._heaps, self._generations = {}, {}, {}
        self._entered, self._first = [], []
        self._generation = -1
        self._n_left = len(entries)
        for stamp, node in entries:
            self.push(stamp, node)

    def _add(self, kind: int, generation: int) -> None:
        """There is a bucket that was not there."""
        generations = self._generations.setdefault(kind, [])
        if generations and generation < generations[-1]:
            insort(generations, generation)
        else:
            generations.append(generation)
        now = self._generation
        if now != self._clock.now:
            return
        number = bin_of(now - generation)
        place = number << KIND_BITS | kind
        score = self._listed.get(place)
        if score is None:
            score = -self._scores(kind & MAX_CLASSES - 1)[number] * WORTH[kind >> CLASS_BITS]
            self._listed[place] = score
            insort(self._line, (score, place))
        if score >= self._line[-1][0]:
            self._first = []

    def _find_first(self) -> list[tuple[int, Any]]:
        """The heap of the next victim; an empty one if there is none."""
        if self._generation != self._clock.now:
            self._sort()
        self._first = []
        line = self._line
        while line:
            score, place = line[-1]
            heap = self._oldest(place)
            if heap:
                self._level = place >> CLASS_BITS & MOST_LEVELS - 1
                if len(line) > 1 and line[-2][0] == score:
                    return self._oldest_of_equals(score, heap)
                self._first = heap
                return heap
            line.pop()
            del self._listed[place]
        return []

    def _oldest_of_equals(self, score: float, heap: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
        """Of the heaps with the lowest score the one whose first candidate is the oldest."""
        for other_score, place in self._line[-2::-1]:
            if other_score != score:
                break
            other = self._oldest(place)
            if other and other[0][0] < heap[0][0]:
                heap = other
                self._level = place >> CLASS_BITS & MOST_LEVELS - 1
        return heap

    def _oldest(self, place: int) -> list[tuple[int, Any]]:
        """The heap of the oldest candidates of a place; an empty list if there is none."""
        kind, number = place & KINDS - 1, place >> KIND_BITS
        generations = self._generations[kind]
        at = bisect_left(generations, self._generation - OLDEST[number])
        last = self._generation - YOUNGEST[number]
        while at < len(generations) and generations[at] <= last:
            key = generations[at] << KIND_BITS | kind
            heap = self._heaps.get(key)
            if heap is None:
                heap = self._heaps[key] = list(paired(self._waiting.pop(key)))
                heapify(heap)
            if heap:
                return heap
            del self._heaps[key], generations[at]
        return []

    def _sort(self) -> None:
        """Make the line anew."""
        now = self._generation = self._clock.now
        listed = self._listed = {}
        for kind, generations in self._generations.items():
            if not generations:
                continue
            scores = self._scores(kind & MAX_CLASSES - 1)
            worth = WORTH[kind >> CLASS_BITS]
            at = 0
            while at < len(generations):
                number = bin_of(now - generations[at])
                listed[number << KIND_BITS | kind] = -scores[number] * worth
                at = bisect_left(generations, now - YOUNGEST[number] + 1, at)
        self._line = sorted(zip(listed.values(), listed))

    def _scores(self, its_class: int) -> list[float]:
        """Per unit of age, by bin."""
        if self._rates is None:
            return NOTHING_LEARNT if self._cost is None else AGE_ALONE
        return self._rates.scores(its_class, self.tau / self._clock.unit)
