"""A request at work, and the cache between requests (A5, A7, I12, M4, M8, R1, R5, E6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvgraft.errors import ContractViolation
from kvgraft.requests.components import Due
from kvgraft.requests.request import ADMITTED, Request
from kvgraft.requests.tables import state_number
from kvgraft.transfers import Fence
from kvgraft.tree.component import TreeComponent
from kvgraft.types import Direction, Tier
from kvgraft_guard.books import EVICTABLE, FREE, PRIVATE, PROMISED, Reading
from kvgraft_guard.leases import Moment
from kvgraft_guard.paths import follow
from kvgraft_guard.published import Departed, SequenceSlots
from kvgraft_guard.shares import Offer, Spare
from kvgraft_guard.watched import After, Watched

__all__ = ["Running"]


class Running:
    """Checks of the operations between admission and end.

    Attributes:
        clock: operations checked so far; 0 if not all are, so that one may be missed in between.
    """

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.tree = watched.tree
        self.books = watched.books
        self.clock = 0
        self._offered: tuple[Request | None, int, int] = (None, 0, 0)

    # -- load-back

    def load_back(self, request: Request, fence: Fence | None = None) -> After:
        """It takes no more than was promised (M4) and brings the missing data (R1)."""
        del fence
        watched = self.watched
        needs = [part.host_slots for part in request.components]
        watched.rooms.expect(needs, host_too=watched.write_back, loading=True)
        moved = watched.cache.journal.counters[Direction.LOAD_BACK].slots
        before, started = dict(moved), request.load_started
        over = started or request.load_failed

        def after(result: Any, was: Reading, now: Reading) -> None:
            if over and dict(moved) != before:
                raise ContractViolation(
                    "R5", None, "a load-back began for a request whose load-back began or failed"
                )
            for part in request.components:
                component, promised = part.component, part.host_slots
                loaded = moved[component.name] - before[component.name]
                if loaded > promised:
                    raise ContractViolation(
                        "M4",
                        component.name,
                        f"the load-back takes {loaded} slots, the match said {promised}",
                    )
            begun = request.load_started and not started and not request.load_failed
            if begun and request.receipt.host_from is not None:
                watched.leases.check(request, Moment.LOADING)
                watched.matches.check_waits(request)

        return after

    # -- computing

    def next_chunk(self, request: Request, limit: int | None = None) -> After:
        """The admitted chunk always fits (A7), and asking changes nothing (A5)."""
        self.watched.rooms.expect(self.watched.nothing, host_too=False)
        left = request.prompt - request.computed
        most = request.chunk if limit is None else limit

        def after(n_tokens: int, was: Reading, now: Reading) -> None:
            if not 0 <= n_tokens <= max(0, min(left, most)):
                raise ContractViolation(
                    "A6", None, f"a chunk of {n_tokens} tokens, {left} are left, limit {most}"
                )
            if not n_tokens and left > 0 and 0 < most <= request.chunk:
                raise self._refused(request, f"a chunk of {min(left, most)} tokens")
            if was != now:
                raise ContractViolation(
                    "A5", None, f"asking for a chunk changed {was.counts} to {now.counts}"
                )
            self.watched.promises.check_chunk(request, limit, n_tokens)
            self._offered = (request, n_tokens, self.clock)

        return after

    def allocate(self, request: Request, n_tokens: int) -> After:
        """Promised slots are given (A7); a refusal changes nothing (A5)."""
        watched, size = self.watched, self.tree.page_size
        pages = max(0, -(-(request.computed + n_tokens) // size) - request.allocated)
        first = request.allocated
        needs = [
            1
            if component.is_state
            else component.stored_between(first, first + pages) * component.slots_per_page
            for component in self.tree.components
        ]
        watched.rooms.expect(needs, host_too=watched.write_back or watched.homes)
        loaded = bool(request.waits)
        states, peaks = watched.shares.states(request), watched.promises.peaks(request)
        hands_over = self._lacks_promise(request, pages) or any(
            each.due or each.captured for each in states.values()
        )
        left = watched.shares.published.see(request) if hands_over else None
        rooms = self._headrooms(self.books.read())
        falls = [
            max(0, needed - part.account.promised) + self._may_take(part.component, left)
            for needed, part in zip(needs, request.components)
        ]

        def after(given: bool, was: Reading, now: Reading) -> None:  # noqa: FBT001 - a result
            if not given:
                if self._was_promised(request, n_tokens, pages):
                    raise self._refused(request, f"{n_tokens} tokens")
                if left is None:
                    self._check_unchanged("A5", "a refused allocation", was, now)
                else:
                    self._check_left(request, left, was, now)
                    self._check_none_evicted("a refused allocation", was, now)
                return
            departed = self._check_left(request, left, was, now)
            for component, needed in zip(self.tree.components, needs):
                gone = departed.get(component.index)
                n_gone = gone.adopted + gone.freed if gone is not None else 0
                self._check_taken(request, component, (needed, n_gone), was, now)
            if loaded:
                watched.leases.check(request, Moment.RUNNING)
            unforeseen = any(
                each.due_as in (Due.GRID, Due.LEFT)
                or (each.due and each.due_as is Due.DECODED and not request.keeps_decoded)
                for each in states.values()
            )
            watched.promises.check_within(request, n_tokens, peaks, spare=unforeseen)
            watched.shares.allocated(request, left=left is not None)
            shared = self._shared_states(request, left)
            watched.shares.check_kept(request, states, shared, self._spare(was))
            self._check_headroom("allocate", falls, rooms, now)

        return after

    def _lacks_promise(self, request: Request, pages: int) -> bool:
        """Whether pages come out of the data it left behind, which it gives up first."""
        return pages > 0 and any(
            part.account.promised < pages * part.component.slots_per_page
            for part in request.bounded_components
        )

    def _was_promised(self, request: Request, n_tokens: int, pages: int) -> bool:
        """Whether the request may rely on getting the slots."""
        end = request.computed + n_tokens
        offered, tokens, at = self._offered
        if offered is request and 0 < at == self.clock - 1 and n_tokens <= tokens:
            return True
        if request.computed < request.prompt:
            return n_tokens <= request.chunk and end <= request.prompt
        drafts = self.watched.cache.config.max_drafts if request.draft_pages else 0
        return end <= request.total + drafts and pages <= 1

    def _refused(self, request: Request, what: str) -> ContractViolation:
        """Say which pool could not give slots promised to an admitted request (A7)."""
        for part in request.components:
            component, account, ledger = part.component, part.account, part.component.device
            if not component.is_state and account.promised + max(0, ledger.headroom) < (
                component.slots_per_page
            ):
                break
        else:
            part = request.components[0]
            component, account, ledger = part.component, part.account, part.component.device
        demand = part.demand
        return ContractViolation(
            "A7",
            component.name,
            f"{what} at {request.computed} of {request.prompt} + "
            f"{request.total - request.prompt} were admitted and refused: promised"
            f"({account.promised}) of a demand of now({demand.now}) + later({demand.later}), "
            f"headroom({ledger.headroom}), {ledger.equation()}",
        )

    def _check_taken(
        self,
        request: Request,
        component: TreeComponent,
        moved: tuple[int, int],
        was: Reading,
        now: Reading,
    ) -> None:
        """Pages came from the promise or the headroom; a state is the request's own (A12, M8).

        `moved` are the slots it needed and those that left it.
        """
        needed, gone = moved
        before, after = was.counts[component.index], now.counts[component.index]
        if after[PROMISED] > before[PROMISED] + gone:
            raise ContractViolation(
                "A12",
                component.name,
                f"an allocation raised the promises from {before[PROMISED]} to {after[PROMISED]}",
            )
        taken = after[PRIVATE] - before[PRIVATE] + gone
        states = request.state_component(component.index)
        if states is None:
            if taken != needed:
                raise ContractViolation(
                    "A1", component.name, f"{taken} slots were taken where {needed} are needed"
                )
            return
        if states.live is None or taken > needed:
            raise ContractViolation(
                "A10",
                component.name,
                f"{taken} states were taken and the live one is {states.live!r}; the request "
                "writes to a state of its own",
            )
        if states.live == request.receipt.anchor.cells[component.index].device:
            raise ContractViolation(
                "M8",
                component.name,
                f"the request writes to state {state_number(states.live)}, which "
                f"{request.receipt.anchor!r} holds for others",
            )

    def computed(self, request: Request, n_tokens: int, fence: Fence | None = None) -> After:
        """Slots go to the tree or are freed, none is taken; it costs no promise (I12)."""
        del fence
        watched, shares, size = self.watched, self.watched.shares, self.tree.page_size
        watched.rooms.expect(watched.nothing, host_too=False)
        stood, ahead = request.computed // size, list(request.checkpoints)
        due = None if n_tokens else shares.due(request)
        left = None
        if (request.computed + n_tokens) // size > stood and shares.published.matters:
            left = shares.published.see(request)
        rooms = self._headrooms(self.books.read())

        def after(result: Any, was: Reading, now: Reading) -> None:
            departed = self._check_left(request, left, was, now)
            shares.computed(request, left)
            if left is not None:
                watched.leases.check_loosened(request)
            shares.check_due(request, ahead, due)
            for at, (before, later) in enumerate(zip(was.counts, now.counts)):
                pool = self.books.pools[at]
                own = at < self.books.n_device or pool.tree_component.home_is_host
                gone = departed.get(pool.tree_component.index) if own else None
                freed = gone.freed if gone is not None and at < self.books.n_device else 0
                risen = later[FREE] - before[FREE]
                fallen = before[PRIVATE] - later[PRIVATE]
                if pool.tree_component.is_state:
                    freed = risen  # a state that the tree had is free again
                    gone = gone or Departed(0, 0)
                if risen < freed or fallen < 0 or (gone is None and risen):
                    raise ContractViolation(
                        "A12",
                        pool.component,
                        f"computed took slots: free went from {before[FREE]} to {later[FREE]}, "
                        f"private from {before[PRIVATE]} to {later[PRIVATE]}; {freed} left the "
                        "request to be free",
                    )
            falls = [
                0 if component.is_state else self._may_take(component, left)
                for component in self.tree.components
            ]
            self._check_headroom("computed", falls, rooms, now)
            if left is not None and request.receipt.anchor.parent is not None:
                watched.leases.check(request, Moment.HELD)

        return after

    def _may_take(self, component: TreeComponent, left: SequenceSlots | None) -> int:
        """Slots of the headroom that handing over may cost: a state, others' pages it pins."""
        if left is None:
            return 0
        if component.is_state:
            return 1
        if not component.is_prefix_closed:
            return 0
        return self.watched.shares.published.beside(left, component) * component.slots_per_page

    def _check_left(
        self, request: Request, left: SequenceSlots | None, was: Reading, now: Reading
    ) -> dict[int, Departed]:
        """Data that left the request in an operation, if any, went where it must."""
        if left is None:
            return {}
        evicted = self._evicted(was, now)
        return self.watched.shares.published.check(request, left, None, evicted=evicted)

    def _evicted(self, was: Reading, now: Reading) -> bool:
        """Whether data was evicted on DEVICE."""
        return was.left[: self.books.n_device] != now.left[: self.books.n_device]

    def _shared_states(self, request: Request, left: SequenceSlots | None) -> set[int]:
        """Boundaries at which the tree has all states of a request that may hand some over."""
        if left is None:
            return set()
        nodes, end = follow(self.tree, request.key, request.allocated, request.root)
        states = [component.index for component in self.tree.components if component.is_state]
        return {
            node.end
            for node in nodes
            if node.end <= end and all(node.cells[at].device is not None for at in states)
        }

    def _check_none_evicted(self, what: str, was: Reading, now: Reading) -> None:
        """Apart from data it handed over, it changes nothing (A5)."""
        was = was.swept(now)
        for at in range(self.books.n_device):
            if was.left[at] != now.left[at]:
                raise ContractViolation(
                    "A5",
                    self.books.pools[at].component,
                    f"{what} evicted: slots that left by cause went from {was.left[at]} to "
                    f"{now.left[at]}",
                )

    # -- promises

    def _headrooms(self, reading: Reading) -> list[int]:
        """Slots of each DEVICE pool that nobody was promised; slots being demoted count.

        They come free with their copies.
        """
        found = []
        for at in range(self.books.n_device):
            counts = reading.counts[at]
            leaving = sum([each.leaving for each in self.tree.components[at].devices])
            found.append(counts[FREE] + counts[EVICTABLE] + leaving - counts[PROMISED])
        return found

    def _check_headroom(
        self, name: str, falls: Sequence[int], rooms: list[int], now: Reading
    ) -> None:
        """Data that a request hands to the tree costs no other request a slot (I12)."""
        for at, (room, later, fall) in enumerate(zip(rooms, self._headrooms(now), falls)):
            if later < room - fall:
                pool = self.books.pools[at]
                raise ContractViolation(
                    "I12",
                    pool.component,
                    f"slots that nobody was promised went from {room} to {later} in {name}, which "
                    f"may take {fall} of them: {pool.ledger.equation()}, promised"
                    f"({pool.ledger.promised})",
                )

    def _spare(self, was: Reading) -> Spare:
        """The slots that every state pool had to spare; none for sure among tenants."""
        if self.watched.rooms.tenancy.shared:
            return Spare(False, False)
        counts = [each for each, one in zip(was.counts, self.tree.components) if one.is_state]
        slot = all(each[FREE] + each[EVICTABLE] > each[PROMISED] for each in counts)
        return Spare(slot, slot and all(each[FREE] > 0 for each in counts))

    def checkpoint(
        self, request: Request, fence: Fence | None = None, *, keep_slots: bool = False
    ) -> After:
        """It shares up to a legal boundary (I6), or changes nothing; slots stay if asked (N1)."""
        del fence
        if request.stage is not ADMITTED:
            return _refused
        watched = self.watched
        watched.rooms.expect(watched.states, host_too=True)
        anchor = request.receipt.anchor.end
        offer, states = watched.shares.offer(request, ending=False), watched.shares.states(request)
        tables = watched.shares.tables(request) if keep_slots else None

        def after(shared: bool, was: Reading, now: Reading) -> None:  # noqa: FBT001 - a result
            end = request.cached
            if tables is not None:
                watched.shares.check_slots_stay(request, tables)
            shared_states = self._shared_states(request, offer.left)
            watched.shares.check_kept(request, states, shared_states, self._spare(was))
            if not shared:
                self._check_declined(request, offer)
                if not self.tree.has_state:
                    self._check_unchanged("I6", "a declined checkpoint", was, now)
                return
            deepest = request.computed // self.tree.page_size
            if not offer.cached <= end <= deepest or not max(end, anchor) <= (
                request.receipt.anchor.end
            ):
                raise ContractViolation(
                    "I6",
                    None,
                    f"a checkpoint went from page {offer.cached} to {end}, pinned up to "
                    f"{anchor} and {request.receipt.anchor.end}, with {request.computed} tokens "
                    f"computed in pages of {self.tree.page_size}",
                )
            watched.leases.check(request, Moment.HELD)
            watched.shares.check_shared(request, offer, end, evicted=self._evicted(was, now))
            watched.shares.remember(request)

        return after

    def _check_declined(self, request: Request, offer: Offer) -> None:
        """Nothing new could be shared, or it was declined for want of headroom (I6)."""
        if request.root in self.tree.cleared:
            return
        if self.watched.cache.publisher.declined_checkpoints > offer.declined:
            return
        if offer.at_least > offer.cached and offer.anything:
            raise ContractViolation(
                "I6",
                None,
                f"a checkpoint shares nothing beyond page {offer.cached}; {offer.at_least} pages "
                f"of the request of {request.prompt} tokens could be",
            )

    def _check_unchanged(self, rule: str, what: str, was: Reading, now: Reading) -> None:
        """DEVICE books are as they were; the HOST copy of a load-back may have been let go."""
        was = was.swept(now)
        for at in range(self.books.n_device):
            if was.counts[at] != now.counts[at]:
                raise ContractViolation(
                    rule,
                    self.books.pools[at].component,
                    f"{what} changed the device pool from {was.counts[at]} to {now.counts[at]} "
                    "(free, evictable, pinned, private, in flight, promised)",
                )

    # -- between requests

    def poll(self) -> After:
        """Transfers end; evictions are only for slots that move (K7) and copies made ahead."""
        self._expect_moves()
        watched, now_s = self.watched, self.watched.now_s()
        wished, idle = self._wished(), not self._in_flight()

        def after(result: Any, was: Reading, now: Reading) -> None:
            watched.check_time("poll", now_s)
            self._check_wished(wished)
            if idle and not self._in_flight():
                self._check_arrived()

        return after

    def _in_flight(self) -> bool:
        """Whether copies, calls of the store or the engine's computation are under way."""
        cache = self.watched.cache
        fence, tier = cache.journal.fence, cache.storage
        computes = fence is not None and fence.wait(0.0) is False
        return bool(cache.journal.n_in_flight or (tier and tier.n_in_flight) or computes)

    def _wished(self) -> dict[tuple[str, str], tuple[int, int]]:
        """By pool, the slots that it has and those that a request waits for, if any does."""
        arenas = self.watched.cache.arenas
        return {
            (tier.value, pool.component.name): (
                pool.leased * pool.extent,
                arena.wished.get(pool.component.name, 0),
            )
            for tier, arena in (arenas.by_tier.items() if arenas is not None else ())
            if arena.wished is not None
            for pool in arena.pools
        }

    def _check_wished(self, wished: dict[tuple[str, str], tuple[int, int]]) -> None:
        """No pool lost what a request waits for (A8)."""
        arenas = self.watched.cache.arenas
        for tier, arena in arenas.by_tier.items() if arenas is not None else ():
            for pool in arena.pools:
                before, wanted = wished.get((tier.value, pool.component.name), (0, 0))
                has = pool.leased * pool.extent
                if has < min(before, wanted):
                    raise ContractViolation(
                        "A8",
                        pool.component.name,
                        f"its {tier.value} pool went from {before} to {has} slots, and a request "
                        f"waits for {wanted}",
                    )

    def _check_arrived(self) -> None:
        """Nothing is under way, so no slot of an extent that moves has to wait (K7)."""
        arenas = self.watched.cache.arenas
        arena = arenas.by_tier.get(Tier.DEVICE) if arenas is not None else None
        if arena is not None and arena.moving is not None:
            giver = arena.moving[0]
            raise ContractViolation(
                "K7",
                giver.component.name,
                f"an extent of its pool stays on its way: {giver.allocator.closing} slots of it "
                "are in use, with nothing in flight",
            )

    def move_memory(self, giver: str, taker: str, tier: Tier = Tier.DEVICE) -> After:
        """An extent changes its pool: as many slots move as it has (K7)."""
        del giver, taker, tier
        self._expect_moves()
        return _nothing

    def _expect_moves(self) -> None:
        """Room is made for the slots of an extent."""
        watched, arenas = self.watched, self.watched.cache.arenas
        if arenas is None:
            watched.rooms.expect(watched.nothing, host_too=watched.write_back)
            return
        needs = [arenas.extent_of(each.name, Tier.DEVICE) for each in self.tree.components]
        host_too = Tier.HOST in arenas.by_tier or watched.write_back
        watched.rooms.expect(needs, host_too=host_too)

    def drain(self) -> After:
        """Transfers end; if it says that all did, they did (R2)."""
        self.watched.rooms.expect(self.watched.nothing, host_too=False)

        def after(all_ended: bool, was: Reading, now: Reading) -> None:  # noqa: FBT001 - a result
            in_flight = self.watched.cache.journal.n_in_flight
            if all_ended and in_flight:
                raise ContractViolation(
                    "R2", None, f"drain says that all transfers ended, {in_flight} have not"
                )
            if all_ended:
                self._check_cleared()

        return after

    def _check_cleared(self) -> None:
        """Nothing is in flight: cleared data that nobody holds is gone (T3)."""
        for node in self.tree.nodes(self.tree.cleared):
            held = [
                cell.device_pins or cell.host_pins
                for cell in node.cells
                if cell.device is not None or cell.host is not None
            ]
            if not node.children and not any(held) and not node.receipts:
                raise ContractViolation(
                    "T3",
                    None,
                    f"{node!r} was cleared, and with nothing in flight it stays after a drain: "
                    f"{len(held)} components have data of it",
                )

    def evict(self, component: str, n_slots: int, tier: Tier = Tier.DEVICE) -> After:
        """It returns the slots it freed, and is short only if nothing evictable was left (E6)."""
        watched = self.watched
        tree_component = self.tree.by_name.get(component)
        device = tier is Tier.DEVICE
        ledger = (
            None
            if tree_component is None
            else tree_component.device
            if device
            else tree_component.host
        )
        needs = list(watched.nothing)
        closing = 0 if ledger is None else ledger.allocator.closing
        if tree_component is not None and ledger is not None and device:
            needs[tree_component.index] = ledger.free + n_slots
        watched.rooms.expect(needs, host_too=not device or watched.write_back)

        def after(freed: int, was: Reading, now: Reading) -> None:
            if tree_component is None or ledger is None:
                return
            at = tree_component.index if device else self.books.host[tree_component.index]
            before, later = was.counts[at], now.counts[at]
            gone = closing - ledger.allocator.closing
            if freed != later[FREE] - before[FREE] - gone:
                raise ContractViolation(
                    "E6",
                    component,
                    f"evict says {freed}, free went from {before[FREE]} to {later[FREE]}",
                )
            left = later[EVICTABLE] if device and not watched.write_back else 0
            if freed < n_slots and left:
                raise ContractViolation(
                    "E6", component, f"{freed} of {n_slots} slots freed with {left} evictable left"
                )

        return after


def _nothing(result: Any, was: Reading, now: Reading) -> None:
    """Everything that matters holds after any operation."""


def _refused(result: Any, was: Reading, now: Reading) -> None:
    """The core refuses the call, and nothing follows it."""
