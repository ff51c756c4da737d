"""More cores with one line changed: tenants, priorities and times to live, steps of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvgraft.cache import Cache
from kvgraft.requests.publishing import Publisher
from kvgraft.serving import Serving
from kvgraft.transfers import Journal
from kvgraft.tree.component import Candidates
from kvgraft.tree.keys import TokenKey
from kvgraft_observe.events import EventStream
from kvgraft_retention.lifetimes import Lifetimes, Retentions
from kvgraft_retention.tenants import SharedLedger, TenantLedger, Tenants
from kvgraft_scheduling.engine_slots import EngineSlots
from kvgraft_scheduling.slot_copies import SlotCopies
from kvgraft_scheduling.stepping import Stepper

from .cores import CORES, CoreMutant
from .cores_held_out import edited

__all__: list[str] = []

DRAWN = "everything+window+drawn"
"""Among caches that draw tenants, priorities, times to live and shared budgets."""


def change(
    name: str,
    kinds: str,
    rules: str,
    function: Callable[..., Any] | property,
    old: str,
    new: str,
    *,
    examples: int = 250,
) -> None:
    """Register one."""
    CORES[name.replace(" ", "_")] = CoreMutant(
        tuple(kinds.split("+")), tuple(rules.split()), edited(function, old, new), examples
    )


change(
    "a tenants limit is no bound of its headroom",
    DRAWN,
    "K5 K4",
    TenantLedger.headroom,
    "return min(self.allocator.capacity - others, self.limit) - self.committed",
    "return self.allocator.capacity - others - self.committed",
)
change(
    "data of a guarantee is taken as if it were borrowed",
    DRAWN,
    "K4 K5",
    SharedLedger.giver,
    "if over > 0 or for_tenant is None",
    "if over > -4 or for_tenant is None",
)
change(
    "the shortest prefix names the tenant",
    DRAWN,
    "K4",
    Tenants.__init__,
    "key=lambda item: -len(item[0])",
    "key=lambda item: len(item[0])",
    examples=500,
)
change(
    "slots on their way out count as borrowed",
    DRAWN,
    "K4 K5",
    TenantLedger.over,
    "return self.used - self.leaving - self.guarantee",
    "return self.used - self.guarantee",
)
change(
    "who borrowed least for its weight gives first",
    DRAWN,
    "K5",
    SharedLedger.giver,
    "if found is None or rank > most:",
    "if found is None or rank < most:",
)
change(
    "data of a higher priority leaves first",
    DRAWN,
    "T7 I9",
    Candidates._next,
    "level < first",
    "level > first",
)
change(
    "a time to live never ends",
    DRAWN,
    "T7",
    Lifetimes.is_over,
    "retention.until_s <= self.now_s",
    "retention.until_s < 0",
)
change(
    "expired data waits for its turn",
    "everything+drawn",
    "T7 K2",
    Candidates._next,
    "least <= EXPIRED and lifetimes.over(self, giver) is not None",
    "False",
)
change(
    "a call leaves the priority of the call before",
    DRAWN,
    "T7",
    Serving.expect,
    "self.tree.use_class, self.tree.use_retention = request.use_class, request.use_retention",
    "self.tree.use_class = request.use_class",
)
change(
    "a fork has no priority",
    DRAWN,
    "T7",
    Cache.fork,
    "priority=priority,",
    "priority=None,",
)
change(
    "a step keeps the slots it took promised",
    "everything+drawn",
    "A11 A12 I12 T8",
    Stepper._take_slots,
    "ledger.promised -= total * per_page",
    "pass",
)
change(
    "the slots of a second token are those of the first",
    "everything+drawn",
    "T9",
    Stepper._slot_mapping,
    "length = (length[:, None] + each).reshape(-1)",
    "length = length.repeat(n_tokens)",
)
change(
    "a publication that keeps slots swaps them",
    "everything+window",
    "N1",
    Publisher.checkpoint,
    "_kept(request, beside) if beside else None",
    "None",
)
change(
    "copies that an engine has made are handed over again",
    "everything+state",
    "N3 M8 I7 I1 I4 T9",
    SlotCopies.take,
    "self._sources.clear()",
    "pass",
)
change(
    "adopted slots stay the engine's as well",
    "everything+window",
    "N2 T9",
    EngineSlots.adopt,
    "self._release(component, own)",
    "pass",
)
change(
    "a request adopts its slots in another order",
    "everything+window",
    "N2",
    EngineSlots.adopt,
    "own.tobytes()",
    "own[::-1].tobytes()",
)
change(
    "adopted slots are promised as well",
    "everything+window",
    "A12 A1",
    EngineSlots.adopt,
    "account.ledger.promised -= n_slots",
    "pass",
)
change(
    "slots are adopted twice",
    "everything+window",
    "N2 T9",
    EngineSlots._expect_taken,
    "if len(wrong):\n        raise",
    "if False:\n        raise",
)
change(
    "the event that did not fit is not counted as lost",
    "everything",
    "V3",
    EventStream.add,
    "self._start_again(len(self._events) + 1)",
    "self._start_again(len(self._events))",
)
change(
    "events that come while a reader is behind are not counted",
    "everything",
    "V3",
    EventStream.add,
    "self.lost += self._behind",
    "pass",
)
change(
    "the events of a failed delivery are not counted as lost",
    "everything",
    "V3",
    EventStream.deliver,
    "self._start_again(len(events))",
    "self._start_again(0)",
)
change(
    "a point that is named again replaces the latest one",
    "everything",
    "B4",
    Journal.set_fence,
    "self.fence = self._fences.ahead",
    "self.fence = fence",
)
change(
    "each of several rows in a step finds the same room",
    "everything",
    "A7",
    Stepper._take_in_order,
    "not self._has_room(needed + n)",
    "not self._has_room(n)",
)
change(
    "a use without a retention takes that of the use before",
    DRAWN,
    "T7 K1",
    Retentions.used,
    "self.tree.use_class, self.tree.use_retention = request.use_class, request.use_retention",
    "self.tree.use_class = request.use_class\n"
    "    self.tree.use_retention = request.use_retention or self.tree.use_retention",
)
change(
    "a tenant takes free slots beyond its limit",
    DRAWN,
    "K5 K4",
    TenantLedger.room,
    "return min(self.allocator.n_free, self.limit - self.used)",
    "return self.allocator.n_free",
)
change(
    "a copy that is late counts as done",
    "everything",
    "B3 R7 E4",
    Journal.settle,
    "first.late = True\n                break",
    "first.late = True",
)
change(
    "a fork writes to the key of the other",
    "everything",
    "T11 M1 M2 M9",
    TokenKey.__copy__,
    "fork.data += self.data",
    "fork.data = self.data",
)
