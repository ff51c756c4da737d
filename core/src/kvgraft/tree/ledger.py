"""The ledger of one pool: the owners of its slots (T8).

    free + evictable + pinned + private + in_flight == capacity

    free        nobody owns them
    evictable   in the tree, nobody needs them
    pinned      in the tree, held by at least one receipt
    private     owned by a running request
    in_flight   reserved by a transfer that is not acknowledged yet

`promised` stands beside the equation: slots that admission promised to requests which have not
taken them yet. Slots that may still be given away are the headroom, `free + evictable - promised`;
every operation that lowers it checks first, so that a promise can always be kept (A7, A12). Where
tenants share a pool each has a ledger of its own, which `kvgraft_retention.tenants` brings.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvgraft.compiled import mypyc_attr
from kvgraft.errors import IntegrityError
from kvgraft.pools.allocator import SLOT_BYTES, SlotAllocator
from kvgraft.stats import PoolStats
from kvgraft.types import Tier

if TYPE_CHECKING:
    from kvgraft.tree.component import Candidates

DEVICE: Final = Tier.DEVICE
HOST: Final = Tier.HOST


class SlotOwner(NamedTuple):
    """Slots owned outside the tree.

    Attributes:
        component: whose pool they are of.
        tier: on which tier.
        who: the owner's name, for messages.
        slots: int32 bytes.
        tenant: their tenant, as in `Node.tenant`.
    """

    component: str
    tier: Tier
    who: str
    slots: bytes
    tenant: int = 0


@mypyc_attr(allow_interpreted_subclasses=True)
class PoolBooks:
    """One component's books on one tier, in the pool's slots: one ledger, or its tenants'.

    No `ABC`: compiled classes would share its `isinstance` cache.

    Attributes:
        cost: the cost of losing a candidate, for eviction policies; see `policies.policy.Pool`.
        evicted: slots that left the tree's pool so far, by cause.
        queue: its eviction candidates; of the tree's pools alone.
    """

    __slots__ = ("allocator", "component", "cost", "evicted", "queue", "tier")

    queue: Candidates

    def __init__(self, component: str, tier: Tier, allocator: SlotAllocator) -> None:
        self.component = component
        self.tier = tier
        self.allocator = allocator
        self.cost: Callable[[Any], int] | None = None
        self.evicted: dict[Any, int] = {}

    @property
    @abstractmethod
    def parts(self) -> tuple[Ledger, ...]:
        """The ledgers that are written, by tenant; this one without tenants."""

    @property
    @abstractmethod
    def headroom(self) -> int:
        """Slots that may be given away without breaking a promise."""

    @property
    def evictable(self) -> int:
        """Slots in the tree that are not pinned."""
        return sum([each.evictable for each in self.parts])

    @property
    def pinned(self) -> int:
        """Slots in the tree that receipts hold."""
        return sum([each.pinned for each in self.parts])

    @property
    def private(self) -> int:
        """Slots that running requests own."""
        return sum([each.private for each in self.parts])

    @property
    def in_flight(self) -> int:
        """Slots that transfers hold."""
        return sum([each.in_flight for each in self.parts])

    @property
    def promised(self) -> int:
        """Slots that were promised to requests and not taken yet."""
        return sum([each.promised for each in self.parts])

    @property
    def name(self) -> str:
        """Its tier, for messages."""
        return self.tier.value

    @property
    def capacity(self) -> int:
        """All slots of the pool."""
        return self.allocator.capacity

    @property
    def free(self) -> int:
        """Slots that are not in use."""
        return self.allocator.n_free

    @property
    def room(self) -> int:
        """Slots that can be taken without an eviction."""
        return self.allocator.n_free

    @property
    def ceiling(self) -> int:
        """The most slots that requests can hold and be promised in an empty pool."""
        return self.allocator.capacity

    @property
    def spare(self) -> int:
        """Free slots without a promise (A12)."""
        return max(0, min(self.room, self.headroom))

    def giver(self, for_tenant: int | None, candidates: Any) -> int | None:
        """The tenant that loses data next for a tenant's request; None if none has to.

        `candidates.waits(tenant)` says whether a tenant has candidates.
        """
        return 0

    def stats(self) -> PoolStats:
        """A copy of the books."""
        closing, evicted = self.allocator.closing, dict(self.evicted)
        return PoolStats(promised=self.promised, evicted=evicted, closing=closing, **self.counts())

    def counts(self) -> dict[str, int]:
        """The equation's terms by name."""
        return {
            "capacity": self.capacity,
            "free": self.free,
            "evictable": self.evictable,
            "pinned": self.pinned,
            "private": self.private,
            "in_flight": self.in_flight,
        }

    def equation(self) -> str:
        """The equation with its numbers, for messages."""
        return (
            f"free({self.free}) + evictable({self.evictable}) + pinned({self.pinned}) + "
            f"private({self.private}) + in_flight({self.in_flight}) vs capacity({self.capacity})"
        )

    def check(self) -> None:
        """Raise `IntegrityError` unless the equation holds and no term is negative (T8, A12)."""
        terms = (self.free, self.evictable, self.pinned, self.private, self.in_flight)
        if sum(terms) != self.capacity or min(terms) < 0:
            raise IntegrityError(
                "T8",
                self.component,
                f"{self.tier.value} ledger does not balance: {self.equation()}",
            )
        if self.promised < 0:
            raise IntegrityError(
                "A12",
                self.component,
                f"{self.tier.value} pool: promised({self.promised}) < 0, more was taken than that",
            )


