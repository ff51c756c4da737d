"""A request from its match to its end: the slots it takes and gives back (M, A, H8)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from kvgraft.admission.decision import Decision, Outcome, pages_up
from kvgraft.errors import ContractViolation
from kvgraft.policies import Hint
from kvgraft.policies.policy import use_of
from kvgraft.requests.request import ADMITTED, LEASED, Request
from kvgraft.requests.resume_points import resume_pages
from kvgraft.transfers import Fence
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.keys import TokenKey
from kvgraft.types import PointKind, Tier
from kvgraft_guard.books import FREE, IN_FLIGHT, PRIVATE, PROMISED, Counts, Pool, Reading
from kvgraft_guard.decoding import draft_pages
from kvgraft_guard.paths import check_not_cleared
from kvgraft_guard.waits import Waits
from kvgraft_guard.watched import After, Holdings, Watched, holdings

__all__ = ["Admitting"]

SPARE_PAGES = 2
"""Pages a bounded demand holds beyond reach and chunk: one of slack, and one that is kept."""

MAX_DEMAND_FACTOR = 4
"""A component that budgets itself may ask for this multiple of the core's demand."""


class Admitting:
    """Checks of the operations that begin and end requests."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.tree = watched.tree
        self.books = watched.books

    # -- match

    def begin(
        self, key: TokenKey, *, resume_at: int | Sequence[int] | None = None, **others: object
    ) -> After:
        """A match takes nothing (M6), and its claims are true (M1, M2, M3, L3)."""
        del others
        watched = self.watched
        limit = self._limit(key)
        expected = self.watched.matches.expect(key, limit) if limit is not None else None
        watched.rooms.expect(watched.nothing, host_too=watched.copies_hits)
        n_nodes, now_s = self.tree.n_nodes, watched.now_s()

        def after(request: Request, was: Reading, now: Reading) -> None:
            watched.check_time("begin", now_s)
            self._check_nothing_taken("begin", was, now, len(self.books.pools))
            splits = self.tree.n_nodes - n_nodes
            most = watched.most_splits(request.anchor_tokens // self.tree.page_size)
            if most is not None and splits > most:
                raise ContractViolation(
                    "M6",
                    None,
                    f"a match added {splits} nodes; it may split {most}",
                )
            self._check_match(request)
            self._check_term(request)
            if expected is not None and limit is not None:
                self._check_asked(request, resume_at)
                watched.matches.check(request, expected, anew=False)
                watched.contents.check_path(request)
                watched.matches.check_explained(key, limit)

        return after

    def _check_term(self, request: Request) -> None:
        """Its uses have the priority that was asked for it, and none if none was (T7)."""
        term, wanted = request.use_retention, request.requested_retention
        if (None if term is None else term.priority) == (None if wanted is None else wanted[0]):
            return
        raise ContractViolation(
            "T7",
            None,
            f"a request that asks for {wanted or 'no priority'} uses its data as {term}: other "
            f"data leaves before or after it, at use {use_of(self.tree.clock)}",
        )

    def _check_asked(self, request: Request, resume_at: int | Sequence[int] | None) -> None:
        """The request records the pages that the engine named as points (I10)."""
        asked = () if resume_at is None else resume_at
        pages = set(resume_pages(asked, request.prompt, self.tree.page_size))
        if set(request.resume_at) != pages:
            raise ContractViolation(
                "I10",
                None,
                f"the engine asks for points at {resume_at} tokens, the request knows pages "
                f"{request.resume_at}",
            )

    def _limit(self, key: object) -> int | None:
        """The deepest boundary a new request may resume from; None for a key that is refused."""
        if not isinstance(key, TokenKey) or not isinstance(key.namespace, Hashable):
            return None
        return (key.n_tokens - 1) // self.tree.page_size if key.n_tokens else None

    def _check_nothing_taken(self, name: str, was: Reading, now: Reading, pools: int) -> None:
        """Nothing of the first `pools` pools (M6)."""
        if was is now:
            return
        was = was.swept(now)
        for at in range(pools):
            before, after = was.counts[at], now.counts[at]
            if before == after:
                continue
            pool = self.books.pools[at]
            if self._made_room_for_copies(pool, before, after):
                continue
            if before[FREE] != after[FREE] or before[IN_FLIGHT] != after[IN_FLIGHT]:
                raise ContractViolation(
                    "M6",
                    pool.component,
                    f"{name} changed the {pool.name} pool: free went from {before[FREE]} to "
                    f"{after[FREE]}, in flight from {before[IN_FLIGHT]} to {after[IN_FLIGHT]}",
                )

    def _made_room_for_copies(self, pool: Pool, before: Counts, after: Counts) -> bool:
        """Whether a pool may have changed so because a match begins copies of the data it uses.

        Room for them is made on HOST, and data whose canonical copy goes leaves DEVICE, too.
        """
        if not self.watched.copies_hits:
            return False
        return pool.name == "host" or (self.watched.homes and after[FREE] >= before[FREE])

    def _check_match(self, request: Request) -> None:
        anchor, device, size = request.anchor_tokens, request.device_tokens, self.tree.page_size
        if anchor % size or not 0 <= anchor < max(1, request.prompt):
            raise ContractViolation(
                "M2",
                None,
                f"anchor of {anchor} tokens for a prompt of {request.prompt}, pages of {size}; one "
                "token is left to compute",
            )
        if device % size or not 0 <= device <= anchor:
            raise ContractViolation(
                "M3", None, f"device anchor of {device} tokens for an anchor of {anchor}"
            )
        self.watched.leases.check_match(request)

    # -- admission

    def admit(self, request: Request) -> After:
        """A rejection leaves no trace (A9), an admission promises enough (A3, A4, A10)."""
        watched = self.watched
        watched.rooms.expect(watched.nothing, host_too=watched.copies_hits)
        receipt, chunk = request.receipt, request.chunk
        limit = (request.prompt - 1) // self.tree.page_size
        expected = watched.matches.expect(request.key, limit)
        points, known, skipped = dict(request.points), request.skipped, self._skipped()
        waits, wishes = Waits(watched, request), self._wishes()

        def after(decision: Decision, was: Reading, now: Reading) -> None:
            renewed = request.receipt is not receipt
            waits.check(decision, renewed=renewed)
            self._check_first_wish(wishes)
            now = waits.without_point(decision, now)
            was = was.swept(now)
            if renewed:
                watched.shares.forget(request)
                self._check_nothing_taken("admit", was, now, self.books.n_tree)
                self._check_match(request)
                watched.matches.check(request, expected, anew=True)
            else:
                self._check_left_out(request, points, known, self._skipped() - skipped)
            self._check_chunk(request, chunk)
            for component in self.tree.components:
                self._check_demand(request, component)
            watched.promises.check_demands(request)
            if decision.admitted:
                check_not_cleared(self.tree, request)
                self._check_key_is_its_own(request)
                watched.promises.check_decision(request, decision)
                self._check_promises(request, was, now)
                return
            if decision.pending is None:
                self._check_reasons(request, decision)
                self._check_waits_for(request, decision)
            if was.counts == now.counts:
                watched.promises.check_decision(request, decision)
                return
            for pool, before, later in zip(self.books.pools, was.counts, now.counts):
                if renewed and self._made_room_for_copies(pool, before, later):
                    continue
                kept = (FREE, PRIVATE, PROMISED) if renewed else range(len(before))
                if any(before[term] != later[term] for term in kept):
                    raise ContractViolation(
                        "A9",
                        pool.component,
                        f"{decision.outcome.value}, and the {pool.name} pool went from {before} to "
                        f"{later} (free, evictable, pinned, private, in flight, promised)",
                    )
            watched.promises.check_decision(request, decision)

        return after

    def _check_key_is_its_own(self, request: Request) -> None:
        """No other request that runs would append its tokens to the key (T11)."""
        for each in self.watched.cache.requests.values():
            if each.key is request.key and each.stage is ADMITTED and each is not request:
                raise ContractViolation("T11", None, f"{request!r} has the key of {each!r}")

    def _skipped(self) -> int:
        return sum(self.watched.cache.points.skipped.values())

    def _check_left_out(
        self,
        request: Request,
        points: dict[int, PointKind],
        known: frozenset[tuple[int, PointKind]],
        skipped: int,
    ) -> None:
        """Points left out so that a request fits are skipped and counted once, at admission.

        Those of least use to repetitions go first (I11).
        """
        gone = points.keys() - request.points.keys()
        admitted = request.stage is ADMITTED
        if admitted and self.tree.has_state and sorted(request.points) != request.checkpoints:
            raise ContractViolation(
                "I11",
                None,
                f"a request is admitted with points at pages {sorted(request.points)} and captures "
                f"states at {request.checkpoints}",
            )
        repeat = (request.prompt - 1) // self.tree.page_size
        useful = sorted(points, key=lambda page: (page <= repeat, page), reverse=True)
        last = set(useful[len(points) - len(gone) :])
        allowed = last if admitted else set()
        if gone == allowed and skipped == len({(page, points[page]) for page in gone} - known):
            return
        raise ContractViolation(
            "I11",
            None,
            f"admission gave up points at pages {sorted(gone)} and counted {skipped}; states are "
            f"captured at {request.checkpoints} now",
        )

    def _check_chunk(self, request: Request, chunk: int) -> None:
        if request.chunk == chunk:
            return
        if request.chunk % self.tree.page_size or not 0 < request.chunk < chunk:
            raise ContractViolation(
                "A6",
                None,
                f"the chunk went from {chunk} to {request.chunk} tokens; a smaller one is whole "
                f"pages of {self.tree.page_size}",
            )

    def _check_demand(self, request: Request, component: TreeComponent) -> None:
        """The demand holds the next step and the load-back, and is bounded as the reach is."""
        part = request.components[component.index]
        demand, load = part.demand, part.host_slots
        if component.is_state:
            if demand.now - load < 1:
                raise ContractViolation(
                    "A10",
                    component.name,
                    f"{demand} with {load} host hits keeps no slot for the request's own state",
                )
            return
        size = self.tree.page_size
        tokens = min(request.chunk, request.prompt - request.computed)
        end = pages_up(request.computed + tokens, size)
        pages = component.stored_between(pages_up(request.computed, size), end)
        if demand.now < load + pages * component.slots_per_page:
            raise ContractViolation(
                "A3",
                component.name,
                f"{demand} does not hold the next step({pages * component.slots_per_page}) + host "
                f"hits({load})",
            )
        if component.is_prefix_closed:
            return
        reach = component.reach_pages.width(pages_up(request.total, size))
        spare = SPARE_PAGES + draft_pages(self.watched.cache)
        most = (reach + pages + spare) * component.slots_per_page
        if self.watched.cache.mounted[component.index].budget_contribution is not None:
            most *= MAX_DEMAND_FACTOR
        most += load
        if demand.now + demand.later > most:
            raise ContractViolation(
                "A4",
                component.name,
                f"{demand} for a reach of {reach} pages, a step of {pages} and {load} "
                f"host hits; {most} slots would do",
            )

    def _check_promises(self, request: Request, was: Reading, now: Reading) -> None:
        """The demand is promised, and private slots are there (A1)."""
        for at, part in enumerate(request.components):
            account, demand = part.account, part.demand
            before, after = was.counts[at], now.counts[at]
            risen = after[PROMISED] - before[PROMISED]
            if (
                not demand.now + demand.later == account.promised == risen
                or before[PRIVATE] != after[PRIVATE]
            ):
                raise ContractViolation(
                    "A1",
                    account.ledger.component,
                    f"{demand} is admitted: {account.promised} slots are promised, the device pool "
                    f"went from {before} to {after} (free, evictable, pinned, private, in flight, "
                    "promised)",
                )
        if len(self.books.pools) == self.books.n_device:
            return
        promised, private = holdings(self.watched, request)
        for at, (before, after) in enumerate(zip(was.counts, now.counts)):
            if (
                after[PROMISED] - before[PROMISED] != promised[at]
                or after[PRIVATE] - before[PRIVATE] != private[at]
            ):
                pool = self.books.pools[at]
                raise ContractViolation(
                    "A1",
                    pool.component,
                    f"the request has {private[at]} {pool.name} slots and a promise of "
                    f"{promised[at]}; the pool went from {before} to {after} (free, evictable, "
                    "pinned, private, in flight, promised)",
                )

    def _check_reasons(self, request: Request, decision: Decision) -> None:
        """A refused request learns which pool is short, and by how much (A8)."""
        shortages = decision.shortages
        short = [each for each in shortages if each.needed > each.available]
        if not short or len(short) < len(shortages):
            raise ContractViolation(
                "A8",
                None,
                f"{decision}: {len(short)} of {len(shortages)} pools named are short",
            )
        never = decision.outcome is Outcome.NEVER_FITS
        if never and not request.anchor_tokens:
            fits = all(each.needed <= each.capacity for each in shortages)
            if fits:
                raise ContractViolation(
                    "A8", shortages[0].component, f"{decision}, and it fits an empty pool"
                )

    def _check_waits_for(self, request: Request, decision: Decision) -> None:
        """A deferred request learns who holds the room (A8)."""
        waits = decision.waits_for
        if decision.outcome is not Outcome.DEFERRED or waits is None:
            return
        cache = self.watched.cache
        others = [each.stage for each in cache.requests.values() if each is not request]
        running = others.count(ADMITTED)
        said = waits.running, waits.leased, waits.transfers, waits.pins
        held = running, len(others) - running, sum(map(len, self.watched.queues)), len(cache.pins)
        if said != held:
            raise ContractViolation(
                "A8",
                None,
                f"{decision}: it waits for {said} running and leased requests, transfers and pins; "
                f"there are {held}",
            )

    # -- the end

    def restart(self, request: Request) -> After:
        """The request loses everything but the pins (H8) and is matched like any other."""
        watched = self.watched
        watched.rooms.expect(watched.nothing, host_too=watched.copies_hits)
        before = holdings(watched, request)
        limit = (max(request.prompt, request.key.n_tokens) - 1) // self.tree.page_size
        if request.load_failed:
            limit = min(limit, request.device_tokens // self.tree.page_size)
        expected = watched.matches.expect(request.key, limit)

        def after(result: Any, was: Reading, now: Reading) -> None:
            self.watched.shares.forget(request)
            self._check_anew(request)
            self._check_given_back("restart", before, was, now)
            self._check_match(request)
            watched.matches.check(request, expected, anew=True)
            watched.matches.check_points(request, expected)

        return after

    def _wishes(self) -> dict[Tier, Mapping[str, int]]:
        """By tier, the slots of each component that a request waits for, if one does."""
        arenas = self.watched.cache.arenas
        by_tier = {} if arenas is None else arenas.by_tier
        return {tier: each.wished for tier, each in by_tier.items() if each.wished is not None}

    def _check_first_wish(self, before: dict[Tier, Mapping[str, int]]) -> None:
        """The first that waited for a boundary goes first; another once that one has it (A8)."""
        arenas = self.watched.cache.arenas
        if arenas is None:
            return
        for tier, wished in self._wishes().items():
            first = before.get(tier, wished)
            if first is wished:
                continue
            for pool in arenas.by_tier[tier].pools:
                needed, has = first.get(pool.component.name, 0), pool.leased * pool.extent
                if has < needed:
                    raise ContractViolation(
                        "A8",
                        pool.component.name,
                        f"a request waits for {needed} {tier.value} slots, the pool has {has}, and "
                        "another's wish took its place",
                    )

    def _check_anew(self, request: Request) -> None:
        """It stands where a new one does: nothing is under way, and its key is free (R5, T11)."""
        started = request.load_started or request.deferred
        if started or request.stage is not LEASED:
            raise ContractViolation(
                "R5",
                None,
                f"a request that was restarted is {request.stage.value}, and "
                f"{'counts' if started else 'does not count'} as one whose load-back began",
            )
        if self.watched.cache.running.get(id(request.key)) is request:
            raise ContractViolation(
                "T11",
                None,
                f"a request that was restarted runs with its key of {request.key.n_tokens} tokens: "
                "no other one can",
            )

    def finish(
        self,
        request: Request,
        fence: Fence | None = None,
        hint: Hint | str | None = None,
        **others: object,
    ) -> After:
        """Only computed data is cached (I6), and all slots and promises come back (H8)."""
        del fence, hint, others
        if request.root in self.tree.cleared:
            return self.abort(request)
        self.watched.rooms.expect(self.watched.nothing, host_too=True)
        before, had = holdings(self.watched, request), request.cached
        shares = self.watched.shares
        admitted = request.stage is ADMITTED
        offer = shares.offer(request, ending=True) if admitted else None
        now_s = self.watched.now_s()

        def after(cached: int, was: Reading, now: Reading) -> None:
            self.watched.check_time("finish", now_s)
            size = self.tree.page_size
            least = 0 if self.tree.has_state else had * size
            if cached % size or not least <= cached <= max(request.computed, had * size):
                raise ContractViolation(
                    "I6",
                    None,
                    f"{cached} tokens cached of {request.computed} computed behind "
                    f"{had * size}, pages of {size}",
                )
            shares.forget(request)
            self.watched.promises.ended(request)
            if offer is not None:
                n_device = self.books.n_device
                evicted = was.left[:n_device] != now.left[:n_device]
                shares.check_ended(request, offer, cached // size, evicted=evicted)
            self._check_given_back("finish", before, was, now)

        return after

    def abort(self, request: Request) -> After:
        """All slots and promises come back (H8)."""
        self.watched.rooms.expect(self.watched.nothing, host_too=False)
        before = holdings(self.watched, request)

        def after(result: Any, was: Reading, now: Reading) -> None:
            self.watched.shares.forget(request)
            self.watched.promises.ended(request)
            self._check_given_back("abort", before, was, now)
            if result:
                raise ContractViolation(
                    "I6", None, f"{result} tokens cached of a request that was cleared"
                )

        return after

    def _check_given_back(self, name: str, mine: Holdings, was: Reading, now: Reading) -> None:
        for at, (promised, private) in enumerate(zip(*mine)):
            before, after = was.counts[at], now.counts[at]
            if (
                before[PROMISED] - promised != after[PROMISED]
                or before[PRIVATE] - private != after[PRIVATE]
            ):
                pool = self.books.pools[at]
                raise ContractViolation(
                    "H8",
                    pool.component,
                    f"{name} of a request that owned {private} {pool.name} slots and was promised "
                    f"{promised}: private went from {before[PRIVATE]} to {after[PRIVATE]}, "
                    f"promised from {before[PROMISED]} to {after[PROMISED]}",
                )
