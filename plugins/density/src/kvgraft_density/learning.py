"""Learns from requests: prefixes that were seen, how they were reused, and scores of classes.

A bounded directory holds the checksum of each prefix, see `kvgraft.policies.policy`, with its last
use. From the class of that use, and its age when the prefix is used again, the policy learns how
likely data of a class comes back at an age. The garbage collector visits none of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain, repeat
from typing import Final

from kvgraft.compiled import mypyc_attr
from kvgraft.policies.policy import PIECE_TOKENS
from kvgraft.policies.recency import RecencyQueue, untrack

__all__ = [
    "N_BINS",
    "OLDEST",
    "UNITS",
    "YOUNGEST",
    "Prefixes",
    "Rates",
    "Trail",
    "Visit",
    "bin_of",
    "bin_width",
]

REMEMBERED_CAPACITIES: Final = 8
"""The directory holds the prefixes of so many times the tokens of the largest pool."""

PART_SHIFT: Final = 56
"""The bits above this one choose a part of the directory: one large dictionary would resize slowly.
"""

MOST_AGED: Final = 512
"""Stays that `Prefixes.age` looks at in one call."""

MOST_SWEPT: Final = 32
"""Trails that a request looks at to find some to forget, beside as many as its new prefixes."""

N_BINS: Final = 12
"""Bins of age, each twice as wide as the one before; the last one is open."""

UNITS: Final = 16
"""The base pool's capacity in widths of the first bin."""

YOUNGEST = [0 if number == 0 else 1 << number - 1 for number in range(N_BINS)]
"""The smallest age of each bin, in units."""

OLDEST = [*[(1 << number) - 1 for number in range(N_BINS - 1)], 1 << 62]
"""The largest age of each bin."""


def bin_of(age: int) -> int:
    """The bin of an age in units."""
    number = age.bit_length()
    return number if number < N_BINS else N_BINS - 1


def bin_width(number: int) -> int:
    """The width of a bin, in units."""
    return 1 if number < 2 else 1 << number - 1


@mypyc_attr(acyclic=True)
class Away:
    """The prefixes of a request since its end.

    Attributes:
        reached, reused: counts of the class of that end by bin of age, see `Prefixes`.
        clock: its time.
        n: how many of them were neither used again since, nor forgotten.
        number: the bin of age that they were counted to reach.
    """

    __slots__ = ("clock", "n", "number", "reached", "reused")

    def __init__(self, reached: list[int], reused: list[int], clock: int) -> None:
        self.reached = reached
        self.reused = reused
        self.clock = clock
        self.n = self.number = 0
        untrack((self,))


def _reach(away: Away, n: int, number: int) -> None:
    """So many prefixes had reached bins up to `number` that `Prefixes.age` did not count yet."""
    for passed in range(away.number + 1, number + 1):
        away.reached[passed] += n


@mypyc_attr(acyclic=True)
class Trail:
    """Prefixes that were always used together, each going on with the one before.

    Attributes:
        ident: its place among all; of a forgotten one another's.
        sums: their checksums; none once they are forgotten.
        end: how many prefixes the last one has, and itself.
        parent: the trail that they go on with; None at the start of a sequence.
        n_children: trails that go on with them.
        n_seen: how many of the prefixes up to `end` had been used before their last use.
        clock: the end of that use; while it runs, its admission.
        pace: slots' tokens used between their uses, as a mean; None at the first.
        away: they and others of that use since it ended; None while it runs.
        number: of their last use, among those of all.
        is_queued: whether they wait to be forgotten; trails that others go on with do so later.
    """

    __slots__ = (
        "away",
        "clock",
        "end",
        "ident",
        "is_queued",
        "n_children",
        "n_seen",
        "number",
        "pace",
        "parent",
        "sums",
    )

    def __init__(self, ident: int, sums: list[int], end: int, parent: Trail | None) -> None:
        self.ident = ident
        self.sums = sums
        self.end = end
        self.parent = parent
        self.n_children = self.n_seen = self.clock = self.number = 0
        self.pace: int | None = None
        self.away: Away | None = None
        self.is_queued = False
        untrack((self, sums))


