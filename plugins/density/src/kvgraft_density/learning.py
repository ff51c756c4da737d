"""The policy's knowledge: prefixes that were seen, how they came back, what a class is worth.

A bounded directory holds the checksum of each prefix, see `kvgraft.policies.policy`, with its last
use. Of some, at least one in sixteen, the class of that use and its age are kept: from these the
policy learns how likely data of a class comes back at an age. The garbage collector visits none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from kvgraft.compiled import mypyc_attr
from kvgraft.policies.policy import PIECE_TOKENS
from kvgraft.policies.recency import RecencyQueue, untrack

__all__ = [
    "N_BINS",
    "OLDEST",
    "YOUNGEST",
    "Prefixes",
    "Rates",
    "Trail",
    "Visit",
    "bin_of",
    "bin_width",
]

FEWEST_SAMPLED: Final = 15
"""A prefix whose checksum ends in these bits as zeros is learnt from, in a large directory."""

ENOUGH_SAMPLES: Final = 2048
"""A smaller directory learns from more of its prefixes, or from all."""

REMEMBERED_CAPACITIES: Final = 8
"""The directory holds as many prefixes as so many times the largest pool has tokens for."""

PART_SHIFT: Final = 56
"""A checksum's bits above it number the part of the directory: a large dictionary grows slowly."""

MOST_AGED: Final = 512
"""Samples that `Prefixes.age` looks at in one call."""

N_BINS: Final = 14
"""Bins of age, each twice as wide as the one before; the last one is open."""

UNITS: Final = 64
"""Bins of the width of the first one that make the base pool's capacity."""

YOUNGEST = [0 if number == 0 else 1 << number - 1 for number in range(N_BINS)]
"""The least age of each bin, in units."""

OLDEST = [*[(1 << number) - 1 for number in range(N_BINS - 1)], 1 << 62]
"""The greatest."""


def bin_of(age: int) -> int:
    """The bin of an age in units."""
    number = age.bit_length()
    return number if number < N_BINS else N_BINS - 1


def bin_width(number: int) -> int:
    """The width of a bin, in units."""
    return 1 if number < 2 else 1 << number - 1


@mypyc_attr(acyclic=True)
class Trail:
    """A sequence as it was used last; it grows with the requests that continue it.

    Attributes:
        sums: checksums of its prefixes; none once it is forgotten.
        sampled: those of them that are learnt from.
        n_seen: how many of them had been used before its last use.
        clock: when that ended; while it runs, when it was admitted.
        pace: slots' tokens used between its uses, as a mean; None at the first.
        number: of its last use, among those of all; 0 where it is not remembered.
    """

    __slots__ = ("clock", "n_seen", "number", "pace", "sampled", "sums")

    def __init__(self) -> None:
        self.number = 0
        self.sums: list[int] = []
        self.sampled: list[int] = []
        self.n_seen = 0
        self.clock = 0
        self.pace: int | None = None
        untrack((self, self.sampled))


class Visit:
    """A request's use of its prefixes.

    Attributes:
        sums: checksums of the prompt's prefixes.
        n_seen: how many of them were seen before.
        trail: the last use of the longest of those, None where there is none; once the request is
            admitted its own.
        pace: as in `Trail`.
        its_class: its class before its end.
    """

    def __init__(self, sums: list[int], n_seen: int, trail: Trail | None) -> None:
        self.sums = sums
        self.n_seen = n_seen
        self.trail = trail
        self.pace: int | None = None
        self.its_class = 0


@mypyc_attr(acyclic=True)
class _Sample:
    """A prefix that is learnt from, since its last use.

    Attributes:
        its_class, clock: class and time of that use.
        number: the bin of age that it was counted to reach.
        is_away: whether it was not used again, nor forgotten.
    """

    __slots__ = ("clock", "is_away", "its_class", "number")

    def __init__(self, its_class: int, clock: int) -> None:
        self.its_class = its_class
        self.clock = clock
        self.number = 0
        self.is_away = True
        untrack((self,))


