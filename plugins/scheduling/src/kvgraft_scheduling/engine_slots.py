"""Slots that an engine takes and fills before the cache knows which request they are for (N2).

Some engines have an allocator of their own: a request gets slots from it, and the tree sees them
when their data is published. Such an engine takes the slots here, and hands them over later.

    slots = cache.engine_slots
    slots.admit(request)                        instead of cache.admit: the engine decided itself
    taken = slots.take("full", 3)               out of the headroom, so no promise is broken
    ... the engine writes data into them ...
    slots.adopt(request, 3, {"full": taken})    instead of cache.allocate
    cache.computed(request, n); cache.checkpoint(request); cache.finish(request)
    slots.give_back("full", other)              slots that no request adopted

Data of another cache needs no pass of the model: `allocate_at` takes the slots that it goes to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvgraft.compiled import mypyc_attr
from kvgraft.errors import ConfigError, LeaseError
from kvgraft.requests.components import NO_DEMAND
from kvgraft.requests.request import ADMITTED, LEASED, Limited, Request, whole
from kvgraft.sizes import expect_count
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.keys import shown_start
from kvgraft.tree.ledger import DEVICE, SlotOwner

if TYPE_CHECKING:
    from kvgraft.serving import Serving

__all__ = ["EngineSlots"]

Slots: TypeAlias = npt.NDArray[np.int32]


@mypyc_attr(allow_interpreted_subclasses=True)
class EngineSlots:
    """The DEVICE slots that an engine has taken itself; `Cache.engine_slots`.

    For caches of pages on pools of a fixed size, without tenants: states stay the cache's, and so
    do pools at home on HOST. Until a request adopts them or the engine gives them back, taken slots
    count as private (T8).

    Args:
        cache: of whose pools.
        let_run: counts a request that was admitted, and lets it run.
    """

    def __init__(self, cache: Serving, let_run: Callable[[Request], None]) -> None:
        self.cache = cache
        self._let_run = let_run
        self.tree = cache.tree
        self._taken: dict[int, npt.NDArray[np.bool_]] = {}
        self._count = dict.fromkeys([each.index for each in self.tree.components], 0)

    def n_taken(self, component: str) -> int:
        """Slots of a component that the engine has."""
        return self._count[self.tree.component(component).index]

    def take(self, component: str, n_slots: int) -> Slots | None:
        """Take slots of a pool, int32 `[n_slots]`; None if its headroom is less (A12).

        Data that nobody needs is evicted for them, as for a request.

        Raises:
            ConfigError: a component or a cache whose slots an engine cannot have.
            LeaseError: the cache is closed.
        """
        n_slots = expect_count("take: n_slots", n_slots)
        self.cache.expect_open()
        part = self._paged("take", component)
        ledger = part.devices[0]
        if n_slots > ledger.headroom:
            return None
        if n_slots > ledger.room:
            self.cache.evictor.ensure_promised(part, n_slots, 0, 0)
        taken = ledger.take_private(n_slots)
        assert taken is not None
        slots = np.frombuffer(taken, np.int32)
        if part.index not in self._taken:
            self._taken[part.index] = np.zeros(ledger.capacity, np.bool_)
        self._taken[part.index][slots] = True
        self._count[part.index] += n_slots
        return slots

    def give_back(self, component: str, slots: Slots) -> None:
        """Free slots that were taken and that no request adopted.

        Raises:
            LeaseError: the engine does not have one of them, or it is named twice; none is freed.
        """
        part = self._paged("give_back", component)
        slots = self._expect_taken("give_back", part, slots)
        if len(slots):
            self._release(part, slots)
            part.devices[0].give_private(slots.tobytes())

    def admit(self, request: Request | Any) -> None:
        """Let a request run that the engine admits by itself: it is promised nothing.

        It adopts slots, or `allocate` takes some out of the headroom.

        Raises:
            ConfigError: a cache whose slots an engine cannot have.
            LeaseError: the request is not leased, another runs with its key, or data that it
                resumes from is on HOST alone.
        """
        for each in self.tree.components:
            self._paged("admit", each.name)
        cache = self.cache
        cache.expect_open()
        request = cache.expect(request, LEASED)
        cache.expect_free(request.key, "admit")
        if (
            request.deferred
            or request.limited is Limited.CROWDED
            or self.tree.is_cleared(request.root)
        ):
            cache.restart(request)  # its match is out of date, as in Cache.admit
        if request.needs_load_back or request.receipt.host_from is not None:
            raise LeaseError(
                "admit: a part of the prefix is on HOST only; call Cache.admit and load it back"
            )
        for part in request.components:
            part.demand = NO_DEMAND
        request.draft_pages = 0
        self._let_run(request)
        for part in request.components:
            part.close_accounts()

    def adopt(self, request: Request | Any, n_pages: int, slots: Mapping[str, Slots]) -> None:
        """Taken slots become those of a request's next pages: of all components, or none (N2).

        From here on they are like allocated ones: `computed`, `checkpoint`, `finish` and `abort`
        publish them, free duplicates and give them up.

        Args:
            request: an admitted one; those that `Cache.admit` admitted use up their promises.
            n_pages: how many pages.
            slots: by component, the slots of these pages in order. Those of a window may lack the
                first pages, which have left it already.

        Raises:
            ConfigError: a component is missing or unknown, or has another number of slots.
            LeaseError: the engine does not have one of the slots, or it is named twice; or the
                request may not run (see `Cache.allocate`). Nothing is adopted.
        """
        n_pages = expect_count("adopt: n_pages", n_pages)
        self.cache.allocate(request, 0)  # refuses requests that may not run
        first, end = request.allocated, request.allocated + n_pages
        given = [
            (part, self._offered(part.component, first, end, slots.get(part.component.name, ())))
            for part in request.components
        ]
        unknown = slots.keys() - self.tree.by_name.keys()
        if unknown:
            raise ConfigError(f"adopt: the cache has no component {min(unknown)!r}")
        for part, own in given:
            component, account, n_slots = part.component, part.account, len(own)
            if not n_slots:
                continue
            self._release(component, own)
            if n_slots > account.promised:
                account.extend(n_slots - account.promised)
            account.took(n_slots)
            account.ledger.promised -= n_slots
            start = first
            if component.window_pages is not None:
                start = end - n_slots // component.slots_per_page
            part.add_pages(start, start + n_slots // component.slots_per_page, own.tobytes())
        request.allocated = end

    def _offered(self, component: TreeComponent, first: int, end: int, given: Any) -> Slots:
        """The slots of pages `[first, end)`; of a window maybe only of the last of them."""
        component = self._paged("adopt", component.name)
        slots = self._expect_taken("adopt", component, given)
        n_slots = component.stored_between(first, end) * component.slots_per_page
        window, size = component.window_pages, component.slots_per_page
        passed = 0 if window is None else max(0, end - window - first)  # pages before the window
        if not n_slots - passed * size <= len(slots) <= n_slots or len(slots) % size:
            said = f"{len(slots)} slots of {component.name!r} for pages [{first}, {end})"
            least = f" or at least {n_slots - passed * size}" if passed else ""
            raise ConfigError(f"adopt: {said}; give {n_slots}{least}")
        return slots

    def allocate_at(self, request: Request | Any, n_tokens: int | Any) -> bool:
        """`Cache.allocate` for data that comes from elsewhere, and is needed at its end alone.

        Bounded reaches get slots of the pages that they need at the last page boundary of these
        tokens; the pages before have none, and count as released (I3). It works with states, and
        with pools at home on HOST, too. `Cache.computed` follows with the same tokens at once.

        Args:
            request: an admitted one.
            n_tokens: how many, as for `Cache.allocate`; chunks of the admitted length are taken one
                after the other, so that they stay within the promise.

        Returns:
            Whether all have slots; if not, the request has some of them.

        Raises:
            LeaseError: as `Cache.allocate`.
        """
        cache, size = self.cache, self.tree.page_size
        request = cache.expect(request, ADMITTED)
        n_tokens = whole(n_tokens, "allocate_at")
        boundary = (request.computed + n_tokens) // size
        step = max(size, request.chunk // size * size)
        for end in range(step, n_tokens + step, step):
            if not cache.allocate(request, min(end, n_tokens)):
                return False
            cache.pages.give_back_behind(request, boundary)
        return True

    def owners(self) -> list[SlotOwner]:
        """The taken slots, for integrity checks."""
        return [
            SlotOwner(
                self.tree.components[index].name,
                DEVICE,
                "the engine",
                np.flatnonzero(taken).astype(np.int32).tobytes(),
            )
            for index, taken in self._taken.items()
        ]

    def _paged(self, call: str, name: str) -> TreeComponent:
        """A component whose slots an engine may have."""
        component = self.tree.component(name)
        if component.is_state or component.home_is_host or self.tree.has_state:
            raise ConfigError(f"{call}: slots of {name!r} are the cache's; allocate takes them")
        if self.cache.arenas is not None:
            raise ConfigError(
                f"{call}: slots that an engine has cannot move, and the pools share a budget; open "
                "the cache with device_tokens"
            )
        if self.cache.config.tenants:
            raise ConfigError(
                f"{call}: slots that an engine has are no tenant's; leave tenants out"
            )
        return component

    def _expect_taken(self, call: str, component: TreeComponent, given: Any) -> Slots:
        """Refuse slots that the engine does not have, or that are named twice (T9)."""
        offered = np.asarray(given)
        if offered.ndim != 1 or (len(offered) and offered.dtype.kind not in "iu"):
            raise ConfigError(
                f"{call}: slots of {component.name!r} are {shown_start(given)}; give one sequence "
                "of slot numbers"
            )
        slots = offered.astype(np.int64)
        if not len(slots):
            return slots.astype(np.int32)
        taken = self._taken.get(component.index)
        wrong = slots
        if taken is not None:
            inside = (slots >= 0) & (slots < len(taken))
            wrong = slots[~inside | ~taken[np.where(inside, slots, 0)]]
            if not len(wrong):
                ordered = np.sort(slots)
                wrong = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(wrong):
            raise LeaseError(
                f"{call}: slot {wrong[0]} of {component.name!r} is not one that the engine has, or "
                "is named twice; each is adopted or given back once (N2)"
            )
        return slots.astype(np.int32)

    def _release(self, component: TreeComponent, slots: Slots) -> None:
        """The engine no longer has these slots."""
        self._taken[component.index][slots] = False
        self._count[component.index] -= len(slots)
