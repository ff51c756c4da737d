"""Prefixes that were seen, also those that were evicted since, and how they came back.

A prompt is cut into pieces of 1,024 tokens; the checksum of a piece follows that of the one before,
so that it names the whole prefix. A bounded directory counts how often each was used. Of one in
eight the class of its last use and its age are kept: from these the policy learns how likely data
of a class comes back at an age.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import xxhash

__all__ = ["N_BINS", "Prefixes", "bin_of", "bin_width"]

PIECE_TOKENS = 1024
PIECE_BYTES = PIECE_TOKENS * 4

SAMPLED = 7
"""A prefix whose checksum ends in these bits as zeros is learnt from."""

REMEMBERED_CAPACITIES = 8
"""The directory holds as many prefixes as so many times the largest pool has tokens for."""

N_BINS = 14
"""Bins of age, each twice as wide as the one before; the last one is open."""

UNITS = 64
"""Bins of the width of the first one that make the base pool's capacity."""


def bin_of(age: int, unit: int) -> int:
    """The bin of an age, in slots; `unit` is the width of the first two."""
    return min(N_BINS - 1, (age // unit).bit_length())


def bin_width(number: int) -> int:
    """The width of a bin, in units."""
    return 1 if number < 2 else 1 << number - 1


class Prefixes:
    """The directory, and how often prefixes of each class came back by age.

    Ages are counted in slots of the base component's DEVICE pool: the same on every rank, whatever
    the traffic's speed.

    Args:
        capacity: slots of that pool.
        tokens: tokens that the largest tier holds.

    Attributes:
        unit: width of the first bin, in slots.
        reached: by class, how many prefixes reached each bin.
        reused: by class, how many of them were used again in it.
    """

    def __init__(self, capacity: int, tokens: int) -> None:
        self.unit = max(1, capacity // UNITS)
        self.most = max(64, REMEMBERED_CAPACITIES * tokens // PIECE_TOKENS)
        self.reached: dict[int, list[int]] = {}
        self.reused: dict[int, list[int]] = {}
        self._uses: dict[int, int] = {}
        self._sampled: dict[int, tuple[int, int]] = {}
        """Class and clock of the last use."""
        self._ageing: list[deque[tuple[int, int]]] = [deque() for _ in range(N_BINS)]
        """Checksum and clock of sampled prefixes, in the bin they have reached."""

    @staticmethod
    def sums(
        namespace: object, tokens: bytearray, n_tokens: int, known: Sequence[int] = ()
    ) -> list[int]:
        """The checksums of the prefixes of 1,024 tokens, 2,048 and so on; `known` are the first."""
        sums = list(known)
        digest = xxhash.xxh3_64_intdigest
        # of other objects the hash may differ from process to process, and ranks must agree
        named = repr(namespace) if isinstance(namespace, (str, int, bytes)) else ""
        last = sums[-1] if sums else digest(named.encode())
        end = n_tokens // PIECE_TOKENS * PIECE_BYTES
        with memoryview(tokens) as data:
            for start in range(len(sums) * PIECE_BYTES, end, PIECE_BYTES):
                last = digest(data[start : start + PIECE_BYTES], last)
                sums.append(last)
        return sums

    def remembered(self, sums: Sequence[int]) -> tuple[int, int]:
        """How many of the prefixes were seen before, and how often the longest of them."""
        uses = self._uses
        n_seen = n_uses = 0
        for each in sums:
            n = uses.get(each)
            if n is None:
                break
            n_seen += 1
            n_uses = n
        return n_seen, n_uses

    def used(self, sums: Sequence[int], its_class: int, clock: int) -> None:
        """A request uses prefixes; of those seen before this is a reuse."""
        self._age(clock)
        uses = self._uses
        for each in sums:
            uses[each] = uses.get(each, 0) + 1
            if not each & SAMPLED:
                self._end(each, clock)
                self._begin(each, its_class, clock)
        while len(uses) > self.most:
            oldest = next(iter(uses))
            del uses[oldest]
            self._sampled.pop(oldest, None)

    def ended(self, sums: Sequence[int], its_class: int, clock: int) -> None:
        """The request ends: its prefixes are of age 0, and of the class that is known by now."""
        self._age(clock)
        for each in sums:
            self._uses.setdefault(each, 1)
            if each & SAMPLED:
                continue
            sample = self._sampled.get(each)
            if sample is not None:
                row = self.reached[sample[0]]
                for number in range(bin_of(clock - sample[1], self.unit) + 1):
                    row[number] -= 1
            self._begin(each, its_class, clock)

    # -- inside

    def _begin(self, prefix: int, its_class: int, clock: int) -> None:
        self._sampled[prefix] = (its_class, clock)
        self._ageing[0].append((prefix, clock))
        self._count(self.reached, its_class, 0)

    def _end(self, prefix: int, clock: int) -> None:
        sample = self._sampled.pop(prefix, None)
        if sample is not None:
            self._count(self.reused, sample[0], bin_of(clock - sample[1], self.unit))

    def _age(self, clock: int) -> None:
        """Move sampled prefixes on to the bins they have reached."""
        unit, last = self.unit, N_BINS - 1
        for number, ageing in enumerate(self._ageing):
            if number == last:
                ageing.clear()
                break
            until = clock - (unit << number)  # used before that: behind this bin
            while ageing and ageing[0][1] <= until:
                prefix, used = ageing.popleft()
                sample = self._sampled.get(prefix)
                if sample is not None and sample[1] == used:
                    self._count(self.reached, sample[0], number + 1)
                    self._ageing[number + 1].append((prefix, used))

    @staticmethod
    def _count(table: dict[int, list[int]], its_class: int, number: int) -> None:
        row = table.get(its_class)
        if row is None:
            row = table[its_class] = [0] * N_BINS
        row[number] += 1