#   free ──take_private──► private ──insert──► evictable ◄──release─── pinned
#     │                                        evictable ───acquire──► pinned
#     └──reserve──► in_flight ──commit──► evictable, or pinned where a receipt holds the cell
#   back to free: give_private, evict, cancel; evict with a copy passes through in_flight.
#   No arrow changes the sum.
@mypyc_attr(allow_interpreted_subclasses=True)
class Ledger(PoolBooks):
    """Books that are written.

    Attributes:
        leaving: slots in flight whose data is being demoted.
        lost: slots that were evicted for other tenants' requests, so far.
    """

    __slots__ = ("evictable", "in_flight", "leaving", "lost", "pinned", "private", "promised")

    evictable: int
    pinned: int
    private: int
    in_flight: int
    promised: int

    def __init__(self, component: str, tier: Tier, allocator: SlotAllocator) -> None:
        super().__init__(component, tier, allocator)
        self.evictable = 0
        self.pinned = 0
        self.private = 0
        self.in_flight = 0
        self.leaving = 0
        self.lost = 0
        self.promised = 0

    @property
    def parts(self) -> tuple[Ledger, ...]:
        """This ledger."""
        return (self,)

    @property
    def headroom(self) -> int:
        """Slots that may be given away without breaking a promise."""
        return self.allocator.n_free + self.evictable - self.promised

    @property
    def over(self) -> int:
        """Slots that its tenant has borrowed from others; 0 without tenants."""
        return 0

    @property
    def rights(self) -> Any:
        """Its tenant's use of the pool, for the message of a shortage; None without tenants."""
        return None

    def take_private(self, n: int) -> bytes | None:
        """Free slots become a request's; None if fewer than `n` are free."""
        slots = self.allocator.allocate(n)
        if slots is not None:
            self.private += n
        return slots

    def give_private(self, slots: bytes) -> None:
        """A request's slots become free."""
        self.allocator.free(slots)
        self.private -= len(slots) // SLOT_BYTES

    def reserve(self, n: int) -> bytes | None:
        """Free slots become the destination of a transfer; None if fewer than `n` are free."""
        slots = self.allocator.allocate(n)
        if slots is not None:
            self.in_flight += n
        return slots

    def cancel(self, slots: bytes) -> None:
        """Slots a transfer held become free."""
        self.allocator.free(slots)
        self.in_flight -= len(slots) // SLOT_BYTES
