"""Prefixes that were seen, also those that were evicted since, and how they came back.

A prompt is cut into pieces of 1,024 tokens; the checksum of a piece follows that of the one before,
so that it names the whole prefix. A bounded directory counts how often each was used. Of one in
eight the class of its last use and its age are kept: from these the policy learns how likely data
of a class comes back at an age.
"""

from __future__ import annotations

from collections import OrderedDict, deque
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


class _Sample:
    """One use of a prefix that is learnt from.

    Attributes:
        its_class, clock: class and time of the use.
        is_last: whether it is the last use of a prefix that is remembered.
    """

    __slots__ = ("clock", "is_last", "its_class")

    def __init__(self, its_class: int, clock: int) -> None:
        self.its_class = its_class
        self.clock = clock
        self.is_last = True


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
        self._uses: OrderedDict[int, int] = OrderedDict()
        """Uses of each prefix, the one used least recently first."""
        self._sampled: dict[int, _Sample] = {}
        """The last use of each sampled prefix."""
        self._ageing: list[deque[_Sample]] = [deque() for _ in range(N_BINS - 1)]
        """Samples in the bin they have reached, but the last one; oldest first."""

    @staticmethod
    def sums(
        namespace: object, tokens: bytearray, n_tokens: int, known: Sequence[int] = ()
    ) -> list[int]:
        """The checksums of the prefixes of 1,024 tokens, 2,048 and so on; `known` are the first."""
        sums = list(known)
        digest = xxhash.xxh3_64_intdigest
        last = sums[-1] if sums else digest(_named(namespace).encode())
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
        for each in reversed(sums):  # the longest is forgotten first
            uses[each] = uses.pop(each, 0) + 1
            if each & SAMPLED:
                continue
            sample = self._sampled.get(each)
            if sample is not None:
                self._count(self.reused, sample.its_class, bin_of(clock - sample.clock, self.unit))
            self._begin(each, its_class, clock)
        while len(uses) > self.most:
            oldest, _ = uses.popitem(last=False)
            sample = self._sampled.pop(oldest, None)
            if sample is not None:
                sample.is_last = False

    def ended(self, sums: Sequence[int], its_class: int, clock: int) -> None:
        """The request ends: its prefixes are of age 0, and of the class that is known by now."""
        self._age(clock)
        for each in sums:
            self._uses.setdefault(each, 1)
            if each & SAMPLED:
                continue
            sample = self._sampled.get(each)
            if sample is not None:  # it was never away
                row = self.reached[sample.its_class]
                for number in range(bin_of(clock - sample.clock, self.unit) + 1):
                    row[number] -= 1
            self._begin(each, its_class, clock)

    # -- inside

    def _begin(self, prefix: int, its_class: int, clock: int) -> None:
        self._count(self.reached, its_class, 0)
        sample = self._sampled.get(prefix)
        if sample is not None and sample.clock == clock:
            sample.its_class = its_class
            return
        if sample is not None:
            sample.is_last = False
        sample = self._sampled[prefix] = _Sample(its_class, clock)
        self._ageing[0].append(sample)

    def _age(self, clock: int) -> None:
        """Move sampled prefixes on to the bins they have reached."""
        for number, ageing in enumerate(self._ageing):
            until = clock - (self.unit << number)  # used before that: behind this bin
            while ageing and ageing[0].clock <= until:
                sample = ageing.popleft()
                if sample.is_last:
                    self._count(self.reached, sample.its_class, number + 1)
                    if number + 1 < len(self._ageing):
                        self._ageing[number + 1].append(sample)

    @staticmethod
    def _count(table: dict[int, list[int]], its_class: int, number: int) -> None:
        row = table.get(its_class)
        if row is None:
            row = table[its_class] = [0] * N_BINS
        row[number] += 1


def _named(namespace: object) -> str:
    """A namespace's text, the same on every rank; of objects that have none it is empty."""
    if isinstance(namespace, tuple):
        return f"({','.join(map(_named, namespace))})"
    return repr(namespace) if isinstance(namespace, (str, int, bytes)) else ""
