"""One request's slots of one pool: promised and taken."""

from __future__ import annotations

from kvgraft.tree.ledger import Ledger

__all__ = ["Account"]


class Account:
    """A promise on a ledger.

    A request never holds more than `peak` private slots of the pool at a time. Its held and
    promised slots add up to at most that; slots it gives back renew the promise as long as it has
    pages to compute. Kept in the pool's slots.

    Attributes:
        ledger: the pool's books.
        peak: most private slots held at any time.
        remaining: slots it will still take until its reservation ends.
        held: private slots it holds.
        promised: slots it may take without asking.
        load: how many of them are for its load-back.
    """

    __slots__ = ("held", "ledger", "load", "peak", "promised", "remaining")

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.load = self.peak = self.remaining = self.held = self.promised = 0

    def open(self, peak: int, remaining: int, load: int) -> None:
        """Promise the request its peak and the slots of its load-back (admission)."""
        self.peak = peak
        self.remaining = remaining
        self.load = load
        self.promised = peak + load
        self.ledger.promised += peak + load

    def extend(self, n: int) -> None:
        """Promise `n` slots at once beyond the promised ones; the caller checked the headroom.

        The slots that remain to be taken do not grow by it: a chunk larger than the admitted one
        takes slots of the reservation early, and a slot behind the reservation is taken now
        (A11).
        """
        self.promised += n
        self.peak += n
        self.ledger.promised += n

    def add(self, n: int) -> None:
        """Promise `n` slots that were not foreseen; the caller checked the headroom."""
        self.extend(n)
        self.remaining += n

    def take(self, n: int) -> bytes:
        """`n` slots become the request's; room has been made.

        Promises the missing ones first; the caller checked the headroom.
        """
        if n > self.promised:
            self.extend(n - self.promised)
        slots = self.ledger.take_private(n)
        assert slots is not None
        self.took(n)
        self.ledger.promised -= n
        return slots

    def took(self, n: int) -> None:
        """Note `n` promised slots as taken; the ledger's books are the caller's."""
        self.held += n
        self.remaining = self.remaining - n if n < self.remaining else 0
        self.promised -= n

    def loaded(self) -> None:
        """The load-back took its slots; another's slots are not promised twice (A11)."""
        self.promised -= self.load
        self.ledger.promised -= self.load
        self.load = 0

    def renewal(self, n: int) -> int:
        """The rise of the promise when `n` held slots go to the tree or back to the pool."""
        target = self.peak - self.held + n
        target = min(target, self.remaining)
        return target - self.promised if target > self.promised else 0

    def release(self, n: int) -> None:
        """`n` held slots left the request: to the tree, or free again."""
        rise = self.renewal(n)
        self.held -= n
        self.promised += rise
        self.ledger.promised += rise

    def forgo(self, n: int) -> None:
        """Give up `n` promised slots for good; the request will not ask for them again."""
        n = min(n, self.promised)
        self.peak -= n
        self.remaining = max(0, self.remaining - n)
        self.promised -= n
        self.ledger.promised -= n

    def close(self) -> None:
        """Give the promise back; the slots are given back by their owner."""
        self.ledger.promised -= self.promised
        self.promised = self.load = self.peak = self.remaining = 0
