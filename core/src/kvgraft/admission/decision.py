"""Outcomes of admission as values, and the slots a request will need (A1, A3, A4, A10).

A component whose hook `budget_contribution` returns None is budgeted here. The peak of a paged
component with bounded reach follows from the life of its pages: a chunk's pages are allocated while
those that the previous chunk left inside the reach are still held; earlier ones are freed. So with
several chunks to come it is reach + chunk, with one it is the larger of the two; never the window
twice.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvgraft.tree.component import TreeComponent
from kvgraft.types import Demand, DemandQuery, new_demand

if TYPE_CHECKING:
    from kvgraft.requests.request import Pending


class Outcome(enum.Enum):
    """The outcome of a request for admission."""

    ADMITTED = "admitted"
    """Its slots are promised; load-back and allocation will succeed (A7)."""
    DEFERRED = "deferred"
    """It fits an emptier cache; nothing was changed, ask again (A9)."""
    NEVER_FITS = "never fits"
    """It is too large for a pool; reject it (A8)."""


ADMITTED: Final = Outcome.ADMITTED


class Shortage(NamedTuple):
    """A pool with too few slots for a request, in the pool's own slots.

    Attributes:
        component: whose pool.
        pool: `"device"`, `"host"` or the name of a private pool.
        needed: slots the request asks for.
        available: slots that could be given now.
        capacity: slots of the pool; with tenants, the most that this tenant's requests can hold
            there, by its limit and the others' guarantees.
        tenant: whose request it is, and the slots it holds and is promised; None without tenants.
    """

    component: str
    pool: str
    needed: int
    available: int
    capacity: int
    tenant: Any = None

    def __str__(self) -> str:
        said = f"component {self.component!r} {self.pool} pool: needs {self.needed} slots, "
        if self.needed > self.capacity:
            said += f"the pool has {self.capacity}"
        else:
            said += f"{self.available} available of {self.capacity}"
        return said if self.tenant is None else f"{said} for {self.tenant}"


class Waiting(NamedTuple):
    """The holders of the slots that a deferred request lacks.

    While any of these is above zero the request has something to wait for, even if no request runs.
    If all are zero it would wait forever.

    Attributes:
        running: other requests that were admitted and have not ended.
        leased: other requests that were begun and not admitted; their pins hold slots until they
            are aborted.
        transfers: copies in flight, such as backups of a finished request's data. `poll` processes
            those that ended, `drain` waits for them.
        storage: prefetches and writes of the storage tier that have not ended.
        memory: pools that will get memory of others, with one budget for several; `poll` moves it.
        pins: pinned prefixes; their slots come back when they are unpinned.
        overdue: those of the transfers that did not end within `transfer_timeout_s`, by this
            process's clock; if they never do, neither does the wait.
    """

    running: int
    leased: int
    transfers: int
    storage: int
    memory: int = 0
    pins: int = 0
    overdue: int = 0

    def __str__(self) -> str:
        parts = (
            (self.running, "running"),
            (self.leased, "begun and not admitted"),
            (self.transfers, "transfers in flight"),
            (self.storage, "storage calls"),
            (self.memory, "pools that get memory of others"),
            (self.pins, "pinned prefixes"),
            (self.overdue, "of the transfers overdue, see transfer_timeout_s"),
        )
        named = [f"{name}: {count}" for count, name in parts if count]
        return f"waits for {', '.join(named)}" if named else "waits for nothing"


class Decision(NamedTuple):
    """The answer of admission.

    Attributes:
        outcome: admitted, deferred or never fits.
        shortages: the pools that were short; empty when admitted.
        waits_for: holders of the missing slots, for a deferred request; else None.
        pending: the pages that another request computes, if the request is deferred only to wait
            for them; else None.
    """

    outcome: Outcome
    shortages: tuple[Shortage, ...] = ()
    waits_for: Waiting | None = None
    pending: Pending | None = None

    @property
    def admitted(self) -> bool:
        """Whether the request may run."""
        return self.outcome is ADMITTED

    def __str__(self) -> str:
        parts = [self.outcome.value, *(str(shortage) for shortage in self.shortages)]
        if self.waits_for is not None:
            parts.append(str(self.waits_for))
        if self.pending is not None:
            parts.append(f"waits for {self.pending}")
        return "; ".join(parts)


SLACK_PAGES: Final = 1
"""Pages kept beyond the computed need, so that one token more than foreseen has its page (A1)."""


def pages_up(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens`, rounded up."""
    return -(-tokens // page_size)


def default_demand(component: TreeComponent, query: DemandQuery) -> Demand:
    """A request's demand on one component's DEVICE pool, in its slots."""
    if component.is_state:
        # The live state, one per boundary to capture, and one for the decode.
        decodes = int(query.total > query.prompt)
        return new_demand((1 + query.host_slots, query.checkpoints + decodes, ()))
    page_size, computed, step, prompt, tokens, host_slots, _ = query
    #   pages   ├─ held ─┼─ chunk ─┼─ rest of prompt and decode ─┼─ slack ─┤ = total
    #   now   = min(peak, chunk + slack) + host hits         later = peak - min(peak, chunk + slack)
    #   peak  = total, or less if the reach is bounded: pages behind it are released meanwhile
    held = -(-computed // page_size)
    last = -(-tokens // page_size)
    total = component.stored_between(held, last + SLACK_PAGES)
    chunk = component.stored_between(held, -(-(computed + step) // page_size))
    peak = total
    if not component.is_prefix_closed:
        reach = component.reach_pages.width(last)
        extend = component.stored_between(held, -(-prompt // page_size))
        if extend > chunk:
            peak = min(total, reach + chunk + 1)
        else:
            peak = min(total, max(extend, reach + 1) + SLACK_PAGES)
    per_page = component.slots_per_page
    now = min(peak, chunk + SLACK_PAGES)
    return new_demand((now * per_page + host_slots, (peak - now) * per_page, ()))