class Visit:
    """A request's use of its prefixes.

    Attributes:
        sums: checksums of the prompt's prefixes.
        n_seen: how many of these were seen before.
        trail: that of the longest of those; None where there is none. Once the request is admitted
            that of its own last one.
        n_changes: changes of the directory before.
        pace: as in `Trail`.
        its_class: the request's class before its end.
    """

    __slots__ = ("its_class", "n_changes", "n_seen", "pace", "sums", "trail")

    def __init__(self, sums: list[int], n_seen: int, trail: Trail | None, n_changes: int) -> None:
        self.sums = sums
        self.n_seen = n_seen
        self.trail = trail
        self.n_changes = n_changes
        self.pace: int | None = None
        self.its_class = 0


class Prefixes:
    """The directory, and counts of reuses by class and age.

    Ages are tokens that requests used, in slots of the base pool. So they are the same on every
    rank, and depend neither on the speed of the traffic nor on hits. The first bin is one unit
    wide.

    Args:
        capacity: slots of the base pool.
        tokens: capacity of the largest tier in tokens.

    Attributes:
        unit: slots per unit of age.
        reached: by class, how many prefixes reached each bin; counted by `age`.
        reused: by class, how many of them were used again in it.
        n_reuses, n_returns: how many prefixes were used again, and by how many requests.
    """

    def __init__(self, capacity: int, tokens: int) -> None:
        self.unit = max(1, capacity // UNITS)
        self.most = max(64, REMEMBERED_CAPACITIES * tokens // PIECE_TOKENS)
        self.reached: dict[int, list[int]] = {}
        self.reused: dict[int, list[int]] = {}
        self.n_reuses = self.n_returns = 0
        self._trails: list[Trail] = []
        """By `Trail.ident`."""
        self._unnamed: list[int] = []
        """Places of forgotten ones there."""
        self._parts: list[dict[int, int]] = [{} for _ in range(1 << 64 - PART_SHIFT)]
        """The trail of each prefix, by part: numbers alone, which the collector does not visit."""
        self._n_prefixes = self._n_changes = self._n_uses = 0
        self._uses = RecencyQueue()
        """All trails, by the number of a use that may have been their last."""
        self._n_away = 0
        """Ended requests that have prefixes away."""
        self._ageing: list[deque[Away]] = [deque() for _ in range(N_BINS - 1)]
        """They in the bin they have reached, but the last one; oldest first, and some of before."""
        self._swept: list[deque[Away]] = [deque() for _ in self._ageing]
        """Those of a bin that are older than the ones in `_ageing`: it is being swept."""
        untrack((*self._ageing, *self._swept, self._trails))

    def visit(self, sums: list[int]) -> Visit:
        """A use of prefixes and the memory of them; changes nothing. It keeps the list."""
        #   seen ├───────────────────────┤?       ?   ?  ?│ len(sums)      steps double, backwards,
        #        shorter ones of a seen prefix were, unless forgotten      and halve again
        parts, ident = self._parts, None
        n_seen, unseen, step = len(sums), len(sums) + 1, 1
        while n_seen > 0:
            last = sums[n_seen - 1]
            ident = parts[last >> PART_SHIFT].get(last)
            if ident is not None:
                break
            unseen, n_seen, step = n_seen, n_seen - step, 2 * step
        n_seen = max(n_seen, 0)
        while unseen - n_seen > 1:
            middle = (n_seen + unseen) // 2
            last = sums[middle - 1]
            found = parts[last >> PART_SHIFT].get(last)
            if found is None:
                unseen = middle
            else:
                n_seen, ident = middle, found
        trail = None
        if ident is not None:
            trail = self._trails[ident]
            if not trail.end - len(trail.sums) < n_seen <= trail.end:
                n_seen, trail = 0, None  # another prefix has the same checksum
        return Visit(sums, n_seen, trail, self._n_changes)

    def used(self, visit: Visit, clock: int) -> None:
        """A request uses prefixes; for seen ones this is a reuse.

        O(new prefixes, and trails before them); where it is the first to leave a trail, also O(its
        prefixes up to there).
        """
        if visit.n_changes != self._n_changes:
            found = self.visit(visit.sums)
            visit.n_seen, visit.trail = found.n_seen, found.trail
        n_seen, pace, n_reused = visit.n_seen, visit.pace, 0
        above = visit.trail
        if above is not None and above.end > n_seen:
            above = visit.trail = self._cut(above, n_seen)
        n_uses = self._n_uses
        while above is not None:
            away, end = above.away, above.end
            if away is not None:
                # So many prefixes were used again, in the bin of their age.
                above.away = None
                n = len(above.sums)
                number = ((clock - away.clock) // self.unit).bit_length()
                if number >= N_BINS:
                    number = N_BINS - 1
                n_reused += n
                away.reused[number] += n
                if number > away.number:
                    _reach(away, n, number)
                away.n -= n
                if not away.n:
                    self._n_away -= 1
            n_uses += 1
            above.number = n_uses
            above.n_seen = n_seen if n_seen < end else end
            above.clock = clock
            above.pace = pace
            above = above.parent
        self._n_uses = n_uses
        if n_reused:
            self.n_reuses += n_reused
            self.n_returns += 1
        sums = visit.sums
        if n_seen < len(sums):
            trail = visit.trail = self._grown(visit.trail, sums, n_seen)
            trail.n_seen, trail.clock, trail.pace = n_seen, clock, pace
        if self._n_prefixes > self.most:
            self._forget(MOST_SWEPT + len(sums) - n_seen)

    def ended(self, visit: Visit, sums: list[int], its_class: int, clock: int) -> None:
        """The request ends: its prefixes have age 0 and its final class.

        `sums` are those of the prompt and of its output.
        """
        if not sums:
            return
        trail = visit.trail
        if trail is None or trail.end != len(sums) or trail.sums[-1] != sums[-1]:
            found = self.visit(sums)  # it computed more, or its key was cut, or it is forgotten
            trail = found.trail
            if trail is not None and trail.end > found.n_seen:
                trail = self._cut(trail, found.n_seen)
            if trail is not None and trail.away is not None:
                self._was_there(trail.away, len(trail.sums))
                trail.away = None
            if found.n_seen < len(sums):
                trail = self._grown(trail, sums, found.n_seen)
        reached = self.reached.get(its_class)
        if reached is None:
            reached = self.reached[its_class] = [0] * N_BINS
            self.reused[its_class] = [0] * N_BINS
        away = Away(reached, self.reused[its_class], clock)
        n_uses = self._n_uses
        while trail is not None:
            if trail.away is not None:
                self._was_there(trail.away, len(trail.sums))
            trail.away = away
            trail.clock = clock
            n_uses += 1
            trail.number = n_uses
            trail = trail.parent
        self._n_uses = n_uses
        self._n_away += 1
        self._ageing[0].append(away)
        away.n = n = len(sums)
        reached[0] += n

    def age(self, clock: int) -> bool:
        """Count the bins that unused prefixes have reached; returns whether all were counted.

        Looks at `MOST_AGED` of them at most. Those that came back leave a bin at its front, or as
        it is swept once most of it is of such:

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
                away = oldest.popleft()
                if away.n:
                    away.number = number
                    away.reached[number] += away.n
                    if number < N_BINS - 1:
                        self._ageing[number].append(away)
            if swept or len(ageing) > 2 * self._n_away + 64:
                while ageing and left:
                    left -= 1
                    away = ageing.popleft()
                    if away.n:
                        swept.append(away)
                if not ageing:
                    self._ageing[number - 1], self._swept[number - 1] = swept, ageing
        return True

    # -- inside

    def _grown(self, trail: Trail | None, sums: list[int], n_seen: int) -> Trail:
        """The trail of the prefixes that go on with those of `trail`; it is not away."""
        if trail is None or trail.n_children:
            if trail is not None:
                trail.n_children += 1
            trail = self._new([], n_seen, trail)
        new = sums[n_seen:]
        trail.sums += new
        trail.end = len(sums)
        self._n_prefixes += len(new)
        self._note(new, trail)
        return trail

    def _cut(self, trail: Trail, at: int) -> Trail:
        """Cut a trail behind prefix `at`, where another sequence leaves it; the new upper part."""
        #   ─── parent ─── upper ─┬─ trail
        #                      at └─ the other, grown from here
        n_upper = at - trail.end + len(trail.sums)
        upper = self._new(trail.sums[:n_upper], at, trail.parent)
        del trail.sums[:n_upper]
        trail.parent, upper.n_children = upper, 1
        upper.n_seen = min(trail.n_seen, at)
        upper.clock, upper.pace, upper.away = trail.clock, trail.pace, trail.away
        self._note(upper.sums, upper)
        return upper

    def _new(self, sums: list[int], end: int, parent: Trail | None) -> Trail:
        """A trail whose use is the last of all."""
        ident = self._unnamed.pop() if self._unnamed else len(self._trails)
        trail = Trail(ident, sums, end, parent)
        self._trails[ident : ident + 1] = [trail]
        self._n_uses = trail.number = self._n_uses + 1
        self._queue(trail)
        return trail

    def _queue(self, trail: Trail) -> None:
        trail.is_queued = True
        self._uses.push(trail.number, trail)

    def _note(self, sums: list[int], trail: Trail) -> None:
        """These prefixes are of `trail`."""
        self._n_changes += 1
        parts, ident = self._parts, trail.ident
        for each in sums:
            parts[each >> PART_SHIFT][each] = ident

    def _was_there(self, away: Away, n: int) -> None:
        """So many prefixes were never away: another request went on using them."""
        for number in range(away.number + 1):
            away.reached[number] -= n
        away.n -= n
        if not away.n:
            self._n_away -= 1

    def _forget(self, most: int) -> None:
        """Look at so many trails at most for some to forget, while there are too many prefixes."""
        while most and self._n_prefixes > self.most:
            most -= 1
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Forget the trail that was used longest ago, or enter one where it belongs by now.

        One that others go on with is entered again when the last of those is forgotten.
        """
        oldest = self._uses.pop()
        assert oldest is not None
        trail: Trail = oldest[1]
        trail.is_queued = False
        if trail.n_children:
            return
        if trail.number != oldest[0]:
            self._queue(trail)
            return
        self._n_changes += 1
        if trail.away is not None:
            trail.away.n -= len(trail.sums)
            self._n_away -= not trail.away.n
        for each in trail.sums:
            self._parts[each >> PART_SHIFT].pop(each, None)
        self._n_prefixes -= len(trail.sums)
        parent = trail.parent
        if parent is not None:
            parent.n_children -= 1
            if not parent.n_children and not parent.is_queued:
                self._queue(parent)
        trail.sums, trail.end, trail.parent, trail.away = [], 0, None, None
        self._unnamed.append(trail.ident)


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
"""The coarser class has the weight of so many requests."""

WIDTHS = [float(bin_width(number)) for number in range(N_BINS)]
NONE = [0] * N_BINS


class Rates:
    """A snapshot of the rates: samples that are counted later do not change it.

    Args:
        prefixes: the samples.
        masks: bits of a class that its coarser classes keep, coarsest first.

    Attributes:
        unscored: classes whose scores were not computed yet; the caller updates it.
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
        """The probability of a reuse in each bin, for data of a class that reached the bin."""
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
    bins = zip(WIDTHS[first:], rates[first:])
    for width, rate in chain(bins, repeat((WIDTHS[-1], rates[-1]))):  # the last bin is open
        if left < width:
            rate = 1 - (1 - rate) ** (left / width)  # noqa: PLW2901
            width = left  # noqa: PLW2901
        reuses += unused * rate
        stay += unused * width * (1 - rate / 2)
        unused *= 1 - rate
        left -= width
        if left <= 0 or unused <= 1e-6:
            break
    return reuses / stay


def _sum(rows: Iterable[list[int]]) -> list[int]:
    return [sum(column) for column in zip(NONE, *rows)]


def _coarse(table: dict[int, list[int]], mask: int) -> dict[int, list[int]]:
    """Sums of the rows whose classes agree in the bits of `mask`."""
    rows: dict[int, list[list[int]]] = {}
    for its_class, row in table.items():
        rows.setdefault(its_class & mask, []).append(row)
    return {key: _sum(each) if len(each) > 1 else each[0].copy() for key, each in rows.items()}
