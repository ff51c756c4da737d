"""An engine that uses the cache and checks every call against the model.

It computes only stamps, has several requests at a time in any stage, and lets transfers run late,
in any order or not at all. After each call the books are recomputed, and the changes are compared
with the allowed ones.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from kvgraft.admission import Decision, Outcome
from kvgraft.config import WritePolicy
from kvgraft.errors import LeaseError
from kvgraft.requests.request import Limited, Request
from kvgraft.tree.keys import TokenKey
from kvgraft.types import Direction, Namespaces
from kvgraft_testing.machine.admissions import Admissions
from kvgraft_testing.machine.bench import Bench
from kvgraft_testing.machine.brute_force import Gone, Prefix
from kvgraft_testing.machine.comparing import check_unchanged, pins, plain
from kvgraft_testing.machine.donations import Donations
from kvgraft_testing.machine.hooks import locks
from kvgraft_testing.machine.judging import Judge, as_violation
from kvgraft_testing.machine.keeping import HINTS
from kvgraft_testing.machine.keys import Keys
from kvgraft_testing.machine.leases import Leases
from kvgraft_testing.machine.legality import Pressure
from kvgraft_testing.machine.live import Live, Using
from kvgraft_testing.machine.observing import Snapshot
from kvgraft_testing.machine.pins import Pinning
from kvgraft_testing.machine.prefetches import Fetched, Prefetches
from kvgraft_testing.machine.resuming import Progress
from kvgraft_testing.machine.rooms import Rooms
from kvgraft_testing.machine.setups import Setup
from kvgraft_testing.machine.sharing import Sharing
from kvgraft_testing.machine.sizes import Sizes
from kvgraft_testing.machine.steps import Form, Steps
from kvgraft_testing.machine.trace import demanded, shown
from kvgraft_testing.machine.waiting_line import WaitingLine

__all__ = ["Harness"]


MOST_WISHES = 2
"""Boundaries named at a time: that of an earlier request, and its own."""


class Harness:
    """One cache, its model and its running requests.

    Args:
        setup: the component set.
        sizes: page size, policy and pools.
        judge: raises broken rules; by default all of them.

    Attributes:
        bench: the cache, the model and the checks.
        rooms: evictions and transfers.
        live: running requests, oldest first.
        ended: recently finished sequences, for conversations that go on.
    """

    def __init__(self, setup: Setup, sizes: Sizes, judge: Judge | None = None) -> None:
        self.bench = Bench(setup, sizes, judge if judge is not None else Judge())
        self.cache, self.model, self.judge = self.bench.cache, self.bench.model, self.bench.judge
        self.live = self.bench.live
        self.rooms = Rooms(self.bench)
        self.pins = self.bench.pins = Pinning(self.bench)
        self.prefetches = self.bench.prefetches = Prefetches(self.bench, self.rooms.poll)
        self.leases = Leases(self.bench)
        self.steps = Steps(self.bench)
        self.donations = Donations(self.bench)
        self.admissions = Admissions(self.bench)
        self.sharing = Sharing(self.bench)
        self.ended: deque[Prefix] = deque(maxlen=6)
        self._begun = 0
        self._keys = Keys()

    def _touched(self, sequence: Prefix, limit: int) -> Pressure:
        """The room a lease may make: at a hit, backup of data without a copy (B6, I9).

        That never comes out of data above, which is held meanwhile.
        """
        copies = self.bench.sizes.policy is not WritePolicy.WRITE_BACK
        return Pressure(
            asks=sequence[0],
            host=dict.fromkeys(self.bench.mirrored) if copies else {},
            passing={self.model.prefix(*sequence, page) for page in range(limit)},
        )

    def _resumed(self, sequence: Prefix, before: Snapshot, limit: int) -> Callable[[object], None]:
        """Notes that a request resumes at its match."""

        def note(result: object) -> None:
            del result
            found = self.leases.predict(before, sequence, limit, self.bench.calls)
            locked = locks(self.bench.calls, found.anchor)
            self.bench.recency.resumed(sequence, found.anchor, self.bench.seen, locked=locked)

        return note

    # -- the life of a request

    def begin(  # noqa: PLR0913, PLR0917 - as an engine gives them
        self,
        namespace: object,
        tokens: tuple[int, ...],
        reserve: int,
        chunk: int | None,
        mark: int = 0,
        max_deferrals: int = 0,
        fork_of: Live | None = None,
        fetched: Fetched | None = None,
    ) -> Live:
        """Match and pin; everything a match promises is checked."""
        bench = self.bench
        self._begun += 1
        name = f"r{self._begun}"
        where = "" if namespace is None else f" in namespace {namespace!r}"
        bench.trace.call(
            f"begin {name} with {shown(tokens)}{where}, reserve {reserve}, "
            f"chunk {'all' if chunk is None else chunk}{f', resume at {mark}' if mark else ''}"
            f"{f', max_deferrals {max_deferrals}' if max_deferrals else ''}"
            f"{f', prefetched by {fetched.name}' if fetched is not None else ''}"
        )
        if fetched is not None:
            self.prefetches.fetched.remove(fetched)
        known = self._begun % 2 == 1
        hint = HINTS[self._begun % len(HINTS)]
        key = self._keys.known(namespace, tokens) if known else TokenKey(tokens, namespace)
        sequence = (namespace, tokens)
        limit = self.leases.limit(len(tokens))
        told, before = None, bench.seen
        try:
            told = self.cache.explain(key)
        except Exception as error:  # noqa: BLE001 - the core's error is the finding
            self.judge.refuse(error, "explain")

        priority, ttl_s = bench.setup.keeping.wanted(namespace)
        term = bench.retention(namespace)

        def lease() -> Request:
            if fork_of is not None:
                own = tokens[fork_of.request.key.n_tokens :]
                return self.cache.fork(fork_of.request, own, reserve=reserve)
            return self.cache.begin(
                key,
                reserve=reserve,
                chunk=chunk,
                resume_at=mark,
                hint=hint,
                max_deferrals=max_deferrals,
                priority=priority,
                ttl_s=ttl_s,
                prefetch=None if fetched is None else fetched.prefetch,
            )

        request = bench.act(
            "begin",
            lease,
            pressure=self._touched(sequence, limit),
            uses=self._resumed(sequence, before, limit),
            by=[Using(namespace, (term,))],
        )
        asked = chunk if chunk is not None else len(tokens)
        live = Live(name, request, namespace, tokens, len(tokens), reserve, asked, mark)
        live.deferrals_left, live.retention = max_deferrals, term
        live.steps = self._begun // 2 % 2 == 1
        live.adopts = self._begun % 3 == 0 and self.bench.may_adopt
        live.leased(self.model.page_size)
        self._tell_lease(live)
        if fetched is not None:
            self.prefetches.taken(fetched, request)
        self.leases.check(live, before, limit, bench.calls)
        if told is not None:  # after the match itself: where that is wrong it is M1
            self.leases.check_explanation(sequence, before, limit, told)
        self.leases.check_boundaries(live, before, limit, bench.calls)
        self.live.append(live)
        return live

    def fork(self, live: Live, tail: tuple[int, ...], reserve: int) -> Live:
        """Another sample continues a running request, which shares its data first."""
        self.checkpoint(live)
        self.bench.trace.call(f"fork {live.name}")
        self.bench.counts["forks"] += 1
        forked = self.begin(
            live.namespace, (*live.tuple, *tail), reserve, live.request.chunk, fork_of=live
        )
        asked, given = (
            (each.chunk, each.hint, each.requested_retention)
            for each in (live.request, forked.request)
        )
        self.judge.expect(
            given == asked, "T7", None, lambda: f"a fork of {live.name} asks {given}, not {asked}"
        )
        return forked

    def misuse(self, live: Live) -> None:
        """Try its key for another request, and tokens that do not follow the computed ones (T11).

        Both would share data under wrong tokens.
        """
        request, standing = live.request, plain(live.request)
        wrong: dict[str, Callable[[], object]] = {"begin": lambda: self.cache.begin(request.key)}
        if live.loaded and not live.waiting and request.key.n_tokens != live.computed:
            wrong["step"] = lambda: self.cache.step([request], [1], n_computed=0)
        for name, call in wrong.items():
            try:
                call()
            except LeaseError:
                continue
            except Exception as error:
                raise as_violation(error, name) from error
            said = f"{live.name} computed {live.computed} tokens, its key holds {request.key!r}"
            self.judge.fail("T11", None, f"{name} with the key of a running request: {said}")
        check_unchanged(self.judge, "T11", standing, request, live.name)

    def _tell_lease(self, live: Live) -> None:
        request = live.request
        limited = "" if request.limited is None else f"; {request.limited.value}"
        self.bench.trace.outcome(
            f"resumes at {request.anchor_tokens}, {request.device_tokens} of it on DEVICE{limited}"
        )

    def begin_again(self, live: Live) -> None:
        """The same match, with the same hook arguments, ends at the same anchor (M2)."""
        if live.cleared:
            return
        again = self.begin(live.namespace, live.tuple, live.reserve, live.chunk)
        crowded = Limited.CROWDED in (live.request.limited, again.request.limited)
        anchor, first = again.request.anchor_tokens, live.request.anchor_tokens
        if again.views and again.views == live.views and not crowded:
            self.judge.expect(
                anchor == first,
                "M2",
                None,
                lambda: f"{live.name} resumed at {first}, {again.name} with its tokens at {anchor}",
            )
        self.abort(again)

    def admit(self, live: Live) -> Decision:
        """Ask for admission; check the answer, and that a refusal leaves no trace."""
        bench, request, before = self.bench, live.request, self.bench.seen
        bench.trace.call(f"admit {live.name}")
        asked = self.sharing.before(live)
        crowded = live.cleared or live.waits or request.limited is Limited.CROWDED
        live.found_again()
        anchored, held = request.anchor_tokens, request.receipt
        skipped = bench.publishing.skipped
        standing, pinned = plain(request), pins(self.cache)
        limit = self.leases.limit(live.prompt)
        resumed = self._resumed(live.sequence, before, limit)

        def renewed(decision: Decision) -> None:
            """A request that was crowded or deferred was matched again, or as a miss (A8)."""
            if crowded:
                resumed(decision)
            if crowded or request.anchor_tokens != anchored:
                live.leased(self.model.page_size)
            self.sharing.decided(live, decision)

        decision = bench.act(
            "admit",
            lambda: self.cache.admit(request),
            pressure=self._touched(live.sequence, limit) if crowded else None,
            uses=renewed,
            by=[live.using],
        )
        bench.trace.outcome(str(decision))
        bench.counts[decision.outcome.value] += 1
        moved = crowded or request.anchor_tokens != anchored
        if crowded and decision.outcome is not Outcome.NEVER_FITS and request.anchor_tokens:
            self.leases.check(live, before, limit, bench.calls)
        self.judge.expect(
            not asked.deferred or request.receipt is not held,
            "M1",
            None,
            lambda: f"{live.name} was deferred, and is not matched again",
        )
        live.deferred = decision.outcome is Outcome.DEFERRED
        self.sharing.check(live, decision, asked)
        if not decision.admitted:
            self.admissions.left_alone(live, standing, pinned if request.receipt is held else None)
        if decision.admitted:
            self.admissions.admitted(live, skipped)
        elif decision.outcome is Outcome.NEVER_FITS:
            alone = self.admissions.alone(live)
            self.judge.expect(
                alone is Outcome.NEVER_FITS,
                "A8",
                None,
                lambda: f"{live.name}: {decision}; an empty cache says {alone.value}",
            )
        elif decision.pending is None:
            self.judge.expect(
                decision.shortages, "A8", None, lambda: f"{live.name}: deferred for no shortage"
            )
            self.judge.expect(
                moved or bench.seen.books == before.books,
                "A9",
                None,
                lambda: f"deferring {live.name} moved {before.books} to {bench.seen.books}",
            )
        return decision

    def load_back(self, live: Live) -> None:
        """Start the load-back of an admitted request; it must find room (A7)."""
        bench, before = self.bench, self.bench.seen
        bench.trace.call(f"load back for {live.name}")
        missing = self.leases.predictor.missing_pages(
            before, live.sequence, live.anchor, live.locked
        )
        if live.request.load_failed:
            # A transfer it relied on, started for another request, delivered nothing.
            missing = {name: set() for name in missing}
        wanted = self.leases.predictor.slots(missing)
        counters = self.cache.journal.counters[Direction.LOAD_BACK]
        started = counters.started
        bench.act(
            "load back",
            lambda: self.cache.load_back(live.request),
            pressure=Pressure(device=wanted, asks=live.namespace),
            by=[live.using],
        )
        live.loaded = True
        self._check_too_early(live)
        started = counters.started - started
        bench.trace.outcome(
            f"slots {wanted} on their way" if started else "nothing to load, or on its way already"
        )
        self.judge.expect(
            started == any(wanted.values()),
            "R6" if started else "R1",
            None,
            lambda: f"{started} transfers started where {wanted} slots are missing",
        )
        for name, pages in missing.items():
            coming = bench.seen.held[name].arriving - before.held[name].arriving
            if coming != pages:
                self.judge.fail("R1", name, f"loads {coming}, its reach lacks {pages}")

    def _check_too_early(self, live: Live) -> None:
        """No step runs before everything it reads has arrived (R7)."""
        if not live.waiting:
            return
        try:
            self.cache.allocate(live.request, 1)
        except LeaseError:
            return
        except Exception as error:
            raise as_violation(error, "allocate") from error
        said = f"{live.name} may run, but its load-back has not arrived"
        self.judge.fail("R7", None, said)

    def restart(self, live: Live) -> None:
        """Match again from scratch."""
        bench, size, request = self.bench, self.model.page_size, live.request
        bench.trace.call(f"restart {live.name}")
        live.found_again()
        live.prompt = max(live.prompt, len(live.tuple))
        live.reserve = max(live.reserve, request.total - live.prompt, 0)
        before = bench.seen
        limit = self.leases.limit(live.prompt)
        if request.load_failed:
            # Pages that HOST did not deliver are not asked for again (R5).
            limit = min(limit, request.device_tokens // size)
        # Its own pins and pages go first.
        live.anchor = live.computed = 0
        live.own = Progress(private=defaultdict(set))
        live.started = False
        bench.act(
            "restart",
            lambda: self.cache.restart(request),
            pressure=self._touched(live.sequence, limit),
            uses=self._resumed(live.sequence, before, limit),
            by=[live.using],
        )
        live.reserve = max(request.total - live.prompt, 0)
        live.chunk = request.chunk
        live.leased(size)
        self._tell_lease(live)
        if request.limited is not Limited.CROWDED:
            self.leases.check(live, before, limit, bench.calls)
        self.leases.check_boundaries(live, before, limit, bench.calls)

    def prefill(self, live: Live, limit: int | None, *, fenced: bool = True) -> bool:
        """One prefill step; returns whether it computed. The admitted chunk always fits (A7).

        If a checkpoint follows at once, that may name the fence: then it is not `fenced`.
        """
        most = "" if limit is None else f", at most {limit} tokens"
        self.bench.trace.call(f"prefill {live.name}{most}")
        left = live.prompt - live.computed
        standing = plain(live.request)
        try:
            n_tokens = self.cache.next_chunk(live.request, limit)
        except Exception as error:
            raise as_violation(error, "next chunk") from error
        check_unchanged(self.judge, "A5", standing, live.request, live.name)
        asked = min(left, live.request.chunk if limit is None else limit)
        self.judge.expect(
            n_tokens <= max(asked, 0), "A6", None, lambda: f"a chunk of {n_tokens}, asked {asked}"
        )
        self.admissions.end_of_chunk(live, n_tokens)
        if limit is None or limit <= live.request.chunk:
            self.judge.expect(
                n_tokens > 0,
                "A7",
                None,
                lambda: (
                    f"no room for an admitted chunk of {asked} tokens of {live.name}; "
                    f"it was admitted with {demanded(live.request)}"
                ),
            )
        if n_tokens > 0:
            continuing = limit is not None and limit > live.request.chunk
            promised_by = "A5" if continuing else "A7"
            self.steps.advance(live, n_tokens, promised_by=promised_by, fenced=fenced)
        self.bench.trace.outcome(f"{live.computed} of {live.prompt} computed")
        return n_tokens > 0

    def prefill_all(self, live: Live) -> None:
        """Prefill to the end of the prompt."""
        while live.computed < live.prompt and self.prefill(live, None):
            pass

    def decode(self, live: Live, token: int, *, fenced: bool = True) -> bool:
        """One decode step; within the reservation it always succeeds (A7).

        After the last one `finish` may name the fence: then it is not `fenced`.
        """
        self.bench.trace.call(f"decode {token} of {live.name}")
        within = live.computed < live.prompt + live.reserve
        self._extend(live, token)
        promised_by = "A7" if within else None
        ran = self.steps.advance(live, 1, promised_by=promised_by, fenced=fenced)
        self.bench.trace.outcome(f"{live.computed} computed" if ran else "refused")
        return ran

    def _extend(self, live: Live, token: int) -> None:
        if live.computed == len(live.tuple):
            live.tuple = (*live.tuple, token)
            live.request.key.extend([token])
            if live.steps:
                self.misuse(live)

    def step_together(
        self, tokens: Sequence[int], width: int = 1, accepted: int = 1, beyond: int = 0
    ) -> bool:
        """Step all decoding requests that can step together and have slots; whether any did.

        A step has `width` tokens of each request, as far as that is no more than a page, of which
        `accepted` are kept. Without drafts so many steps may go `beyond` their reservations, and
        are refused where there is no room.
        """
        width = min(width, self.model.page_size)
        form = Form(width, min(accepted, width))
        lives: list[Live] = []
        n_steps = len(tokens)
        promised = self.steps.has_promised(form)
        form = form._replace(handed=promised and tokens[0] == 2)
        ahead = self.bench.sizes.max_drafts if promised else 0
        beyond = 0 if form.has_drafts else beyond
        for live in self.live:
            runs = live.admitted and live.loaded and not live.waiting and not live.standing
            if not runs or not live.prompt <= live.computed == len(live.tuple):
                continue
            if promised and not live.request.draft_pages:
                continue  # they could never fit
            n_left = live.prompt + live.reserve - live.computed
            n_own = beyond + (form.n_steps(n_left + ahead) if n_left > 0 else 0)
            if n_own and all(self._apart(live, other) for other in lives):
                lives.append(live)
                n_steps = min(n_steps, n_own)
        if any(each.namespace != lives[0].namespace for each in lives) and not self.steps.has_room(
            lives, width * n_steps
        ):
            lives = [each for each in lives if each.namespace == lives[0].namespace]
        if form.has_drafts:
            lives = lives[:1]  # where more leave pages behind, evictions are not foreseen
        if len(lives) < (1 if form.has_drafts else 2):
            return False
        tokens = tokens[:n_steps]
        names = ", ".join(live.name for live in lives)
        self.bench.trace.call(f"{n_steps} steps of {names}: {shown(tuple(tokens))}, {form}")
        self.steps.together(lives, tokens, form)
        return True

    def _apart(self, live: Live, other: Live) -> bool:
        """Whether two requests have no pages of their own of the same tokens."""
        based = min(live.own.based, other.own.based) * self.model.page_size
        both = live.namespace == other.namespace
        same = (
            live.tuple[: based + self.model.page_size]
            == other.tuple[: based + self.model.page_size]
        )
        return not live.cleared and not other.cleared and not (same and both)

    def checkpoint(self, live: Live, *, keep_slots: bool = False) -> None:
        """Share the data computed so far; with states, slots may always be swapped."""
        keep_slots = keep_slots and not self.bench.states
        kept = ", its slots kept" if keep_slots else ""
        self.bench.trace.call(f"checkpoint {live.name}{kept}")
        self.donations.checkpoint(live, keep_slots=keep_slots)

    def finish(self, live: Live) -> None:
        """End a request, leaving its data; every other one has slots for a pass that never runs."""
        if self.bench.steps % 2:
            self._begin_pass(live)
        self.bench.trace.call(f"finish {live.name}")
        self.donations.finish(live)
        live.found_again()
        self.ended.append(live.sequence)
        self._keys.note(live)

    def _begin_pass(self, live: Live) -> None:
        """Slots for the next pass of a request that may run, within what it was promised."""
        if not live.started or live.waiting or live.cleared:
            return
        n_tokens = int(live.computed < live.prompt + live.reserve)
        if live.computed < live.prompt:
            n_tokens = self.cache.next_chunk(live.request)
        if n_tokens:
            self.bench.trace.call(f"slots for {n_tokens} tokens of {live.name}")
            self.steps.open(live, n_tokens, "A7")

    def abort(self, live: Live) -> None:
        """Drop a request."""
        self.bench.trace.call(f"abort {live.name}")
        self.live.remove(live)
        self.bench.act("abort", lambda: self.cache.abort(live.request))

    def admit_by_engine(self, live: Live) -> None:
        """The engine admits a request itself after its namespace was cleared, and gives it up.

        It is matched again, in a tree without any data (M1).
        """
        self.bench.trace.call(f"engine_slots.admit {live.name}")
        live.found_again()
        before = self.bench.seen
        resumed = self._resumed(live.sequence, before, self.leases.limit(live.prompt))

        def renewed(result: None) -> None:
            resumed(result)
            live.leased(self.model.page_size)

        self.bench.act(
            "engine_slots.admit",
            lambda: self.cache.engine_slots.admit(live.request),
            uses=renewed,
            by=[live.using],
        )
        anchor = live.request.anchor_tokens
        self.judge.expect(
            not anchor,
            "M1",
            None,
            lambda: f"{live.name} is admitted at {anchor}, in a namespace that was cleared",
        )
        self.abort(live)

    def clear(self, namespace: object) -> None:
        """No match finds data of some namespaces any more; held data stays until it is released."""
        bench, roots = self.bench, self.cache.tree.roots
        everything = namespace is Namespaces.ALL
        gone = {
            each: Gone(each, root.ident)
            for each, root in roots.items()
            if everything or each == namespace
        }
        bench.trace.call("clear" if everything else f"clear namespace {namespace!r}")
        n_pins = self.pins.cleared(gone)
        bench.clear(gone)
        fetched = self.prefetches.cleared(gone)
        before = bench.seen
        told = bench.act("clear", lambda: self.cache.clear(namespace))
        bench.trace.outcome(f"{told.device} freed on DEVICE, {told.held_device} held")
        self.prefetches.check_ended(fetched)
        requests = sum(live.namespace in gone.values() for live in self.live)
        # A root that nothing but a prefetch held went with that.
        unsure = {gone[each.sequence[0]] for each in fetched}
        unsure -= {page[0] for page in before.known()} | {live.namespace for live in self.live}
        self.judge.expect(
            (told.requests, told.pins) == (requests, n_pins)
            and len(gone) - len(unsure) <= told.namespaces <= len(gone),
            "M1",
            None,
            lambda: f"{told} of {len(gone)} namespaces, {requests} requests and {n_pins} pins",
        )
        for (name, tier), books in bench.seen.books.items():
            freed = (told.device if tier == "device" else told.host)[name]
            more = books.free - before.books[name, tier].free
            if freed != more and not (fetched and freed < more):  # the fetches' own go as well
                self.judge.fail("E6", name, f"clear says {freed} freed on {tier}, {more} are")

    def unseen(self, n_tokens: int) -> tuple[int, ...]:
        """Tokens that no request had so far."""
        return (10 + self._begun,) * n_tokens

    # -- everybody at once

    def wait_in_line(self, tokens: tuple[int, ...], large: int, small: int) -> None:
        """A request with a large reservation and several without one wait in the core's line.

        Admitted ones end at once, so that more of them fit than may pass the large one (A13).
        """
        line = WaitingLine(self.cache, self.judge, self.bench.read_clock)
        self.bench.trace.call(
            f"wait in line: {shown(tokens)} with reserve {large}, and {small} times with reserve 0"
        )
        line.join(tokens, large)
        for _ in range(small):
            line.join(tokens, 0)

        def all_rounds() -> None:
            for _ in range(small + 1):
                line.go_round()

        self.bench.act("wait in line", all_rounds)

    def quiesce(self, waiting: Live | None, *, finish: bool, polls: bool = False) -> None:
        """All other requests end; the waiting one is admitted now (A8).

        Args:
            waiting: a request that was not admitted before.
            finish: whether others that run finish; else they are aborted.
            polls: whether copies in flight end by themselves and the engine polls once; otherwise
                it drains.
        """
        self.pins.unpin_all()
        self.prefetches.end_all()
        for live in list(self.live):
            if live is waiting:
                continue
            if finish and live.admitted:
                self.finish(live)
            else:
                self.abort(live)
        copies_end = self.rooms.step_all if polls else self.rooms.drain

        def settle() -> None:
            copies_end()
            self.prefetches.settle()

        if polls and waiting is not None and self.admit(waiting).admitted:
            return
        settle()
        if waiting is not None:
            decision = self.admit(waiting)
            # Others before it may have asked for another boundary, too: theirs is served first.
            for _ in range(1 if self.cache.arenas is None else MOST_WISHES):
                if not decision.admitted:
                    # Matching again may have started a backup, whose pins end with it.
                    settle()
                    self.rooms.settle_memory()
                    decision = self.admit(waiting)
            self.judge.expect(
                decision.admitted,
                "A8",
                None,
                lambda: f"{waiting.name} is alone in the cache, and still {decision}",
            )

    def close(self) -> None:
        """End everything; nothing may be left."""
        self.quiesce(None, finish=True)
        self.rooms.empty()
        self.cache.close()
