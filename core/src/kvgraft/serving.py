"""The work behind a cache's calls with one request, compiled in the compiled build.

`kvgraft.cache.Cache` has the same calls for engines, with their types and documents. Here requests
and numbers of tokens are typed as anything: what an engine may get wrong is refused by our own
line, not by the compiler's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kvgraft.admission.decision import Decision, Outcome, Waiting
from kvgraft.admission.promises import Budget
from kvgraft.compiled import mypyc_attr
from kvgraft.errors import LeaseError
from kvgraft.requests.clean_reserve import CleanReserve
from kvgraft.requests.hits import HitCounts
from kvgraft.requests.leases import Leases
from kvgraft.requests.load_back import LoadBacks
from kvgraft.requests.page_slots import PageSlots
from kvgraft.requests.parts import Part
from kvgraft.requests.pending import CacheMark, PendingPages
from kvgraft.requests.publishing import Publisher
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
from kvgraft.requests.rows import Rows
from kvgraft.requests.state_slots import InnerStates, StateSlots
from kvgraft.requests.terms import Terms
from kvgraft.requests.uses import Uses
from kvgraft.transfers import Fence, Journal, Transfer
from kvgraft.transfers.engine import expect_fence
from kvgraft.tree import pinning
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.tree import Tree
from kvgraft.types import Span

if TYPE_CHECKING:
    from kvgraft.parts import Arenas, Prefetch, Recorder, StorageTier
    from kvgraft.requests.pins import Pins
    from kvgraft.tracing import Tracers

__all__ = ["Serving"]

DEFERRED: Final = Outcome.DEFERRED
NEVER_FITS: Final = Outcome.NEVER_FITS
CROWDED: Final = Limited.CROWDED
"""As globals: before Python 3.12 an enum's attribute takes ten times as long to read."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Serving:
    """The work of a cache for one request, call by call.

    Args:
        cache: the cache, which has all its parts.

    Attributes:
        closed: whether the cache was closed.
        mark: known to the cache and its requests, and to no other's.
        requests: those that have begun and not ended, by their `id()`.
        running: those that are admitted, by the `id()` of their key.
        tracers: are told of every step; None if there are none.
        recorder: makes events; None while nobody reads any.
    """

    def __init__(self, cache: Any) -> None:
        self.closed = False
        self.mark = CacheMark(cache)
        self.requests: dict[int, Request] = cache.requests
        self.running: dict[int, Request] = {}
        self.tracers: Tracers | None = None
        self.recorder: Recorder | None = None
        self.tree: Tree = cache.tree
        self.leases: Leases = cache.leases
        self.load_backs: LoadBacks = cache.load_backs
        self.budget: Budget = cache.budget
        self.pins: Pins = cache.pins
        self.uses: Uses = cache.uses
        self.terms: Terms = cache.terms
        self.hits: HitCounts = cache.hits
        self.pending: PendingPages = cache.pending
        self.pages: PageSlots = cache.pages
        self.states: StateSlots = cache.states
        self.publisher: Publisher = cache.publisher
        self.rows: Rows = cache.rows
        self.journal: Journal = cache.journal
        self.clean_reserve: CleanReserve = cache.clean_reserve
        self.timeout_s: float = cache.config.transfer_timeout_s
        self.arenas: Arenas | None = cache.arenas
        self.storage: StorageTier | None = cache.storage or None

    def begin(self, request: Request, prefetch: Prefetch | None) -> None:
        """Match the request's key, and pin the data found."""
        key = request.key
        self._expect_free(key, "begin")
        request.root = root = self.tree.hold(key.namespace)
        try:
            if self.storage is not None:
                self.storage.before_begin(key, prefetch)
            elif prefetch is not None:
                raise LeaseError(
                    f"begin: {prefetch!r:.60} is no prefetch of this cache, which has no storage "
                    "tier; begin without one"
                )
            self.uses.begin(request)
            if self.tree.lifetimes is not None:
                self.terms.begins(request)
            self.leases.lease(request, self._limit(request))
        except BaseException:
            self.tree.let_go(root)
            raise
        if prefetch is not None:
            request.storage_tokens = prefetch.gained_of(request.anchor_tokens)
            size = self.tree.page_size
            request.fetched = Span(prefetch.anchor_tokens // size, prefetch.tokens // size)
        self.requests[id(request)] = request
        if self.tracers is not None:
            self.tracers.tell("begun", request)

    def admit(self, given: Any) -> Decision:
        """See `Cache.admit`."""
        self.expect_open()
        request = self.expect(given, LEASED)
        self._expect_free(request.key, "admit")
        if request.put_off or request.limited is CROWDED or not self._may_share(request):
            request.put_off = False
            self.leases.renew(request, self._limit(request))
        decision = self.budget.decide(request)
        gave: list[Any] = []
        while decision.outcome is DEFERRED and _lacks_host(decision) and self._gives_way(gave):
            decision = self.budget.decide(request)
        if gave and decision.outcome is DEFERRED:
            self._take_back(gave)
            gave, decision = [], self.budget.decide(request)
        if decision.outcome is NEVER_FITS and request.anchor_tokens:
            # Holding a prefix can take more than computing it again; try as a miss (A8).
            self.leases.renew(request, 0)
            decision = self.budget.decide(request)
        elif request.patience and decision.admitted:
            decision = self._put_off(request) or decision
        self.clean_reserve.waited_for = [
            (self.tree.by_name[each.component].device, each.needed)
            for each in decision.shortages
            if each.pool == "device"
        ]
        if decision.admitted:
            self.uses.admitted(request)
            loaded = self.hits.count(request)
            if self.arenas is not None:
                self.arenas.used(request)
            if self.recorder is not None:
                self.recorder.hit(request, loaded)
            self.budget.open(request)
            request.stage = ADMITTED
            self.running[id(request.key)] = request
            gave = []
        elif decision.outcome is DEFERRED and decision.pending is None:
            if self.arenas is not None:
                self.arenas.wish(self.budget.needs(request))
            decision = decision._replace(waits_for=self._waits_for(request))
        self._take_back(gave)
        if self.tracers is not None:
            self.tracers.tell("decided", request, decision)
        return decision

    def load_back(self, given: Any, fence: Fence | None) -> list[Transfer]:
        """See `Cache.load_back`."""
        if fence is not None:
            expect_fence(fence)
        self.expect_open()
        request = self.expect(given, ADMITTED)
        if request.load_failed or request.load_started:
            return request.waits
        waits = self.load_backs.start(request, fence)
        if self.tracers is not None and waits:
            self.tracers.tell("loading", request)
        return waits

    def restart(self, given: Any) -> None:
        """See `Cache.restart`."""
        self.expect_open()
        request = self.expect_own(given)
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
            self.tracers.tell("beginning", request.key)
        held, parts, prompt = request.receipt, request.parts, request.prompt
        computed = request.computed
        request.prompt = max(prompt, request.key.n_tokens)
        self.tree.use_class, self.tree.use_term = request.use_class, request.use_term
        try:
            self.leases.lease(request, limit)
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
        request.load_started = request.put_off = False
        self.rows.give_back(request)
        self._give_up(parts)
        self.leases.unpin(held)
        if self.tracers is not None:
            self.tracers.tell("begun", request)

    def next_chunk(self, given: Any, limit: int | None) -> int:
        """See `Cache.next_chunk`."""
        return self.budget.next_chunk(self.expect(given, ADMITTED), limit)

    def allocate(self, given: Any, n_tokens: object) -> bool:
        """See `Cache.allocate`."""
        request = self._expect_changing(given)
        if request.receipt.host_from is not None:
            request.expect_loaded()
            request.waits = []
            pinning.release_host_copy(self.tree, request.receipt)
        pages = request.pages_short(n_tokens, self.tree.page_size)
        page = request.computed // self.tree.page_size
        within = pages <= 0 or self.pages.has_promise_left(request.parts, pages)
        beyond = [] if within else self.pages.beyond_promise(request, pages, page)
        gave: list[Any] = []
        while beyond is None and self.tree.homes_on_host and self._gives_way(gave):
            beyond = self.pages.beyond_promise(request, pages, page)
        if beyond is None:
            self._take_back(gave)
            return False
        # What is published first leaves the room for these pages: pins of others' data take some.
        for ledger, n_slots in beyond:
            ledger.promised += n_slots
        try:
            if self.tree.has_state:
                self.publisher.publish_states(request)
            if not within and request.bounded_parts:
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
        self, given: Any, n_tokens: object, fence: Fence | None, states: InnerStates | None
    ) -> None:
        """See `Cache.computed`."""
        request = self._expect_changing(given)
        if fence is not None:
            expect_fence(fence)
        self.publisher.computed(request, n_tokens, fence, states)

    def checkpoint(self, given: Any, fence: Fence | None) -> bool:
        """See `Cache.checkpoint`."""
        request = self._expect_changing(given)
        if fence is not None:
            expect_fence(fence)
        request.expect_namespace()
        return self._may_share(request) and self.publisher.checkpoint(request, fence)

    def finish(self, request: Request, fence: Fence | None, hint: object) -> int:
        """End an admitted request and leave its data to the tree; see `Cache.finish`."""
        request.expect_namespace()
        self.uses.finish(request, hint)
        if self.tree.lifetimes is not None:
            self.terms.used(request)
        n_pages = self.publisher.finish(request, fence) if self._may_share(request) else 0
        self._end(request)
        if self.tracers is not None:
            self.tracers.tell("finished", request)
        return n_pages * self.tree.page_size

    def abort(self, given: Any) -> None:
        """See `Cache.abort`."""
        request = self.expect_own(given)
        if request.stage is CLOSED:
            raise LeaseError("request is closed; it was finished or aborted before")
        self._end(request)
        if self.tracers is not None:
            self.tracers.tell("aborted", request)

    def expect_own(self, given: Any) -> Request:
        """Refuse other objects than requests, and other caches' requests that have not ended."""
        if not isinstance(given, Request):
            raise no_request(given)
        if given.cache_mark is not self.mark and given.stage is not CLOSED:
            raise LeaseError("request belongs to another cache; use the one that began it")
        return given

    def expect(self, given: Any, stage: Stage) -> Request:
        """Refuse other objects than this cache's requests in a stage; its uses are of its class."""
        if not isinstance(given, Request) or given.cache_mark is not self.mark:
            self.expect_own(given)
        request: Request = given
        if request.stage is not stage:
            raise LeaseError(
                f"request is {request.stage.value}, this call needs it {stage.value}; "
                f"{NEXT_CALL[request.stage]}"
            )
        self.tree.use_class, self.tree.use_term = request.use_class, request.use_term
        return request

    def expect_open(self) -> None:
        """Refuse what changes a closed cache; requests may end."""
        if self.closed:
            raise LeaseError("the cache is closed; open another")

    def expect_running(self, given: Any) -> None:
        """Refuse a request that the model cannot run."""
        request = self.expect(given, ADMITTED)
        if request.receipt.host_from is not None:
            request.expect_loaded()

    # -- inside

    def _expect_changing(self, given: Any) -> Request:
        """Refuse a request that is not admitted; its row is read anew before its next step."""
        if self.closed:
            self.expect_open()
        request = self.expect(given, ADMITTED)
        if request.row >= 0:
            self.rows.touch(request.row)
        return request

    def _expect_free(self, key: TokenKey, call: str) -> None:
        """Refuse a key that another request runs with: each would append its tokens (T11)."""
        if id(key) in self.running:
            raise LeaseError(
                f"{call}: {self.running[id(key)]!r} runs with this key, and a key is of one "
                "running request; give a copy, copy.copy(key), or call fork"
            )

    def _runs_no_more(self, request: Request) -> None:
        """Its key is free for others."""
        if request.stage is ADMITTED:
            del self.running[id(request.key)]

    def _may_share(self, request: Request) -> bool:
        """Whether its namespace was not cleared since it was matched."""
        cleared = self.tree.cleared
        return not cleared or request.root not in cleared

    def _put_off(self, request: Request) -> Decision | None:
        """Defer a request for the pages that another computes, once less often; None for none."""
        self.pending.ask_for_point(request)
        pending = self.pending.find(request)
        if pending is None:
            return None
        request.patience -= 1
        request.put_off = True
        return Decision(DEFERRED, pending=pending)

    def _gives_way(self, gave: list[Any]) -> bool:
        """Let data kept on HOST for a request that has not begun give way (A8); false for none.

        It is added to `gave`: all of that is taken back if it was not enough (A9).
        """
        found = None if self.storage is None else self.storage.give_way()
        if found is not None:
            gave.append(found)
        return found is not None

    def _take_back(self, gave: list[Any]) -> None:
        if gave and self.storage is not None:
            self.storage.take_back(gave)

    def _waits_for(self, request: Request) -> Waiting:
        """The holders of slots beside a deferred request."""
        stages = [each.stage for each in self.requests.values() if each is not request]
        running = stages.count(ADMITTED)
        return Waiting(
            running,
            len(stages) - running,
            self.journal.n_in_flight,
            self.storage.n_in_flight if self.storage is not None else 0,
            self.arenas.n_pending if self.arenas is not None else 0,
            len(self.pins),
            self.journal.n_overdue(self.timeout_s),
        )

    def _limit(self, request: Request) -> int:
        """Deepest boundary the request may resume from: one token is left to compute (M2)."""
        return (request.prompt - 1) // self.tree.page_size

    def _give_up(self, parts: Sequence[Part]) -> None:
        """Give back a request's private slots and promises, but not its pins (H8)."""
        for part in parts:
            part.give_back()
        self.budget.close(parts)

    def _end(self, request: Request) -> None:
        """The request is over: give up everything it holds."""
        self._give_up(request.parts)
        self._runs_no_more(request)
        request.stage, request.waits = CLOSED, []
        self.rows.give_back(request)
        del self.requests[id(request)]
        self.leases.unpin(request.receipt)
        self.tree.let_go(request.root)


def _lacks_host(decision: Decision) -> bool:
    """Whether a request is short of slots beside those of DEVICE."""
    return any(each.pool != "device" for each in decision.shortages)
