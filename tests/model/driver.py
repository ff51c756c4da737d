"""An engine that uses the cache and checks every operation against the model.

It computes nothing but stamps, has several requests at a time in any stage, and lets transfers run
late, in any order or not at all. After each operation the books are recomputed, and what changed
is compared with what was allowed to.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

from kvgraft import TokenKey, WritePolicy
from kvgraft.admission import Outcome
from kvgraft.types import Tier

from .brute_force import BruteForce, ModelComponent, Prefix, needed_tokens
from .checks import check_closure, check_flights, check_gains, check_payloads, check_promises
from .engines import PromptedTransferEngine
from .legality import Pressure, Recency, check_losses, remaining_victims
from .live import Live
from .observing import Snapshot, observe
from .payloads import Payloads
from .predicting import Prediction, adopted, missing, predict
from .setups import Setup, Sizes, open_cache

__all__ = ["Driver"]

CROWDED = "A12"
RECOMPUTE = "R8"

F = TypeVar("F", bound=Callable[..., Any])

needed = lru_cache(maxsize=None)(needed_tokens)


def checked(operation: F) -> F:
    """Note when an operation did not end well, whichever check stopped it."""

    @wraps(operation)
    def call(self: Driver, *given: Any, **named: Any) -> Any:
        self._depth += 1
        result = operation(self, *given, **named)
        self._depth -= 1
        return result

    return cast(F, call)


class Driver:
    """One cache, its model and its running requests.

    Attributes:
        live: running requests, oldest first.
        ended: sequences that were finished lately, for conversations that go on.
        counts: what happened, for reports.
    """

    def __init__(self, setup: Setup, sizes: Sizes) -> None:
        self.setup, self.sizes = setup, sizes
        self.model = BruteForce(sizes.page_size, setup.components)
        self.engine = PromptedTransferEngine()
        self.cache = open_cache(setup, sizes, self.engine)
        self.payloads = Payloads(self.cache, self.model)
        self.recency = Recency(self.model)
        self.live: list[Live] = []
        self.ended: deque[Prefix] = deque(maxlen=6)
        self.counts: Counter[str] = Counter()
        self._depth = 0
        self.paged = [each for each in setup.components if not each.is_state]
        self.states = [each for each in setup.components if each.is_state]
        self.slot_nbytes = {
            each.name: each.component.device.slot_nbytes for each in self.cache.mounted
        }
        self.mirrored = [
            name for name, tier in observe(self.cache, self.model).books if tier == "host"
        ]
        self.write_back = sizes.policy is WritePolicy.WRITE_BACK
        self._empty: Any = None
        self.payloads.poison()
        self.seen = observe(self.cache, self.model)

    @property
    def sound(self) -> bool:
        """Whether every operation so far passed its checks."""
        return not self._depth

    # -- one operation and its checks

    def act(
        self,
        name: str,
        operation: Callable[[], Any],
        *,
        pressure: Pressure | None = None,
        inserted: dict[str, dict[Prefix, tuple[int, ...] | None]] | None = None,
        uses: Callable[[Any], None] | None = None,
        acknowledges: bool = False,
    ) -> Any:
        """Run an operation, then check the books, what changed and every byte."""
        before = self.seen
        pressure = pressure if pressure is not None else Pressure()
        self.recency.settle()
        result = operation()
        self.counts[name] += 1
        self.payloads.poison()
        self.cache.check_integrity()
        after = self.seen = observe(self.cache, self.model)
        if uses is not None:
            uses(result)
        evicts = bool(pressure.device) and self.write_back
        if evicts:
            pressure = replace(pressure, host=dict.fromkeys(self.mirrored))
        check_losses(self.model, before, after, pressure, self.recency)
        check_gains(
            before,
            after,
            inserted=inserted if inserted is not None and result is not False else {},
            remade=any(pressure.device.values()),
            loads_may_end=acknowledges,
            backups_may_end=acknowledges or evicts,
        )
        check_closure(self.model, after, host_closed=not self.write_back)
        check_promises(self.model, after, self.live)
        check_flights(self.payloads, self.engine, after)
        check_payloads(self.model, self.payloads, after)
        return result

    def _touching(self, live: Live, limit: int) -> tuple[Prediction, Pressure]:
        """What a lease must find, and the room it may make: selective backup at a hit (B6)."""
        found = predict(
            self.model,
            self.sizes,
            self.slot_nbytes,
            self.seen,
            (live.namespace, live.tuple),
            limit,
        )
        selective = self.sizes.policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        return found, Pressure(host=dict.fromkeys(self.mirrored) if selective else {})

    def _resumed(self, live: Live, boundary: int) -> Callable[[Any], None]:
        sequence = (live.namespace, live.tuple)
        return lambda result: self.recency.resumed(sequence, boundary, self.seen)

    # -- the life of a request

    @checked
    def begin(
        self, namespace: object, tokens: tuple[int, ...], reserve: int, chunk: int | None
    ) -> Live:
        """Match and pin; everything a match promises is checked."""
        key = TokenKey(tokens, namespace)
        chunk = chunk if chunk is not None else len(tokens)
        live = Live(None, namespace, tokens, len(tokens), reserve, chunk)
        limit = (len(tokens) - 1) // self.model.page_size
        self.explain(live, key, limit)
        before = self.seen
        found, pressure = self._touching(live, limit)
        live.request = self.act(
            "begin",
            lambda: self.cache.begin(key, reserve=reserve, chunk=chunk),
            pressure=pressure,
            uses=self._resumed(live, found.anchor),
        )
        live.leased(self.model.page_size)
        self.check_lease(live, before, found)
        self.live.append(live)
        return live

    def explain(self, live: Live, key: TokenKey, limit: int) -> None:
        """`explain` agrees with the model, component by component (M9)."""
        told = self.cache.explain(key)
        found, _ = self._touching(live, limit)
        size = self.model.page_size
        assert (told.anchor, told.device_anchor) == (found.deepest * size, found.device * size), (
            f"M9: explain says {told}, the model {found}"
        )
        known_pages = self.seen.known()
        known = 0
        while known < limit and (
            self.model.prefix(live.namespace, live.tuple, known) in known_pages
        ):
            known += 1
        assert told.known == known * size, f"M9: explain knows {told.known}, the model {known}"
        parts = {each.name: each for each in self.model.components}
        for reason in told.components:
            component = parts[reason.component]
            for accepts, present in (
                (reason.accepts, self.seen.readable(component)),
                (reason.device_accepts, self.seen.on_device(component)),
            ):
                deepest = next(
                    boundary
                    for boundary in range(known, -1, -1)
                    if self.model.accepts(component, present, live.namespace, live.tuple, boundary)
                )
                assert accepts == deepest * size, f"M9: {reason}, the model says {deepest}"

    def check_lease(self, live: Live, before: Snapshot, found: Prediction) -> None:
        """The lease is what the model found (M1 to M4), or says why not."""
        request, size = live.request, self.model.page_size
        limited = request.limited or ""
        if CROWDED in limited:
            self.counts["crowded"] += 1
            assert request.anchor_tokens == 0
            self._check_crowded(live, before, found)
            return
        assert (RECOMPUTE in limited) == (found.anchor < found.deepest), f"R8: {limited!r}, {found}"
        assert request.anchor_tokens == found.anchor * size, (
            f"M1: anchored at {request.anchor_tokens}, the model says {found} pages"
        )
        assert request.anchor_tokens < max(live.prompt, 1), "M2: no token left to compute"
        assert request.device_tokens == found.device * size, (
            f"M3: {request.device_tokens} on device, the model says {found}"
        )
        wanted = dict.fromkeys(self.slot_nbytes, 0)
        if found.anchor > found.device:
            wanted = missing(self.model, before, live.namespace, live.tuple, found.anchor)
            self.counts["host hits"] += 1
        names = [track.name for track in self.cache.tree.tracks]
        assert dict(zip(names, request.host_slots)) == wanted, (
            f"M4: host hits {dict(zip(names, request.host_slots))}, the model says {wanted}"
        )

    def _check_crowded(self, live: Live, before: Snapshot, found: Prediction) -> None:
        """Pinning the match would really have taken promised slots (A12)."""
        for component in self.model.components:
            held = before.held[component.name]
            pages = self.model.prefixes(component, live.namespace, live.tuple, found.anchor)
            for tier, cells, pinned in (
                ("device", held.device, held.device_pinned),
                ("host", held.host, held.host_pinned),
            ):
                books = before.books.get((component.name, tier))
                if books is None:
                    continue
                moved = sum(page in cells and page not in pinned for page in pages)
                if moved * component.slots_per_page > books.headroom:
                    return
        raise AssertionError(f"A12: {live.request.limited}, but every pool has the headroom")

    @checked
    def admit(self, live: Live) -> Any:
        """Ask for admission; check that the answer is fair and leaves no trace unless yes."""
        request, before = live.request, self.seen
        crowded = CROWDED in (request.limited or "")
        anchored = request.anchor_tokens
        found, pressure = self._touching(live, (live.prompt - 1) // self.model.page_size)
        decision = self.act(
            "admit",
            lambda: self.cache.admit(request),
            pressure=pressure if crowded else None,
            uses=self._resumed(live, found.anchor) if crowded else None,
        )
        self.counts[decision.outcome.value] += 1
        moved = crowded or request.anchor_tokens != anchored
        if moved:
            chunk = live.chunk
            live.leased(self.model.page_size)
            live.chunk = chunk
            if crowded and decision.outcome is not Outcome.NEVER_FITS and request.anchor_tokens:
                self.check_lease(live, before, found)
        live.deferred = decision.outcome is Outcome.DEFERRED
        if decision.outcome is Outcome.NEVER_FITS:
            assert self.alone(live) is Outcome.NEVER_FITS, (
                f"A8: {decision}; an empty cache takes the request"
            )
        elif not decision.admitted:
            assert decision.shortages
            if not moved:
                assert self.seen.books == before.books, "A9: a rejection left a trace"
        else:
            live.admitted = True
            # Checkpoints beyond the prompt's end are given up where there is no room for them.
            assert set(request.checkpoints) <= live.due
            live.due = set(request.checkpoints)
            assert request.chunk >= 1
            if request.chunk < min(live.chunk, live.prompt - live.computed):
                assert request.chunk % self.model.page_size == 0, "A6: an unaligned chunk"
                self.counts["chunk shrunk"] += 1
        return decision

    def alone(self, live: Live) -> Outcome:
        """What an empty cache of the same configuration answers to the request."""
        if self._empty is None:
            self._empty = open_cache(self.setup, self.sizes, PromptedTransferEngine())
        request = self._empty.begin(
            TokenKey(live.tuple[: live.prompt], live.namespace),
            reserve=live.reserve,
            chunk=live.chunk,
        )
        outcome: Outcome = self._empty.admit(request).outcome
        self._empty.abort(request)
        return outcome

    @checked
    def load_back(self, live: Live) -> None:
        """Start the load-back of an admitted request; it must find room (A7)."""
        wanted = missing(self.model, self.seen, live.namespace, live.tuple, live.anchor)
        counters = next(
            each for way, each in self.cache.journal.counters.items() if way.value == "load_back"
        )
        started = counters.started
        if live.request.load_failed:
            # A transfer it relied on, started for another request, delivered nothing.
            wanted = {}
        self.act(
            "load back",
            lambda: self.cache.load_back(live.request),
            pressure=Pressure(device=wanted),
        )
        live.loaded = True
        assert counters.started - started == any(wanted.values()), (
            f"R1/R6: {counters.started - started} load-backs for {wanted}"
        )

    @checked
    def restart(self, live: Live) -> None:
        """Match again from scratch."""
        live.prompt = max(live.prompt, len(live.tuple))
        live.reserve = max(live.reserve, live.request.total - live.prompt, 0)
        before = self.seen
        limit = (live.prompt - 1) // self.model.page_size
        if live.request.load_failed:
            # What HOST did not deliver is not asked for again (R5).
            limit = min(limit, live.request.device_tokens // self.model.page_size)
        found, pressure = self._touching(live, limit)
        # Its own pins and pages go first.
        live.anchor = live.computed = 0
        live.started = False
        self.act(
            "restart",
            lambda: self.cache.restart(live.request),
            pressure=pressure,
            uses=self._resumed(live, found.anchor),
        )
        live.reserve = live.request.total - live.prompt
        live.chunk = live.request.chunk
        live.leased(self.model.page_size)
        if CROWDED not in (live.request.limited or ""):
            self.check_lease(live, before, found)

    @checked
    def prefill(self, live: Live, limit: int | None) -> None:
        """One prefill step; the admitted chunk always fits (A7)."""
        left = live.prompt - live.computed
        n_tokens = self.cache.next_chunk(live.request, limit)
        asked = min(left, live.request.chunk if limit is None else limit)
        assert n_tokens <= max(asked, 0)
        if limit is None or limit <= live.request.chunk:
            assert n_tokens > 0, f"A7: no room for an admitted chunk of {asked} tokens"
        if n_tokens > 0:
            self.advance(live, n_tokens, within_reservation=True)

    @checked
    def decode(self, live: Live, token: int) -> bool:
        """One decode step; within the reservation it always succeeds (A7)."""
        within = live.computed < live.prompt + live.reserve
        if live.computed == len(live.tuple):
            live.tuple = (*live.tuple, token)
            live.request.key.extend([token])
        return self.advance(live, 1, within_reservation=within)

    def advance(self, live: Live, n_tokens: int, *, within_reservation: bool) -> bool:
        """Allocate, read what the step reads, write what it computes."""
        size, request = self.model.page_size, live.request
        pages = -(-(live.computed + n_tokens) // size) - request.allocated
        wanted = {each.name: max(0, pages) * each.slots_per_page for each in self.paged}
        # The live state at first; later the copy of a state that is due to be kept.
        wanted |= {each.name: 1 for each in self.states}
        host = {each.name: wanted[each.name] for each in self.paged if each.home_is_host}
        given = self.act(
            "allocate",
            lambda: self.cache.allocate(request, n_tokens),
            pressure=Pressure(device=wanted, host=dict(host)),
        )
        if not given:
            assert not within_reservation, f"A7: {n_tokens} tokens of the reservation refused"
            self.counts["beyond reservation refused"] += 1
            return False
        live.started = True
        self.read(live)
        self.write(live, live.computed + n_tokens)
        before, decoding = live.computed, live.computed + n_tokens >= live.prompt
        live.computed += n_tokens
        self.act("computed", lambda: self.cache.computed(request, n_tokens))
        page, rest = divmod(live.computed, size)
        if self.states and not rest:
            if page in live.due:
                live.due.discard(page)
                live.captured.add(page)
            elif decoding and live.reserve:
                live.tracked = page
        assert before < live.computed == request.computed
        return True

    def read(self, live: Live) -> None:
        """What the next token attends to is there and right (M7, M8, R5, R7)."""
        size = self.model.page_size
        for component in self.paged:
            table = self.cache.table(live.request, component.name).tolist()
            per_page = component.slots_per_page
            pages: dict[Prefix, tuple[int, ...]] = {}
            for page in {token // size for token in needed(component.parts, live.computed)}:
                slots = tuple(table[page * per_page : (page + 1) * per_page])
                assert min(slots, default=-1) >= 0, (
                    f"R5: {component.name} has no slot for page {page} at {live.computed}"
                )
                end = min((page + 1) * size, live.computed)
                pages[live.namespace, live.tuple[:end]] = slots
            self.payloads.check(component, "device", pages, "a running request")
            if component.home_is_host:
                rows = self.cache.host_table(live.request, component.name).tolist()
                for position, prefix in enumerate(sorted(pages, key=lambda each: len(each[1]))):
                    pages[prefix] = (rows[position],)
                self.payloads.check(component, "host", pages, "a running request")
        for component in self.states:
            if live.computed:
                slot = self.cache.state_slot(live.request, component.name)
                prefix = (live.namespace, live.tuple[: live.computed])
                self.payloads.check(component, "device", {prefix: (slot,)}, "a running request")

    def write(self, live: Live, end: int) -> None:
        """Compute tokens up to `end` into the request's slots."""
        size = self.model.page_size
        for component in self.paged:
            table = self.cache.table(live.request, component.name).tolist()
            rows = (
                self.cache.host_table(live.request, component.name).tolist()
                if component.home_is_host
                else []
            )
            per_page = component.slots_per_page
            for page in range(live.computed // size, -(-end // size)):
                prefix = (live.namespace, live.tuple[: min((page + 1) * size, end)])
                slots = table[page * per_page : (page + 1) * per_page]
                assert len(slots) == per_page
                assert min(slots) >= 0
                self.payloads.write(component, "device", prefix, slots)
                if rows:
                    self.payloads.write(component, "host", prefix, [rows[page]])
        for component in self.states:
            slot = self.cache.state_slot(live.request, component.name)
            self.payloads.write(component, "device", (live.namespace, live.tuple[:end]), [slot])

    # -- sharing and the end

    def _offer(
        self, live: Live, boundary: int, states: set[int]
    ) -> dict[str, dict[Prefix, tuple[int, ...] | None]]:
        """Private data up to a boundary, by page."""
        size = self.model.page_size
        offered: dict[str, dict[Prefix, tuple[int, ...] | None]] = {}
        for component in self.paged:
            table = self.cache.table(live.request, component.name).tolist()
            per_page = component.slots_per_page
            offered[component.name] = {}
            for page in range(live.anchor, boundary):
                slots = tuple(table[page * per_page : (page + 1) * per_page])
                if slots and min(slots) >= 0:
                    prefix = self.model.prefix(live.namespace, live.tuple, page)
                    offered[component.name][prefix] = slots
        for component in self.states:
            offered[component.name] = {
                (live.namespace, live.tuple[: page * size]): None
                for page in states
                if live.anchor < page <= boundary
            }
        return offered

    def _share(
        self, live: Live, boundary: int, states: set[int], operation: Callable[[], Any], name: str
    ) -> Any:
        """Run an operation that inserts up to a boundary."""
        inserted = adopted(self.model, self.seen, self._offer(live, boundary, states))
        before = self.seen
        known = before.known()
        path = {
            self.model.prefix(live.namespace, live.tuple, page) for page in range(max(boundary, 0))
        }

        deeper = boundary > live.anchor

        def uses(result: Any) -> None:
            if result is not False and deeper:
                self.recency.created(path - known)
                for part, held in self.seen.held.items():
                    self.recency.adopted(part, held.device.keys() - before.held[part].device.keys())
                position = live.computed // self.model.page_size
                self.recency.resumed(
                    (live.namespace, live.tuple),
                    boundary,
                    self.seen,
                    position,
                    since=live.anchor if name == "finish" else 0,
                )

        write_through = self.sizes.policy is WritePolicy.WRITE_THROUGH
        pressure = Pressure(
            device={} if name == "finish" else {each.name: 1 for each in self.states},
            host=dict.fromkeys(self.mirrored) if write_through else {},
            passing=path,
        )
        return self.act(name, operation, pressure=pressure, inserted=inserted, uses=uses)

    @checked
    def checkpoint(self, live: Live) -> None:
        """Share what is computed so far; declined only for a reason (I5, I6, A12)."""
        boundary = live.computed // self.model.page_size
        if self.states:
            boundary = min(boundary, max(live.captured, default=0))
        declined = self.cache.declined_checkpoints
        moved = self._share(
            live,
            boundary,
            set(live.captured),
            lambda: self._checkpoint(live, boundary),
            "checkpoint",
        )
        if boundary <= live.anchor and not moved:
            return
        assert moved or self.cache.declined_checkpoints == declined + 1, "I6: declined for nothing"
        assert not moved or live.anchor == boundary

    def _checkpoint(self, live: Live, boundary: int) -> bool:
        moved: bool = self.cache.checkpoint(live.request)
        if moved:
            live.anchor = boundary
            live.captured = {page for page in live.captured if page > boundary}
        return moved

    @checked
    def finish(self, live: Live) -> None:
        """End a request; what can be cached is (I6, I7)."""
        size = self.model.page_size
        boundary, rest = divmod(live.computed, size)
        states = set(live.captured)
        if self.states:
            if not rest and live.started and boundary:
                states.add(boundary)
            elif live.tracked:
                states.add(live.tracked)
            boundary = min(boundary, max(states, default=0))
        self.live.remove(live)
        cached = self._share(
            live, boundary, states, lambda: self.cache.finish(live.request), "finish"
        )
        assert cached == max(boundary, live.anchor) * size, (
            f"I6: finish cached {cached} tokens, the model says {boundary} pages"
        )
        self.ended.append((live.namespace, live.tuple))

    @checked
    def abort(self, live: Live) -> None:
        """Drop a request."""
        self.live.remove(live)
        self.act("abort", lambda: self.cache.abort(live.request))

    # -- transfers and room

    @checked
    def poll(self) -> None:
        """Take in transfers that ended."""
        self.act("poll", self.cache.poll, acknowledges=True)

    @checked
    def drain(self) -> None:
        """Let everything in flight end."""
        if self.engine.pending or self.cache.journal.n_in_flight:
            ended = self.act("drain", self.cache.drain, acknowledges=True)
            assert ended, "drain left transfers in flight"
            assert not self.engine.pending, "a transfer was acknowledged before it ran"

    @checked
    def evict(self, component: ModelComponent, n_slots: int, tier: Tier) -> None:
        """Ask for room; it is made, or there is no victim left (E2, E6)."""
        books = self.seen.books.get((component.name, tier.value))
        if books is None:
            assert self.cache.evict(component.name, n_slots, tier) == 0
            return
        wanted = books.free + n_slots
        pressure = (
            Pressure(device={component.name: wanted})
            if tier is Tier.DEVICE
            else Pressure(host={component.name: wanted})
        )
        before = self.seen
        freed = self.act(
            f"evict {tier.value}",
            lambda: self.cache.evict(component.name, n_slots, tier),
            pressure=pressure,
        )
        now = self.seen.books[component.name, tier.value]
        assert freed == now.free - before.books[component.name, tier.value].free
        if freed < n_slots:
            left = remaining_victims(self.model, self.seen, component, tier.value)
            assert not left, f"E6: {freed} of {n_slots} slots freed, {left} are still victims"
            # On HOST a load-back pins only what it reads; what that hangs from stays as well.
            assert now.evictable == 0 or (tier is Tier.HOST and component.is_everything), (
                f"E6: {freed} of {n_slots} slots freed, {now.evictable} still evictable"
            )

    @checked
    def quiesce(self, waiting: Live | None, *, finish: bool) -> None:
        """Everything else ends; whoever waits is admitted now (A8)."""
        for live in list(self.live):
            if live is waiting:
                continue
            if finish and live.admitted:
                self.finish(live)
            else:
                self.abort(live)
        self.drain()
        if waiting is not None:
            decision = self.admit(waiting)
            if not decision.admitted:
                # Matching again may have started a backup, whose pins end with it.
                self.drain()
                decision = self.admit(waiting)
            assert decision.admitted, f"A8: alone in the cache, and still {decision}"

    def close(self) -> None:
        """End everything; nothing may be left (T3, T8)."""
        self.quiesce(None, finish=True)
        for _ in range(2):
            for tier in (Tier.DEVICE, Tier.HOST):
                for component in self.model.components:
                    books = self.seen.books.get((component.name, tier.value))
                    if books is not None:
                        self.evict(component, books.capacity, tier)
            self.drain()
        for key, books in self.seen.books.items():
            assert books.free == books.capacity, f"T8: {key} leaks: {books}"
            assert not books.promised, f"A12: {key} still promises {books.promised}"
        for ledgers in self.cache.private:
            for ledger in ledgers:
                assert ledger.free == ledger.capacity, f"H8: {ledger.equation()}"
        assert not self.seen.nodes, f"T3: {self.seen.nodes} outlive their data"
        self.cache.close()