class Prefixes:
    """The directory, and how often prefixes of each class came back by age.

    Ages are counted in slots of that pool, by the tokens that requests used: the same on every
    rank, whatever the traffic's speed, and whatever is hit. The first bin is a unit wide.

    Args:
        capacity: slots of that pool.
        tokens: tokens that the largest tier holds.

    Attributes:
        unit: slots.
        reached: by class, how many prefixes reached each bin; counted by `age`.
        reused: by class, how many of them were used again in it.
        n_reuses, n_returns: how many were used again, and by how many requests.
    """

    def __init__(self, capacity: int, tokens: int) -> None:
        self.unit = max(1, capacity // UNITS)
        self.most = max(64, REMEMBERED_CAPACITIES * tokens // PIECE_TOKENS)
        self.reached: dict[int, list[int]] = {}
        self.reused: dict[int, list[int]] = {}
        self.n_reuses = self.n_returns = 0
        share = max(1, self.most // ENOUGH_SAMPLES)
        self._sampled = min(FEWEST_SAMPLED, (1 << share.bit_length() - 1) - 1)
        self._trails: list[dict[int, Trail]] = [{} for _ in range(1 << 64 - PART_SHIFT)]
        """The last use of each prefix, by part."""
        self._n_prefixes = self._n_uses = self._n_away = 0
        self._uses = RecencyQueue()
        """All that are remembered, the one used least recently first."""
        self._n_sums = 0
        """Checksums in them."""
        self._away: list[dict[int, _Sample]] = [{} for _ in self._trails]
        """Sampled prefixes that were not used since, by part."""
        self._ageing: list[deque[_Sample]] = [deque() for _ in range(N_BINS - 1)]
        """They in the bin they have reached, but the last one; oldest first, and some of before."""
        self._swept: list[deque[_Sample]] = [deque() for _ in self._ageing]
        """Those of a bin that are older than the ones in `_ageing`: it is being swept."""
        untrack((*self._ageing, *self._swept))

    def visit(self, sums: list[int]) -> Visit:
        """A use of prefixes, and what is remembered of them; changes nothing. The list is kept."""
        #   seen ├───────────────────────┤?       ?   ?  ?│ len(sums)      steps double, backwards,
        #        shorter ones of a seen prefix were, unless forgotten      and halve again
        n_seen, unseen, step = len(sums), len(sums) + 1, 1
        while n_seen > 0 and self._trail_of(sums[n_seen - 1]) is None:
            unseen, n_seen, step = n_seen, n_seen - step, 2 * step
        n_seen = max(n_seen, 0)
        while unseen - n_seen > 1:
            middle = (n_seen + unseen) // 2
            if self._trail_of(sums[middle - 1]) is None:
                unseen = middle
            else:
                n_seen = middle
        return Visit(sums, n_seen, self._trail_of(sums[n_seen - 1]) if n_seen else None)

    def used(self, visit: Visit, clock: int) -> None:
        """A request uses prefixes; of those seen before this is a reuse. O(new prefixes)."""
        sums, trail = visit.sums, visit.trail
        if trail is None or len(trail.sums) != visit.n_seen:
            trail = visit.trail = Trail()
        if sums:
            self._extend(trail, sums)
            self._used_last(trail)
        trail.n_seen, trail.clock, trail.pace = visit.n_seen, clock, visit.pace
        n_reuses = self.n_reuses
        for each in trail.sampled:
            sample = self._take(each)
            if sample is None:
                continue
            self.n_reuses += 1
            number = bin_of((clock - sample.clock) // self.unit)
            self.reused.setdefault(sample.its_class, [0] * N_BINS)[number] += 1
            row = self.reached[sample.its_class]
            for passed in range(sample.number + 1, number + 1):
                row[passed] += 1
        self.n_returns += self.n_reuses > n_reuses
        while self._n_prefixes > self.most or self._n_sums > 4 * self.most:
            self._forget_oldest()

    def ended(self, visit: Visit, sums: list[int], its_class: int, clock: int) -> None:
        """The request ends: its prefixes are of age 0, and of the class that is known by now.

        `sums` are those of the prompt and of more that it computed.
        """
        trail = visit.trail
        assert trail is not None
        trail.clock = clock
        its = trail.sums
        if len(its) == len(visit.sums) < len(sums) and its[-1:] == sums[: len(its)][-1:]:
            self._extend(trail, sums)  # nobody went on with it, nor forgot it, nor cut its key
        for each in trail.sampled:
            sample = self._take(each)
            if sample is not None:  # it was never away
                row = self.reached[sample.its_class]
                for number in range(sample.number + 1):
                    row[number] -= 1
            sample = _Sample(its_class, clock)
            part = self._away[each >> PART_SHIFT]
            part[each] = sample
            untrack((part,))
            self._n_away += 1
            self._ageing[0].append(sample)
            self.reached.setdefault(its_class, [0] * N_BINS)[0] += 1

    def age(self, clock: int) -> bool:
        """Count bins that prefixes have reached while they were away; whether that is all.

        Looks at `MOST_AGED` samples at most. Those that are away no more leave a bin at its front,
        or as it is swept once most of it is of such:

            _swept[bin]     _ageing[bin]
            o o o o      ◄─ x o x x o x x     o away, x used again or forgotten
        """
        left = MOST_AGED
        for number in range(1, N_BINS):
            ageing, swept = self._ageing[number - 1], self._swept[number - 1]
            until = clock - (self.unit << number - 1)  # used before that: behind the bin before
            while True:
                oldest = swept or ageing
                if not oldest or oldest[0].clock > until:
                    break
                if not left:
                    return False
                left -= 1
                sample = oldest.popleft()
                if sample.is_away:
                    sample.number = number
                    self.reached[sample.its_class][number] += 1
                    if number < N_BINS - 1:
                        self._ageing[number].append(sample)
            if swept or len(ageing) > 2 * self._n_away + 64:
                while ageing and left:
                    left -= 1
                    sample = ageing.popleft()
                    if sample.is_away:
                        swept.append(sample)
                if not ageing:
                    self._ageing[number - 1], self._swept[number - 1] = swept, ageing
        return True

    # -- inside

    def _trail_of(self, prefix: int) -> Trail | None:
        """The last use of a prefix; None where it was not seen, or is forgotten."""
        return self._trails[prefix >> PART_SHIFT].get(prefix)

    def _extend(self, trail: Trail, sums: list[int]) -> None:
        """The trail goes on with those of `sums` that it does not have."""
        n_sums = len(trail.sums)
        if not n_sums:
            self._used_last(trail)
            self._n_sums += 1
        for each in sums[n_sums:]:
            part = self._trails[each >> PART_SHIFT]
            self._n_prefixes += each not in part
            part[each] = trail
            untrack((part,))
            if not each & self._sampled:
                trail.sampled.append(each)
        self._n_sums += len(sums) - n_sums
        trail.sums = sums
        untrack((sums,))

    def _used_last(self, trail: Trail) -> None:
        if trail.number:
            self._uses.drop(trail.number, trail)
        self._n_uses += 1
        trail.number = self._n_uses
        self._uses.push(trail.number, trail)

    def _forget_oldest(self) -> None:
        oldest = self._uses.pop()
        assert oldest is not None
        trail: Trail = oldest[1]
        sums, trail.sums, trail.sampled, trail.number = trail.sums, [], [], 0
        self._n_sums -= 1 + len(sums)
        for each in sums:
            part = self._trails[each >> PART_SHIFT]
            if part.get(each, trail) is trail:  # no other's
                self._n_prefixes -= part.pop(each, None) is not None
                self._take(each)

    def _take(self, prefix: int) -> _Sample | None:
        """A sampled prefix is used or forgotten: its sample, if it has one, grows no older."""
        sample = self._away[prefix >> PART_SHIFT].pop(prefix, None)
        if sample is not None:
            sample.is_away = False
            self._n_away -= 1
        return sample


# A class is refined in steps: what was known of the prompt, how fast its sequence goes on, the hint
# at its end. A class with few samples is taken to be as the coarser one before it.
#
#     q[class, bin] = (reused + k * q[coarser class, bin]) / (reached + k)
#     score[class, bin] = expected reuses within tau / expected stay within tau
#
# where `k` is as many prefixes as forty requests reuse (the prefixes of one request come back
# together), and `tau` is how long data stays: the capacity of the base component's pool on that
# tier. For each slot given out one is given back (Little's law). In the coarsest class of all, a
# bin with few samples is as the one before: sequences that grow come back at ages at which nothing
# did so far.

PRIOR_REQUESTS: Final = 40
"""How many requests the coarser class counts for."""

WIDTHS = [float(bin_width(number)) for number in range(N_BINS)]
NONE = [0] * N_BINS


class Rates:
    """The rates at one moment: samples that are counted later change nothing.

    Args:
        prefixes: the samples.
        masks: bits of a class that its coarser classes have, the coarsest first.

    Attributes:
        unscored: classes whose scores were not asked for so far; the caller keeps it.
    """

    def __init__(self, prefixes: Prefixes, masks: tuple[int, ...]) -> None:
        reached, reused = prefixes.reached, prefixes.reused
        self.unscored = list(reached)
        self._prior = PRIOR_REQUESTS * max(1.0, prefixes.n_reuses / max(1, prefixes.n_returns))
        self._steps = [
            (mask, _coarse(reached, mask), _coarse(reused, mask)) for mask in (*masks, -1)
        ]
        all_reached, all_reused = _sum(reached.values()), _sum(reused.values())
        rate = sum(all_reused) / max(1, sum(all_reached))
        self._pooled: list[float] = []
        for r, n in zip(all_reused, all_reached):
            rate = self._shrunk(r, n, rate)
            self._pooled.append(rate)
        self._scores: dict[tuple[int, float], list[float]] = {}

    def of(self, its_class: int) -> list[float]:
        """How likely data of a class that reached a bin comes back in it."""
        rates = self._pooled
        for mask, reached, reused in self._steps:
            key = its_class & mask
            row = reached.get(key)
            if row is not None:
                rates = list(map(self._shrunk, reused.get(key, NONE), row, rates))
        return rates

    def scores(self, its_class: int, tau: float) -> list[float]:
        """Expected reuses per unit of age, for data of a class that just reached each bin.

        `tau` is in units.
        """
        scores = self._scores.get((its_class, tau))
        if scores is None:
            rates = self.of(its_class)
            scores = [_score(rates, first, tau) for first in range(N_BINS)]
            self._scores[its_class, tau] = scores
        return scores

    def _shrunk(self, reused: int, reached: int, prior: float) -> float:
        return min((reused + self._prior * prior) / (reached + self._prior), 1.0)


def _score(rates: list[float], first: int, tau: float) -> float:
    unused, reuses, stay, left = 1.0, 0.0, 0.0, tau
    number = first
    while left > 0 and unused > 1e-6:
        width, rate = WIDTHS[number], rates[number]
        if left < width:
            rate = 1 - (1 - rate) ** (left / width)
            width = left
        reuses += unused * rate
        stay += unused * width * (1 - rate / 2)
        unused *= 1 - rate
        left -= width
        number = min(number + 1, N_BINS - 1)
    return reuses / stay


def _sum(rows: Iterable[list[int]]) -> list[int]:
    return [sum(column) for column in zip(NONE, *rows)]


def _coarse(table: dict[int, list[int]], mask: int) -> dict[int, list[int]]:
    """Rows of the classes that agree in the bits of `mask`, added up."""
    rows: dict[int, list[list[int]]] = {}
    for its_class, row in table.items():
        rows.setdefault(its_class & mask, []).append(row)
    return {key: _sum(each) if len(each) > 1 else each[0].copy() for key, each in rows.items()}
