"""How likely data of a class comes back at an age, and how much a class of data is worth.

A class is refined in steps: what was known of the prompt, how fast its sequence goes on, the hint
at its end. A class with few samples is taken to be as the coarser one before it.

    q[class, bin] = (reused + k * q[coarser class, bin]) / (reached + k)
    score[class, bin] = expected reuses within tau / expected stay within tau

where `k` is as many prefixes as forty requests reuse (the prefixes of one request come back
together), and `tau` is how long data stays: the capacity of the base component's pool on that tier.
For each slot given out one is given back (Little's law). In the coarsest class of all, a bin with
few samples is as the one before: sequences that grow come back at ages at which nothing did so far.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvgraft.policies.prefixes import N_BINS, Prefixes, bin_width

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
