"""A cache's parts and its calls with one request, compiled in the compiled build.

`kvgraft.cache.Cache` adds the calls for many requests, for reports and for settings. Arguments that
an engine may get wrong are typed `| Any`, so that the compiled build refuses them with our message
and not with the compiler's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from kvgraft.admission.decision import Decision, Outcome, Waiting
from kvgraft.admission.promises import Budget
from kvgraft.assembly import PartsFactory, mount_all, parts_of, size_pools
from kvgraft.compiled import mypyc_attr
from kvgraft.config import CacheConfig
from kvgraft.errors import ConfigError, LeaseError
from kvgraft.optional import load_if_installed, load_part
from kvgraft.packages.registry import Plugin
from kvgraft.pools.plan import AvailableMemory, available_nbytes
from kvgraft.requests.access import AccessTracker
from kvgraft.requests.backup import Backups, CleanReserve
from kvgraft.requests.components import RequestComponent
from kvgraft.requests.eviction import Evictor
from kvgraft.requests.hits import HitCounts
from kvgraft.requests.leases import Leases, LoadBacks, begin_at
from kvgraft.requests.publishing import Offers, Publisher
from kvgraft.requests.request import (
    ADMITTED,
    CLOSED,
    LEASED,
    NEXT_CALL,
    NO_POINTS,
    Limited,
    Request,
    Stage,
    no_request,
)
from kvgraft.requests.resume_points import ResumePoints
from kvgraft.requests.slots import PageSlots, StateSlots
from kvgraft.sizes import expect_count
from kvgraft.transfers import Fence, Journal, Transfer, TransferEngine
from kvgraft.transfers.engine import expect_fence
from kvgraft.tree import operations, pinning
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.ledger import Ledger
from kvgraft.types import Span, Tier

if TYPE_CHECKING:
    from kvgraft.parts import Prefetch, Recorder, StorageTier, Tracers

DEFERRED: Final = Outcome.DEFERRED
NEVER_FITS: Final = Outcome.NEVER_FITS
CROWDED: Final = Limited.CROWDED


@mypyc_attr(allow_interpreted_subclasses=True)
class Serving:
    """The parts of a cache, and its work for one request, call by call; see `Cache`.

    Attributes:
        mark: known to the cache and its requests, and to no other's.
        running: requests that are admitted, by the `id` of their key.
        tier: the storage tier; None without one.
        tracers: are notified of every step; None if there are none.
        recorder: makes events; None while nobody reads any.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        plugins: Sequence[Plugin] = (),
        transfers: TransferEngine | None = None,
        available: AvailableMemory = available_nbytes,
        parts: PartsFactory | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if clock is not None and not callable(clock):
            raise ConfigError(
                f"clock {clock!r:.40}; give a function of no arguments, such as time.monotonic"
            )
        self.config = config = size_pools(config, plugins)
        parts = parts or parts_of(config)
        self.mounted = mounted = mount_all(config, plugins, available, parts)
        self.tree = tree = parts.tree(mounted)
        self.private = [
            tuple([Ledger(each.name, Tier.DEVICE, own.allocator) for own in each.component.private])
            for each in mounted
        ]
        self.requests: dict[int, Request] = {}
        self.running: dict[int, Request] = {}
        self.mark: Any = ref(self)
        self.closed = False
        self.tracers: Tracers | None = None
        self.recorder: Recorder | None = None
        engine = transfers if transfers is not None else parts.engine()
        self.journal = parts.make(Journal, tree, mounted, engine)
        self.evictor = parts.make(
            Evictor, tree, self.journal, config.write_policy, config.transfer_timeout_s
        )
        self.arenas = parts.arenas(tree, mounted, self.evictor, self.journal, self.requests)
        self.backups = parts.make(Backups, tree, self.journal, self.evictor, config.write_policy)
        self.clean_reserve = parts.make(
            CleanReserve, tree, self.journal, self.evictor, config.write_policy
        )
        self.points = parts.make(ResumePoints, tree, mounted, config)
        self.leases = parts.make(Leases, tree, mounted, config.load)
        self.load_backs = parts.make(LoadBacks, tree, self.journal, self.evictor, self.leases)
        self.budget = parts.make(Budget, tree, mounted, self.private, self.points, self.arenas)
        self.pins: Any = ()
        self.accesses = AccessTracker(tree, parts.policy)
        self.clock = clock if clock is not None else parts.clock
        self.retentions: Any = None
        tenants = parts.tenants
        self.hits: HitCounts = HitCounts(tree) if tenants is None else tenants.hits(tree)
        self.pages = parts.make(PageSlots, tree, self.evictor)
        self.states = parts.make(StateSlots, tree, mounted, self.evictor, self.points)
        self.publisher = parts.make(
            Publisher,
            tree,
            self.pages,
            self.states,
            parts.make(Offers, tree),
            self.leases,
            self.backups,
            self.journal,
        )
        self.storage = parts.storage(tree, mounted, self.evictor, self.requests)
        self.tier: StorageTier | None = self.storage or None
        self._new_recorder = parts.recorder
        self._make: Callable[..., Any] = parts.make
        self._stepper: Any = None
        self._pending: Any = None
        self._engine_slots: Any = None
        load_if_installed("steps", "pending")  # now, since it would delay a pass
        self.guard = parts.ready(self)

    @property
    def stepper(self) -> Any:
        """Steps of all running requests, with their `rows`; made at the first use."""
        if self._stepper is None:
            self._stepper = load_part("steps")(self, self._make)
        return self._stepper

    @property
    def engine_slots(self) -> Any:
        """Slots that the engine takes itself, to be adopted by requests; made at the first use."""
        made = self._engine_slots or self._make(load_part("engine_slots"), self, self._let_run)
        self._engine_slots = made
        return made

    @property
    def pending(self) -> Any:
        """Finds pages that a running request computes for others; made at the first use."""
        if self._pending is None:
            can_wait = not self.leases.never_resumes
            given = self.tree, self.points, self.requests
            self._pending = self._make(load_part("pending"), *given, can_wait=can_wait)
        return self._pending

    def _begin(self, request: Request, prefetch: Prefetch | None) -> None:
        """Match the request's key, and pin the data found."""
        key = request.key
        self.expect_free(key, "begin")
        request.root = root = self.tree.hold_root(key.namespace)
        try:
            if self.tier is not None:
                self.tier.before_begin(key, prefetch)
            elif prefetch is not None:
                raise LeaseError(
                    f"begin: {prefetch!r:.60} is no prefetch of this cache, which has no storage "
                    "tier; begin without one"
                )
            if prefetch is not None:
                size = self.tree.page_size
                request.fetched = Span(prefetch.anchor_tokens // size, prefetch.tokens // size)
            self.accesses.begin(request)
            if self.tree.lifetimes is not None or request.requested_retention is not None:
                self._retain(request)
            self._lease(request, self._limit(request))
        except BaseException:
            self.tree.release_root(root)
            raise
        self.requests[id(request)] = request
        if self.tracers is not None:
            self.tracers.notify("begun", request)

    def admit(self, request: Request | Any) -> Decision:
        """Promise the request its slots, or say which pool is short (A1 to A13).

        A deferred request keeps its lease, and with it room that others may need: abort it and
        begin it again later. `Decision.waits_for` counts the holders of the room. If nothing runs,
        they may be copies in flight: `poll`, and try again. If `waits_for.overdue` counts copies
        that do not end, fail the request.

        A request that fits is deferred, at most `max_deferrals` times, while another computes pages
        that it could resume from: `Decision.pending` names them. The next call matches again.
        Waiting holds only the pins. A request waits only for admitted ones, never for one that
        waits (A8).

        Raises:
            LeaseError: another request runs with its key.
        """
        #   [match again] ─► decide ─┬─ fits ──► admitted, or deferred for pages others compute
        #     ▲                      ├─ short ─► HOST gives way and decide again, or deferred
        #     └── as a miss, once ◄──┴─ never fits
        if self.closed:
            self.expect_open()
        request = self.expect(request, LEASED)
        self.expect_free(request.key, "admit")
        if request.deferred or request.limited is CROWDED or self.tree.is_cleared(request.root):
            request.deferred = False
            self._lease_again(request, self._limit(request))
        decision = self.budget.decide(request)
        gave: list[Any] = []
        while decision.outcome is DEFERRED and _lacks_host(decision) and self._gives_way(gave):
            decision = self.budget.decide(request)
        if gave and decision.outcome is DEFERRED:
            self._take_back(gave)
            gave, decision = [], self.budget.decide(request)
        if decision.outcome is NEVER_FITS and request.anchor_tokens:
            # Holding a prefix can take more than computing it again; try as a miss (A8).
            self._lease_again(request, 0)
            decision = self.budget.decide(request)
        elif request.deferrals_left and decision.admitted:
            decision = self._defer(request) or decision
        if decision.shortages or self.clean_reserve.waited_for:
            self.clean_reserve.waited_for = [
                (self.tree.by_name[each.component].device, each.needed)
                for each in decision.shortages
                if each.pool == "device"
            ]
        if decision.admitted:
            self._let_run(request)
            gave = []
        elif decision.outcome is DEFERRED and decision.pending is None:
            if self.arenas is not None:
                self.arenas.wish(self.budget.needs(request))
            decision = decision._replace(waits_for=self._waits_for())
        if gave:
            self._take_back(gave)
        if self.tracers is not None:
            self.tracers.notify("decided", request, decision)
        return decision

    def load_back(self, request: Request | Any, fence: Fence | None = None) -> list[Transfer]:
        """Start the copies from HOST; return the transfers to wait for (R1 to R7).

        The request may run once `request.ready`; if `request.load_failed`, call `restart`. It is
        true at once if another request's transfer that this one relied on has failed.
        """
        if fence is not None:
            expect_fence(fence)
        self.expect_open()
        request = self.expect(request, ADMITTED)
        if request.load_failed or request.load_started:
            return request.waits
        waits = self.load_backs.start(request, fence)
        if self.tracers is not None and waits:
            self.tracers.notify("loading", request)
        return waits

    def restart(self, request: Request | Any) -> None:
        """Match again, as if new; after a failed load-back as deep as DEVICE alone allows (R5).

        The request loses its slots and pins, and must be admitted again.
        """
        #   match ─► new pins ─► old slots, promises and pins go: data under both pins stays
        self.expect_open()
        request = self.expect_own(request)
        if request.stage is CLOSED:
            raise LeaseError("request is closed; begin a new one")
        request.expect_namespace()
        if request.key.n_tokens < request.prompt:
            raise LeaseError(
                f"key was cut to {request.key.n_tokens} tokens, below the request's prompt of "
                f"{request.prompt}; abort it and begin another"
            )
        limit = (max(request.prompt, request.key.n_tokens) - 1) // self.tree.page_size
        if request.load_failed:
            limit = min(limit, request.device_tokens // self.tree.page_size)
        if self.tracers is not None:
            self.tracers.notify("beginning", request.key)
        held, parts, prompt = request.receipt, request.components, request.prompt
        computed = request.computed
        request.prompt = max(prompt, request.key.n_tokens)
        self.tree.use_class, self.tree.use_retention = request.use_class, request.use_retention
        try:
            self._lease(request, limit)
        except BaseException:
            request.prompt = prompt
            raise
        request.total = max(request.total, request.prompt)
        if request.key_edits != request.key.edits:
            request.key_edits, request.skipped = request.key.edits, NO_POINTS
        if request.stage is ADMITTED:
            request.key.counted = computed
        self._runs_no_more(request)
        request.stage = LEASED
        request.load_started = request.deferred = False
        if request.row >= 0:
            self.stepper.rows.give_back(request)
        self._give_up(parts)
        pinning.release(self.tree, held)
        if self.tracers is not None:
            self.tracers.notify("begun", request)

    def next_chunk(self, request: Request | Any, limit: int | Any = None) -> int:
        """Prefill tokens the next step may compute; 0 defers it, unchanged (A5, A6).

        Ends at boundaries where a state is captured, and on a page boundary unless it ends the
        prompt. Larger than the admitted chunk only if every pool has the headroom (A12). It
        reserves nothing: `allocate` before you ask for another request's chunk.
        """
        if limit is not None:
            limit = expect_count("next_chunk: limit", limit)
        return self.budget.next_chunk(self.expect(request, ADMITTED), limit)

    def allocate(self, request: Request | Any, n_tokens: int | Any) -> bool:
        """Take slots for the next `n_tokens` tokens, in whole pages, so maybe for more tokens.

        Always succeeds within the admitted demand (A7). Beyond it, succeeds if every pool has
        headroom; otherwise nothing changes, False is returned, and the engine retracts a request.
        A state component's live state is set up here, by copy on write from the prefix (M8), and
        a state due at the boundary just passed is kept: call it before every run of the model.

        Raises:
            LeaseError: a load-back the request waits for has not ended or has failed, or a number
                of tokens that is none.
        """
        #   promised ─► taken       beyond ─► out of headroom, in every pool, or nothing changes
        request = self._expect_changing(request)
        pages = request.pages_short(n_tokens, self.tree.page_size)
        if request.receipt.host_from is not None:
            request.expect_loaded()
            request.waits = []
            if not self.tree.homes_on_host:
                pinning.release_host(self.tree, request.receipt)
        page, beyond = 0, list[tuple[Ledger, int]]()
        within = pages <= 0 or self.pages.has_promise_left(request.components, pages)
        if not within:
            page = request.computed // self.tree.page_size
            page = self.publisher.points.reached_from(request, page)
            found, gave = self.pages.unreserved(request, pages, page), list[Any]()
            while found is None and self.tree.homes_on_host and self._gives_way(gave):
                found = self.pages.unreserved(request, pages, page)
            if found is None:
                self._take_back(gave)
                return False
            beyond = found
        # Reserved before publishing, which pins other requests' data and so takes headroom.
        for ledger, n_slots in beyond:
            ledger.promised += n_slots
        try:
            if self.tree.has_state:
                self.publisher.publish_states(request)
            if not within and request.bounded_components:
                self.publisher.leave_behind(request, page, pages)
        finally:
            for ledger, n_slots in beyond:
                ledger.promised -= n_slots
        if pages > 0 and not self.pages.allocate_pages(request, pages):
            return False
        if self.tree.has_state:
            self.states.set_up_states(request)
        return True

    def computed(
        self, request: Request | Any, n_tokens: int | Any, fence: Fence | None = None
    ) -> None:
        """The data of the next `n_tokens` tokens exists in the allocated slots.

        The key may still lack them, for example if the model has just sampled them: extend it
        before the next `checkpoint`, and before the request ends.

        Notes where states are to be kept. Hands pages that a bounded reach has passed to the tree
        (I9), and loosens the pins on them (L6); a request at the end of its reservation keeps such
        pages until it ends. `table` stays the same for all pages that a reach still covers.

        Args:
            request: whose.
            n_tokens: how many; at most the slots of the allocated pages, which may be more than the
                argument of `allocate`.
            fence: when that data exists, if not yet; its copies to HOST wait for it (B4).

        Raises:
            LeaseError: no number of tokens, or more than slots are allocated for.
        """
        request = self._expect_changing(request)
        if fence is not None:
            expect_fence(fence)
        self.publisher.computed(request, n_tokens, fence)

    def checkpoint(
        self, request: Request | Any, fence: Fence | None = None, *, keep_slots: bool | Any = False
    ) -> bool:
        """Share the data computed so far, up to the deepest legal boundary (I5, I6).

        Afterwards `table` may name other slots for pages that another request inserted before. With
        `keep_slots`, for engines whose tables only grow, it does not: the request keeps its own
        slots of those pages until it ends (N1). The call returns False and changes nothing when
        there is nothing new, when the shared pages could not be replaced out of the headroom (A12),
        or when its namespace was cleared since it began. If a component keeps states, `keep_slots`
        raises `ConfigError`: there `allocate` shares and keeps all slots.
        """
        request = self._expect_changing(request)
        request.expect_namespace()
        if keep_slots and request.state_components:
            said = f"is for pages, and {request.state_components[0].component.name!r} keeps states"
            raise ConfigError(f"checkpoint: keep_slots {said}; leave it out")
        if fence is not None:
            expect_fence(fence)
            self.journal.set_fence(fence)  # even if declined: it covers others' data (B4)
        if self.tree.cleared and request.root in self.tree.cleared:
            return False
        return self.publisher.checkpoint(request, keep_slots=bool(keep_slots))

    def abort(self, request: Request | Any) -> None:
        """Drop a request in any stage, with the data computed since its last checkpoint (L8)."""
        request = self.expect_own(request)
        if request.stage is CLOSED:
            raise LeaseError("request is closed; it was finished or aborted before")
        self._end(request)
        if self.tracers is not None:
            self.tracers.notify("aborted", request)

    def expect_own(self, given: Any) -> Request:
        """Refuse other objects than requests, and other caches' requests that have not ended."""
        if not isinstance(given, Request):
            raise no_request(given)
        if given.cache_mark is not self.mark and given.stage is not CLOSED:
            raise LeaseError("request belongs to another cache; use the one that began it")
        return given

    def expect(self, given: Any, stage: Stage) -> Request:
        """Refuse other objects than this cache's requests in a stage; its uses get its class."""
        if not isinstance(given, Request) or given.cache_mark is not self.mark:
            self.expect_own(given)
        request: Request = given
        if request.stage is not stage:
            raise LeaseError(
                f"request is {request.stage.value}, this call needs it {stage.value}; "
                f"{NEXT_CALL[request.stage]}"
            )
        self.tree.use_class, self.tree.use_retention = request.use_class, request.use_retention
        return request

    def expect_open(self) -> None:
        """Refuse calls that change a closed cache, except for ends of requests."""
        if self.closed:
            raise LeaseError("the cache is closed; open another")

    def expect_running(self, given: Any) -> None:
        """Refuse a request that the model cannot run."""
        request = self.expect(given, ADMITTED)
        if request.receipt.host_from is not None:
            request.expect_loaded()

    # -- inside

    def _lease(self, request: Request, limit: int) -> None:
        """Match at most `limit` pages of a request's key, and let it begin at what is found."""
        lease = self.leases.lease(request.key, limit)
        anchor = lease.receipt.anchor
        try:
            if anchor.parent is not None:
                if self.backups.enabled:
                    self.backups.matched(lease.receipt)
                for each in self.tree.observers:
                    each.matched(anchor)
        except BaseException:
            pinning.release(self.tree, lease.receipt)
            raise
        begin_at(lease, request, self.tree)
        if lease.receipt.host_from is not None:
            for operation in operations.waits_for(lease.receipt, self.tree.components):
                request.waits.append(self.journal.find(operation))
        request.points, request.checkpoints = {}, []
        if self.points.matter:
            ahead = self.points.ahead(request, lease.match, lease.asked)
            request.points, request.checkpoints = ahead

    def _lease_again(self, request: Request, limit: int) -> None:
        """The same once more; the old pins go when the new ones stand (I8).

        Raises:
            LeaseError: the key is in another namespace than the request.
        """
        request.expect_namespace()
        held = request.receipt
        self._lease(request, limit)
        pinning.release(self.tree, held)

    def _expect_changing(self, given: Any) -> Request:
        """Refuse a request that is not admitted; its row is read anew before its next step."""
        if self.closed:
            self.expect_open()
        request = self.expect(given, ADMITTED)
        if request.row >= 0:
            self.stepper.rows.touch(request.row)
        return request

    def expect_free(self, key: TokenKey, call: str) -> None:
        """Refuse a key that another request runs with: each would append its tokens (T11)."""
        other = self.running.get(id(key))
        if other is not None:
            said = "runs with this key, and a key is of one running request; give a copy"
            raise LeaseError(f"{call}: {other!r} {said}, copy.copy(key), or call fork")

    def _retain(self, request: Request) -> None:
        """Give the retention that is asked for to all that the request uses from now on."""
        if self.retentions is None:
            self.retentions = load_part("lifetimes")(self.tree, self.clock)
        self.retentions.used(request)

    def key_was_cut(self, key: TokenKey, end: int) -> None:
        """The request that runs with the key goes on if it loses only rejected drafts."""
        request = self.running[id(key)]
        if end >= max(request.prompt, request.computed):
            request.key_edits += request.key_edits == key.edits - 1
            request.was_cut(end)

    def _let_run(self, request: Request) -> None:
        """Count an admitted request and promise its demand; others may not use its key (T11)."""
        self.accesses.admitted(request)
        loaded = self.hits.count(request)
        if self.arenas is not None:
            self.arenas.used(request)
        if self.recorder is not None:
            self.recorder.hit(request, loaded)
        self.budget.open(request)
        request.stage, key = ADMITTED, request.key
        self.running[id(key)] = request
        others = [each for each in key.runners if each() is not None] if key.runners else ()
        key.runners = (*others, self.mark)

    def _runs_no_more(self, request: Request) -> None:
        """Free the request's key for others."""
        if request.stage is ADMITTED:
            del self.running[id(request.key)]
            runners = request.key.runners
            others = [each for each in runners if each is not self.mark] if len(runners) > 1 else ()
            request.key.runners = tuple(others)

    def _defer(self, request: Request) -> Decision | None:
        """Use one deferral to wait for pages that another computes; None if it cannot."""
        self.pending.ask_for_point(request)
        pending = self.pending.find(request)
        if pending is None:
            return None
        request.deferrals_left -= 1
        request.deferred = True
        return Decision(DEFERRED, pending=pending)

    def _gives_way(self, gave: list[Any]) -> bool:
        """Give up data kept on HOST for a request that has not begun (A8); false if there is none.

        It is added to `gave`, so that it can be taken back if it was not enough (A9).
        """
        found = None if self.tier is None else self.tier.give_way()
        if found is not None:
            gave.append(found)
        return found is not None

    def _take_back(self, gave: list[Any]) -> None:
        if gave and self.tier is not None:
            self.tier.take_back(gave)

    def _waits_for(self) -> Waiting:
        """The holders of slots beside a deferred request; O(transfers that are overdue)."""
        return Waiting(
            len(self.running),
            len(self.requests) - len(self.running) - 1,
            self.journal.n_in_flight,
            self.tier.n_in_flight if self.tier is not None else 0,
            self.arenas.n_pending if self.arenas is not None else 0,
            len(self.pins),
            self.journal.n_overdue(self.config.transfer_timeout_s),
        )

    def _limit(self, request: Request) -> int:
        """Deepest boundary the request may resume from: one token is left to compute (M2)."""
        return (request.prompt - 1) // self.tree.page_size

    def _give_up(self, parts: Sequence[RequestComponent]) -> None:
        """Give back a request's private slots and promises, but not its pins (H8)."""
        for part in parts:
            part.give_back()
        self.budget.close(parts)

    def _end(self, request: Request) -> None:
        """The request is over: give up everything it holds."""
        self._give_up(request.components)
        self._runs_no_more(request)
        request.stage, request.waits = CLOSED, []
        if request.row >= 0:
            self.stepper.rows.give_back(request)
        del self.requests[id(request)]
        pinning.release(self.tree, request.receipt)
        self.tree.release_root(request.root)


def _lacks_host(decision: Decision) -> bool:
    """Whether a request is short of slots beside those of DEVICE."""
    return any(each.pool != "device" for each in decision.shortages)
