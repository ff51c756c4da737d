"""Decides which requests run, wait or are retracted.

    fetching ─ prefetch ready ─► waiting ─ begin, admit ─► loading ─ arrived ─► running ─► finished
       ▲                          │  ▲                                            │
       └─ storage is asked again ─┘  └─────────────── retract: no page left ──────┘

If a running request computes the prefix of another, the other is deferred: it follows, outside of
the queue, until the prefix is shared or it waited `max_deferrals` steps.

With a storage tier a request is fetching until the prefetch policy releases it, also outside of the
queue, so that it blocks nobody. A request that does not fit now releases its lease and waits;
`WaitingQueue` bounds how often others of its priority overtake it. If a running request needs a
page and none is left, the youngest one of the highest `priority` number is retracted: its data
stays cached, so it hits when it comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvgraft import KvgraftError, Outcome, Prefetch, Request, Step, TransferError
from kvgraft_transformers.engine.generation import Generation, Work
from kvgraft_transformers.engine.latencies import Latencies
from kvgraft_transformers.engine.line import PriorityLine
from kvgraft_transformers.engine.settings import EngineSettings, EngineTotals
from kvgraft_transformers.memory import ModelMemory
from kvgraft_transformers.session import Session

__all__ = ["Schedule"]

GiveUp = Callable[[Generation, KvgraftError], None]
"""Ends one request because of an error of its own."""

Propose = Callable[[Generation], Sequence[int]]
"""Drafts for a request's next pass."""

RETRY_STEPS = 8
"""Steps after which requests that did not fit are tried again, even if no request ended."""


