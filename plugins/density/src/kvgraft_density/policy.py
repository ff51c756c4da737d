"""The policy `density`: evicts the data with the fewest expected reuses per time that it stays.

Data is sorted by the class of its last use, see `Density.classify`, and its age. It learns while
serving how likely data of a class is reused at an age, see `kvgraft_density.learning`. It has no
parameters, no clock but the tokens that requests use, and no randomness. Until something is learnt,
and among equal scores, the least recently used data is evicted first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from itertools import islice
from math import isqrt
from typing import Any, Final

from kvgraft.compiled import mypyc_attr
from kvgraft.policies.policy import (
    CLASS_BITS,
    LEFT_BEHIND,
    MAX_CLASSES,
    PIECE_TOKENS,
    Hint,
    Order,
    Pool,
    Use,
    class_of,
    prefix_sums,
)
from kvgraft.policies.recency import RecencyQueue
from kvgraft.types import Tier
from kvgraft_density.learning import N_BINS, OLDEST, YOUNGEST, Prefixes, Rates, Visit, bin_of

__all__ = ["COARSER", "Clock", "Density", "DensityOrder", "level_of"]

AGAIN: Final = 1
RETURNING: Final = 2
HINTS = {Hint.CONTINUES: 4, Hint.TURN_ENDED: 8, Hint.OVER: 12}
HINT_BITS: Final = 12
PACE_SHIFT: Final = 4
"""The bits above hold the bin of the pace plus one; 0 without a pace."""

COARSER: Final = (AGAIN | RETURNING, ~HINT_BITS)
"""Bits of the coarser classes, see `Rates`: of the prompt, and with the pace."""

LEARN_EVERY: Final = 400
"""Requests between two computations of the scores."""

AGE_EVERY: Final = 25
"""Requests between two countings of prefixes that aged; at first scores are computed as often."""

GENERATIONS_AT_ONCE: Final = 2
"""After so many the places of candidates are listed anew, even if no victim was needed."""

GENERATIONS_KEPT: Final = 1 << 15
"""Generations whose stamps are known exactly; every other one of older generations is dropped."""

NOTHING_LEARNT = [0.0] * N_BINS
"""Initial scores if all data costs the same."""

AGE_ALONE = [1 / (youngest + 1) for youngest in YOUNGEST]
"""Initial scores if costs differ: recently used data is reused soon, at any scale."""

KIND_BITS: Final = CLASS_BITS + 6
"""Bits of a kind: a class, and above it the cost's level."""

KINDS: Final = 1 << KIND_BITS

MOST_LEVELS: Final = 1 << KIND_BITS - CLASS_BITS

WORTH: list[float] = [2.0 ** (level / 2) for level in range(MOST_LEVELS)]
"""Work that a reuse saves, by cost level."""


MOST_RANKED: Final = 512
"""Most places that are ranked anew in one request; the next order continues at the next request."""

MOST_RISEN: Final = 16
"""Most candidates that are skipped for one victim because their cost rose, as many do at once."""

MOST_ENTERED: Final = 512
"""Candidates that are found by their node alone: most are used again soon."""

MOVED_AT_ONCE: Final = 64
"""So many of them are sorted by stamp once there are so many more."""

MOVED_AT: Final = MOST_ENTERED + MOVED_AT_ONCE

MOST_ASKED: Final = 8
"""Candidates whose cost is asked for first at each victim, the least recently used ones.

A pool that evicts nothing asks for none.
"""


def level_of(cost: int) -> int:
    """The level of a cost: two levels per doubling."""
    return min((cost * cost).bit_length(), MOST_LEVELS - 1)