class Schedule:
    """The order of requests over one memory.

    Args:
        memory: the memory they share.
        settings: limits of running requests and promises.
        totals: counts of events.
        latencies: histograms of waiting times.
        clock: monotonic, in seconds.

    Attributes:
        fetching: requests whose prefetch runs, in order of arrival.
        waiting: requests without memory, in the order of attempts.
        following: requests that wait for pages that a running one computes; they hold their leases.
        loading: admitted requests whose load-back runs.
        running: requests the model works on, oldest first.
    """

    def __init__(
        self,
        memory: ModelMemory,
        settings: EngineSettings,
        totals: EngineTotals,
        latencies: Latencies,
        clock: Callable[[], float],
    ) -> None:
        self.memory = memory
        self.settings = settings
        self.totals = totals
        self.fetching: list[Generation] = []
        self.waiting = PriorityLine()
        self.following: list[Generation] = []
        self.loading: list[Generation] = []
        self.running: list[Generation] = []
        self._latencies = latencies
        self._clock = clock
        self._pause = 0

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        lines = (self.fetching, self.waiting, self.following, self.loading, self.running)
        return not any(lines)

    # -- in

    def append(self, generation: Generation) -> None:
        """Add a request; it enters the queue once its prefetch lets it.

        Raises:
            ConfigError: a namespace that has no name in storage.
        """
        if self._fetch(generation):
            self.waiting.append(generation)
            self._pause = 0

    def _fetch(self, generation: Generation) -> bool:
        """Begin a request's prefetch; whether the request need not wait for it."""
        if generation.score is not None and not generation.score.ended:
            return True  # its prompt is computed
        generation.prefetch = self.memory.prefetch(generation.key)
        if generation.prefetch is None or generation.prefetch.ready:
            return True
        self.fetching.append(generation)
        return False

    def fetched(self) -> None:
        """Move requests whose prefetch releases them into the queue."""
        for generation in list(self.fetching):
            assert generation.prefetch is not None
            if not generation.prefetch.ready:
                continue
            self.fetching.remove(generation)
            self.waiting.append(generation)
            self._pause = 0

    def admit(self, reject: Callable[[Generation], None], give_up: GiveUp) -> None:
        """Admit waiting requests while they fit, first those that followed another.

        After a round in which none fit, the next round is when memory was released, and at the
        latest `RETRY_STEPS` steps later, since windows release pages silently.

        Args:
            reject: called with requests that never fit.
            give_up: called with requests that wait for copies that do not end while nothing runs,
                and with those for which the cache raises.
        """
        self._follow(reject, give_up)
        if self._pause:
            self._pause -= 1
            return
        before = len(self.waiting)
        while self.waiting and self._round(reject, give_up):
            pass
        if before and len(self.waiting) == before:
            self._pause = RETRY_STEPS

    @property
    def _full(self) -> bool:
        most = self.memory.cache.config.max_requests or self.settings.max_running
        return len(self.loading) + len(self.running) >= min(most, self.settings.max_running)

    def _follow(self, reject: Callable[[Generation], None], give_up: GiveUp) -> None:
        """Admit requests that followed another, once their prefix is there."""
        back: list[Generation] = []
        for generation in list(self.following):
            if self._full:
                break
            session = generation.session
            assert session is not None
            try:
                decision = generation.decision = session.admit()
                if decision.admitted:
                    session.load_back()
            except KvgraftError as error:
                give_up(generation, error)
                continue
            if decision.pending is not None:
                continue
            self.following.remove(generation)
            if decision.admitted:
                self._start(generation)
                continue
            self._give_back(generation)
            if decision.outcome is Outcome.NEVER_FITS:
                reject(generation)
            else:
                self.totals.deferrals += 1
                back.append(generation)
        for generation in back:
            self.waiting.append(generation)

    def _round(self, reject: Callable[[Generation], None], give_up: GiveUp) -> bool:
        """Try the first requests of the queue; whether all left it, so that others may follow."""
        all_left = True
        for generation in self.waiting.round():
            if self._full:
                return False
            try:
                if generation.prefetch is None and not self._fetch(generation):
                    self.waiting.take(generation)
                    continue
                outcome = self._try(generation)
                if outcome is Outcome.DEFERRED and generation.session is None:
                    self._expect_room(generation)
                    self.totals.deferrals += 1
                    all_left = False
                    continue
            except KvgraftError as error:
                give_up(generation, error)
                continue
            self.waiting.take(generation)
            if outcome is Outcome.NEVER_FITS:
                self._forget(generation)
                reject(generation)
            elif outcome is Outcome.DEFERRED:
                self.totals.followers += 1
                self.following.append(generation)
        return all_left

    def _try(self, generation: Generation) -> Outcome:
        """Begin a session and admit it; a request that is not admitted holds nothing.

        Only a request that is deferred for another's pages keeps its session.
        """
        reserve = min(generation.remaining, self.settings.reserve_tokens)
        prefetch = generation.prefetch
        if (
            generation.decision is None
            and reserve < generation.remaining
            # its whole demand must fit an empty cache, or it would be retracted forever
            and self._probe(generation, generation.remaining) is Outcome.NEVER_FITS
        ):
            return Outcome.NEVER_FITS
        if prefetch is not None:
            # beginning gives up pages that have not arrived, and lets arrived ones be evicted: not
            # for a request that waits on
            outcome = self._probe(generation, reserve)
            if outcome is not Outcome.ADMITTED:
                return outcome
        if generation.deferrals_left is None:
            generation.deferrals_left = self.settings.max_deferrals
        session = self._begin(generation, reserve, prefetch, generation.deferrals_left)
        try:
            decision = generation.decision = session.admit()
            if decision.admitted:
                session.load_back()
        except KvgraftError:
            session.abort()
            raise
        if not decision.admitted and decision.pending is None:
            session.abort()
            return decision.outcome
        generation.session, generation.prefetch = session, None
        if decision.admitted:
            self._start(generation)
        return decision.outcome

    def _expect_room(self, generation: Generation) -> None:
        """Refuse to wait for room that only copies that do not end hold.

        Raises:
            TransferError: they are.
        """
        decision = generation.decision
        waits_for = decision.waits_for if decision is not None else None
        if waits_for is not None and waits_for.overdue and not self.loading and not self.running:
            raise TransferError(f"{decision}; check the transfer engine")

    def _start(self, generation: Generation) -> None:
        """Start an admitted request: load back its host data, then run it."""
        now = generation.loading_since = self._clock()
        if not generation.was_admitted:
            generation.was_admitted = True
            self._latencies.queue.observe(now - generation.submitted_at)
        self.totals.admissions += 1
        generation.go_on_to_score()
        self.loading.append(generation)

    def _give_back(self, generation: Generation) -> None:
        """End a session that was not admitted, and keep its remaining deferrals."""
        session, generation.session = generation.session, None
        assert session is not None
        generation.deferrals_left = session.request.deferrals_left
        session.abort()

    def _probe(self, generation: Generation, reserve: int) -> Outcome:
        """The decision that admission would make; holds nothing and ends no prefetch."""
        session = self._begin(generation, reserve)
        decision = generation.decision = session.admit()
        session.abort()
        return decision.outcome

    def _begin(
        self,
        generation: Generation,
        reserve: int,
        prefetch: Prefetch | None = None,
        max_deferrals: int = 0,
    ) -> Session:
        chunk, n_left = self.settings.chunk_tokens, generation.begin_to_score()
        return Session(
            self.memory,
            generation.key,
            reserve=reserve + n_left,
            chunk=chunk,
            prefetch=prefetch,
            resume_at=() if n_left else generation.request.resume_at,
            max_deferrals=max_deferrals,
            hints=generation.request.hints,
        )

    def _note_hit(self, generation: Generation, session: Session) -> None:
        """Note the tokens that the request did not have to compute when it began to run."""
        if generation.cached_tokens is not None:
            return
        generation.cached_tokens = session.cached_tokens
        generation.host_tokens = session.cached_tokens - session.request.device_tokens
        generation.storage_tokens = session.storage_tokens
        self.totals.prompt_tokens += generation.prompt_tokens
        self.totals.cached_tokens += session.cached_tokens
        self.totals.host_tokens += generation.host_tokens
        self.totals.storage_tokens += generation.storage_tokens

    def arrived(self, give_up: GiveUp) -> None:
        """Move requests whose prefix has arrived to the running ones.

        If it failed to arrive, resume from the data on the device (R5).

        Args:
            give_up: called with requests whose copies exceed the cache's time-out, and with those
                for which the cache raises.
        """
        limit_s = self.memory.cache.config.transfer_timeout_s
        deadline = self._clock() - limit_s
        for generation in list(self.loading):
            session = generation.session
            assert session is not None
            if not session.ready:
                if generation.loading_since < deadline:
                    give_up(generation, TransferError(f"a load-back did not end in {limit_s:g} s"))
                continue
            if session.load_failed:
                try:
                    again = self._load_again(generation, session)
                except KvgraftError as error:
                    give_up(generation, error)
                    continue
                if again:
                    continue
            self.loading.remove(generation)
            if generation.decision is not None and generation.decision.admitted:
                self._note_hit(generation, session)
                if session.request.waits:
                    self._latencies.load_back.observe(self._clock() - generation.loading_since)
                self.running.append(generation)
            else:
                self._give_back(generation)
                self.waiting.append(generation)

    def _load_again(self, generation: Generation, session: Session) -> bool:
        """Restart a request whose prefix failed to arrive; whether it is admitted again."""
        generation.begin_to_score()  # with no more tokens than it may resume behind
        session.restart()
        decision = generation.decision = session.admit()
        if decision.admitted:
            session.load_back()
            generation.go_on_to_score()
        return decision.admitted

    def _forget(self, generation: Generation) -> None:
        """Cancel a request's prefetch, which is no longer needed."""
        prefetch, generation.prefetch = generation.prefetch, None
        if prefetch is not None:
            self.memory.cancel(prefetch)

    # -- room

    def decoding(self, give_up: GiveUp, propose: Propose) -> list[Work]:
        """Running requests with a token to compute or several, each with the slots for them.

        Where slots are short, requests do without drafts; then the last ones by priority make room,
        one after the other.

        Args:
            give_up: called with requests for which the cache raises.
            propose: called with each request.
        """
        self.memory.taken = None
        batch = self._prefilled()
        planned = self._with_drafts(batch, propose)
        short = batch = [each for each in batch if each not in planned]
        while short:
            requests = [each.session.request for each in short if each.session is not None]
            step: Step | None = None
            try:
                step = self.memory.cache.step(requests, n_tokens=1, n_computed=0)
                refused = step.refused
            except KvgraftError:
                refused = self._step_alone(short, give_up)
            if not refused:
                self.memory.taken = None if step is None else (step, 1)
                break
            last = self._by_priority(self.running)[-1]
            try:
                self.retract(last)
            except KvgraftError as error:
                give_up(last, error)
            without = {id(request) for request in refused}
            short = [
                each
                for each in short
                if each.session is not None and id(each.session.request) in without
            ]
        nobody_left = not planned and self.memory.taken is not None and short is batch
        decoded = batch if nobody_left else self._prefilled()
        return [planned.get(each) or Work(each, 1) for each in decoded]

    def _with_drafts(self, batch: list[Generation], propose: Propose) -> dict[Generation, Work]:
        """Requests with slots for more than one token; none if no request has more.

        A pass has equally many tokens of each of its requests. Where there are states, requests
        with fewer drafts go in a pass of their own: a rejected draft costs them the state.
        """
        cache, found = self.memory.cache, {each: list(propose(each)) for each in batch}
        n_tokens = max([each.n_known + len(drafts) for each, drafts in found.items()], default=1)
        if n_tokens == 1:
            return {}
        requests = {each.session.request: each for each in batch if each.session is not None}
        try:
            step = cache.step(list(requests), n_drafts=n_tokens - 1, n_computed=0)
        except KvgraftError:
            return {}  # without drafts it is raised again, for the request that it is about
        assert step.n_tokens is not None
        planned: dict[Generation, Work] = {}
        for request, width in zip(step.requests, step.n_tokens.tolist()):
            generation = requests[request]
            drafts, n_known = found[generation], generation.n_known
            n_found = max(0, min(width - n_known, len(drafts)))
            if not cache.tree.has_state:
                drafts += [generation.tokens[-1]] * (width - n_known - len(drafts))
            drafts = drafts[: max(0, width - n_known)]
            n_pass = min(width, n_known + len(drafts))
            planned[generation] = Work(generation, n_pass, tuple(drafts), n_found)
        if not step.refused:
            self.memory.taken = step, n_tokens
        return planned

    def _step_alone(self, short: list[Generation], give_up: GiveUp) -> list[Request]:
        """Allocate per request after a common step raised; returns those without room."""
        refused: list[Request] = []
        for generation in short:
            assert generation.session is not None
            try:
                step = self.memory.cache.step([generation.session.request], n_computed=0)
            except KvgraftError as error:
                give_up(generation, error)
            else:
                refused += step.refused
        return refused

    def _prefilled(self) -> list[Generation]:
        return self._by_priority(each for each in self.running if each.prefilled)

    def _by_priority(self, requests: Iterable[Generation]) -> list[Generation]:
        """Running requests: lower numbers of `priority` first, equal ones in order of arrival."""
        return sorted(requests, key=lambda each: (each.request.priority, each.arrived))

    def prefilling(self, budget_tokens: int, give_up: GiveUp) -> Iterator[Work]:
        """Running requests with a chunk of their prompt to compute, with its slots allocated.

        A request whose chunk the budget would shorten waits for the next step: chunks of different
        lengths need separate passes, and so would its rest.

        Args:
            budget_tokens: most tokens over all of them.
            give_up: called with requests for which the cache raises.
        """
        cache, first = self.memory.cache, True
        for generation in self._by_priority(each for each in self.running if not each.prefilled):
            if generation.session is None or budget_tokens <= 0:
                continue
            request = generation.session.request
            try:
                if generation.scores:
                    if n_tokens := self._chunk_to_score(generation, budget_tokens):
                        budget_tokens -= n_tokens
                        first = False
                        yield Work(generation, n_tokens)
                    continue
                n_tokens = cache.next_chunk(request, budget_tokens)
                if not first and n_tokens < cache.next_chunk(request, self.settings.step_tokens):
                    continue
                given = n_tokens and cache.allocate(request, n_tokens)
            except KvgraftError as error:
                give_up(generation, error)
                continue
            if given:
                budget_tokens -= n_tokens
                first = False
                yield Work(generation, n_tokens)

    def _chunk_to_score(self, generation: Generation, budget_tokens: int) -> int:
        """Slots for the next tokens of a prompt that is computed as if decoded; how many it got.

        Slots for one are promised; for a whole chunk there may be no room beside a window.
        """
        session, chunk = generation.session, self.settings.chunk_tokens
        assert session is not None
        left = generation.prompt_tokens - session.computed
        n_tokens = min(left, budget_tokens, chunk - session.computed % chunk)
        while n_tokens and not self.memory.cache.allocate(session.request, n_tokens):
            n_tokens //= 2
        return n_tokens

    def retract(self, generation: Generation) -> None:
        """Retract a running request and let it wait; its data stays cached.

        Raises:
            KvgraftError: the cache cannot take its data; it still runs.
        """
        assert generation.session is not None
        generation.session.retract()
        self._count_rows(generation.session)
        generation.session = None
        generation.retractions += 1
        self.totals.retractions += 1
        self.running.remove(generation)
        self.waiting.append(generation)
        self._pause = 0

    # -- out

    def leave(self, generation: Generation, *, finished: bool) -> None:
        """End a request: its data goes to the tree if it finished; otherwise its memory is freed.

        Raises:
            KvgraftError: the cache cannot take its data; it still runs.
        """
        gives = finished and generation not in self.following  # these have computed nothing
        if gives and generation.session is not None:
            generation.session.finish()
        session, generation.session = generation.session, None
        self._pause = 0
        self._forget(generation)
        if generation in self.fetching:
            self.fetching.remove(generation)
            return
        if session is None:
            self.waiting.take(generation)
            return
        for line in (self.running, self.loading, self.following):
            if generation in line:
                line.remove(generation)
        if not gives:
            session.abort()
        self._count_rows(session)

    def _count_rows(self, session: Session) -> None:
        self.totals.rows_moved += session.swapped.rows_moved
        self.totals.rows_dense += session.rows_dense