class Clock:
    """Counts generations: one per first bin's width of tokens that requests computed or reused.

    Attributes:
        unit: that width, in slots of the base pool.
        now: the current generation.
    """

    def __init__(self) -> None:
        self.unit = 1
        self.now = self._edges_of = 0
        self._stamps: list[int] = [-LEFT_BEHIND]
        self._generations: list[int] = [0]
        self._edges = [-LEFT_BEHIND] * N_BINS + [LEFT_BEHIND]

    def note(self, stamp: int, used: int) -> None:
        """Note the tokens used, in slots, at this stamp."""
        now = used // self.unit
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
        """The generation of a stamp."""
        return self._generations[max(0, bisect_left(self._stamps, stamp) - 1)]

    def edges(self) -> list[int]:
        """By bin of ages, the last stamp that is too old for it; behind them the greatest of all.

        Stamps of bin `n` are above `[n]` and not above `[n - 1]`; index -1 is the last entry. The
        same list until a generation begins.
        """
        if self._edges_of != self.now:
            self._edges_of = self.now
            firsts = [max(0, self.now - oldest) for oldest in OLDEST]
            edges = [self._stamps[bisect_left(self._generations, first)] for first in firsts]
            self._edges = [*edges, LEFT_BEHIND]
        return self._edges


@mypyc_attr(allow_interpreted_subclasses=True)
class Density:
    """Scores data by expected reuses per stay, learnt per class and age."""

    name = "density"
    classifies = True

    def __init__(self) -> None:
        self.clock = Clock()
        self.orders: list[DensityOrder] = []
        self._bases: dict[Tier, Pool] = {}
        """The base component's pool by tier."""
        self.prefixes = Prefixes(1, 1)
        self._learning: Rates | None = None
        """Rates that orders get once their scores are computed, a class with each request."""
        self._n_taught = 0
        """Orders that have them."""
        self._n_uses = 0
        self._is_aged = True  # whether all prefixes that had grown older were counted
        self._n_tokens = 0  # of all prompts and outputs
        self._used = 0
        """The time: these tokens in slots; hits do not slow it down."""
        self._slots = self._slots_tokens = 1  # of the base component's largest pool

    def order(self, pool: Pool) -> Order:
        """An order by learnt scores, and by the cost of losing data if costs differ."""
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

    def classify(self, use: Use) -> tuple[int, Any]:
        """Whether half of the prompt was seen before, how often, and at which pace.

        Evicted data counts as seen. The class says whether the longest seen prefix was used more
        than once. From the third use on it also has the mean of the tokens between its uses, where
        each interval has half the weight of the next. The mean has the bins of ages.
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
            pace = self._used - last.clock
            if last.pace is not None:
                pace = isqrt(pace * last.pace)
                its_class |= bin_of(pace // self.clock.unit) + 1 << PACE_SHIFT
            visit.pace = pace
        visit.its_class = its_class
        return its_class, visit

    def admitted(self, use: Use, stamp: int) -> None:
        """Count the prefixes of the prompt as used."""
        self._n_tokens += use.prompt_tokens
        used = self._used = self._n_tokens * self._slots // self._slots_tokens
        self.clock.note(stamp, used)
        self.prefixes.used(use.memo, used)
        self._n_uses += 1
        if self._learning is not None:
            self._go_on_learning(self._learning)
        is_turn = not self._n_uses % AGE_EVERY
        if is_turn or not self._is_aged:
            self._is_aged = self.prefixes.age(used)
            is_due = is_turn and (self._n_uses <= LEARN_EVERY or not self._n_uses % LEARN_EVERY)
            if is_due and self._learning is None and self.prefixes.n_reuses:
                self._learning = Rates(self.prefixes, COARSER)

    def _go_on_learning(self, rates: Rates) -> None:
        """Compute the scores of one more class, or publish all; no request computes many.

        No request ranks many places either: orders with many take the scores one after the other.
        """
        if rates.unscored:
            its_class = rates.unscored.pop()
            for base in self._bases.values():
                rates.scores(its_class, base.capacity / self.clock.unit)
            return
        n_ranked = 0
        while self._n_taught < len(self.orders) and n_ranked < MOST_RANKED:
            n_ranked += self.orders[self._n_taught].learn(rates)
            self._n_taught += 1
        if self._n_taught == len(self.orders):
            self._learning, self._n_taught = None, 0

    def finished(self, use: Use, stamp: int, hint: Hint | None) -> int:
        """The request's final class, with the engine's hint."""
        visit: Visit = use.memo
        n_tokens = len(use.tokens) // 4
        if n_tokens > use.prompt_tokens:
            self._n_tokens += n_tokens - use.prompt_tokens
            self._used = self._n_tokens * self._slots // self._slots_tokens
            self.clock.note(stamp, self._used)
        its_class = visit.its_class if hint is None else visit.its_class | HINTS[hint]
        sums = visit.sums
        if len(sums) < n_tokens // PIECE_TOKENS:
            sums = prefix_sums(use, n_tokens)
        self.prefixes.ended(visit, sums, its_class, self._used)
        return its_class

    def describe(self, use_class: int) -> str:
        """Describe a class in words."""
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
    """The candidates of one pool, by class, cost and age.

    Candidates of one kind (class and cost level) are in a queue by stamp. A place is a kind and a
    bin of ages, so a range of stamps: candidates age without being moved.

    If costs differ, a score is multiplied by the cost of a reuse. A cost that rose while a
    candidate waited, because others were evicted, is noticed when the candidate is popped, for at
    most `MOST_RISEN` candidates per victim. A cost that fell is noticed later: one candidate is
    asked again with each victim.

    Costs are asked for where a pool evicts, `MOST_ASKED` with each victim. So when a pool with many
    candidates begins to evict, its first victims are the worst of the least recently used ones.

    Args:
        base: the base component's pool on this tier.
        clock: counts generations.
        cost: the cost of losing a node, 0 or more; None if all cost the same.

    Attributes:
        tau: horizon of the scores, in slots: the capacity of the base component's pool on this tier
            when they were learnt. Data stays that long, and longer if much is reused.
    """

    def __init__(self, base: Pool, clock: Clock, cost: Callable[[Any], int] | None = None) -> None:
        self._cost = cost
        self._entered: dict[int, tuple[int, Any]] = {}
        """Those entered last, by identity of the node; their cost was not asked for yet."""
        self._unasked = RecencyQueue()
        """Those entered before them whose cost was not asked for yet either."""
        self._turn = (0, 0, 0)
        """Kind, chunk and place in it of the candidate whose cost is asked for again next."""
        self.tau = base.capacity
        self._base = base
        self._clock = clock
        self._rates: Rates | None = None
        self._known: dict[int, list[float]] = {}
        """Scores by class, as far as these rates were asked for them."""
        self._queues: dict[int, RecencyQueue] = {}
        """Candidates by kind."""
        self._kinds: dict[int, list[int]] = {}
        """Kinds by class."""
        self._bins: dict[int, int] = {}
        """The bins of a kind that are listed, one bit each."""
        self._line: list[tuple[float, int]] = []
        """Score below 0 and place of all candidates there are, the lowest score last. The bin of a
        place stands above the kind. Some may have no candidates left."""
        self._listed: dict[int, float] = {}
        """The scores in the line by place."""
        self._edges = clock.edges()
        self._rising = [-edge for edge in self._edges[:N_BINS]]
        self._generation = clock.now
        """The generation that these edges are of; they hold for what is entered later, too."""
        self._place = -1
        """The only place of the lowest score; below 0 where it is not known."""

    def push(self, stamp: int, node: Any) -> None:
        """Enter a candidate."""
        if self._cost is None:
            self._put(stamp, node, 0)
            return
        entered = self._entered
        entered[id(node)] = stamp, node
        if len(entered) >= MOVED_AT:
            for which in list(islice(entered, MOVED_AT_ONCE)):
                self._unasked.push(*entered.pop(which))

    def withdraw(self, stamp: int, node: Any) -> None:
        """Drop a candidate that was entered with that stamp."""
        if self._cost is not None:
            entered = self._entered.get(id(node))
            if entered is not None and entered[0] == stamp:
                del self._entered[id(node)]
                return
            if self._unasked.drop(stamp, node):
                return
        kinds = self._kinds[stamp & MAX_CLASSES - 1]
        for at, kind in enumerate(kinds):
            if self._queues[kind].drop(stamp, node):
                if at:  # kinds of many candidates come to stand first
                    kinds[at - 1], kinds[at] = kind, kinds[at - 1]
                return
        raise LookupError(f"{node!r} is not entered with stamp {stamp}")

    def pop(self) -> tuple[int, Any] | None:
        """Take the candidate of the lowest score, the oldest among equals."""
        cost = self._cost
        if cost is not None:
            self._ask(cost)
            self._ask_again(cost)
        n_risen = 0
        while (taken := self._pop()) is not None:
            stamp, node, level = taken
            if cost is None:
                return stamp, node
            now = level_of(cost(node))
            if now <= level or n_risen == MOST_RISEN:
                return stamp, node
            n_risen += 1
            self._put(stamp, node, now)
        return None

    def learn(self, rates: Rates) -> int:
        """Take new rates of reuse by class; returns how many places were ranked."""
        self._rates, self._known = rates, {}
        self.tau = self._base.capacity
        self._place = -1
        scores = {each: self._scores(each) for each in self._kinds}
        self._listed = {
            place: -scores[place & MAX_CLASSES - 1][place >> KIND_BITS]
            * WORTH[place >> CLASS_BITS & MOST_LEVELS - 1]
            for place in self._listed
        }
        self._line = sorted(zip(self._listed.values(), self._listed))
        return len(self._line)

    def score(self, stamp: int) -> float | None:
        """Expected reuses in a stay of `tau`; 0 until something is learnt.

        None if costs differ, since a stamp does not say the cost.
        """
        if self._cost is not None:
            return None
        clock = self._clock
        scores = self._known.get(stamp & MAX_CLASSES - 1) or self._scores(class_of(stamp))
        return scores[bin_of(clock.now - clock.at(stamp))] * self.tau / clock.unit

    def __len__(self) -> int:
        n_asked = sum(map(len, self._queues.values()))
        return len(self._entered) + len(self._unasked) + n_asked

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Every candidate with its stamp, in any order."""
        yield from self._entered.values()
        for queue in (self._unasked, *self._queues.values()):
            yield from queue

    # -- inside

    def _ask(self, cost: Callable[[Any], int]) -> None:
        """Ask for the cost of candidates for the first time, of at most `MOST_ASKED`."""
        for _ in range(MOST_ASKED):
            entry = self._unasked.pop()
            if entry is None:
                if not self._entered:
                    break
                entry = self._entered.pop(next(iter(self._entered)))
            self._put(*entry, level_of(cost(entry[1])))

    def _ask_again(self, cost: Callable[[Any], int]) -> None:
        """Ask for the next candidate's cost again, and move the candidate if it fell."""
        kind, chunk, at = self._turn
        queue = self._queues.get(kind)
        entry = None if queue is None else queue.entry(chunk, at)
        if queue is None or entry is None:  # end of a chunk, or of a kind
            kinds = sorted(self._queues)
            if queue is not None and at:
                self._turn = kind, chunk + 1, 0
            elif kinds:
                self._turn = kinds[bisect_left(kinds, kind + 1) % len(kinds)], 0, 0
            return
        self._turn = kind, chunk, at + 1
        stamp, node = entry
        level = level_of(cost(node))
        if level < kind >> CLASS_BITS:
            queue.drop(stamp, node)
            self._put(stamp, node, level)

    def _put(self, stamp: int, node: Any, level: int) -> None:
        kind = level << CLASS_BITS | stamp & MAX_CLASSES - 1
        queue = self._queues.get(kind)
        if queue is None:
            queue, self._bins[kind] = RecencyQueue(), 0
            self._queues[kind] = queue
            self._kinds.setdefault(class_of(stamp), []).append(kind)
        queue.push(stamp, node)
        if self._clock.now >= self._generation + GENERATIONS_AT_ONCE:
            self._grow_older()
        place = bisect_right(self._rising, -stamp) << KIND_BITS | kind
        if place not in self._listed and self._list(place) >= self._line[-1][0]:
            self._place = -1

    def _pop(self) -> tuple[int, Any, int] | None:
        """Take the candidate of the lowest listed score; returns it with its cost level."""
        while True:
            if self._generation != self._clock.now:
                self._grow_older()
            place = self._place if self._place >= 0 else self._find_place()
            if place < 0:
                return None
            queue, above, until = self._range(place)
            entry = queue.take_first(above, until)
            if entry is not None:
                return entry[0], entry[1], place >> CLASS_BITS & MOST_LEVELS - 1
            self._place = -1

    def _range(self, place: int) -> tuple[RecencyQueue, int, int]:
        """The queue of a place, and its range of stamps: above the first, not above the second."""
        number = place >> KIND_BITS
        return self._queues[place & KINDS - 1], self._edges[number], self._edges[number - 1]

    def _find_place(self) -> int:
        """The place of the next victim; negative if there is none."""
        line, listed = self._line, self._listed
        first, found, n_equal = None, -1, 0
        for at in range(len(line) - 1, -1, -1):
            score, place = line[at]
            if first is not None and score != listed[found]:
                break
            queue, above, until = self._range(place)
            entry = queue.first(above, until)
            if entry is None:
                del line[at], listed[place]
                self._bins[place & KINDS - 1] ^= 1 << (place >> KIND_BITS)
                continue
            n_equal += 1
            if first is None or entry < first:
                first, found = entry, place
        self._place = found if n_equal == 1 else -1
        return found

    def _grow_older(self) -> None:
        """Candidates have come to other places: list those."""
        self._generation, self._place = self._clock.now, -1
        edges = self._edges = self._clock.edges()
        rising = self._rising = [-edge for edge in edges[:N_BINS]]
        gone = [kind for kind, queue in self._queues.items() if queue.entry(0, 0) is None]
        for kind in gone:
            del self._queues[kind], self._bins[kind]
            self._kinds[class_of(kind)].remove(kind)
        if gone:
            self._line = [each for each in self._line if each[1] & KINDS - 1 in self._queues]
            self._listed = {place: score for score, place in self._line}
        #   bins of a kind, the youngest first:   . x x . x . . .      x listed
        #   its oldest candidate is here:                     ^        so it may have come to a ?
        #                                               ?   ? ?
        for kind, queue in self._queues.items():
            oldest, bins = queue.entry(0, 0), self._bins[kind]
            assert oldest is not None
            unlisted = (2 << bisect_right(rising, -oldest[0])) - 1 & -(bins & -bins) & ~bins
            while unlisted:
                number = (unlisted & -unlisted).bit_length() - 1
                unlisted &= unlisted - 1
                if queue.first(edges[number], edges[number - 1]) is not None:
                    self._list(number << KIND_BITS | kind)

    def _list(self, place: int) -> float:
        score = self._listed[place] = self._rank(place)
        self._bins[place & KINDS - 1] |= 1 << (place >> KIND_BITS)
        insort(self._line, (score, place))
        return score

    def _rank(self, place: int) -> float:
        """The score of a place per unit of age, times the work that a reuse saves; negated."""
        score = self._scores(place & MAX_CLASSES - 1)[place >> KIND_BITS]
        return -score * WORTH[place >> CLASS_BITS & MOST_LEVELS - 1]

    def _scores(self, its_class: int) -> list[float]:
        """Scores per unit of age, by bin."""
        if self._rates is None:
            return NOTHING_LEARNT if self._cost is None else AGE_ALONE
        scores = self._known.get(its_class)
        if scores is None:
            scores = self._rates.scores(its_class, self.tau / self._clock.unit)
            self._known[its_class] = scores
        return scores
