"""Rules that are scenes: situations of several requests that random calls seldom reach."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import precondition, rule

from kvgraft.types import Namespaces, Tier
from kvgraft_testing.machine.engines import Wait
from kvgraft_testing.machine.examples import Impossible, picked, unless_over
from kvgraft_testing.machine.live import Live
from kvgraft_testing.machine.picking import (
    MOST_REQUESTS,
    NAMESPACES,
    SHARING,
    STEMS,
    Picking,
    chunks,
    has,
    has_place,
    has_scene,
    picks,
    tails,
)
from kvgraft_testing.machine.stores import Answer

__all__ = ["Scenes"]

TURNS = ("prefill", "prefill", "decode", "decode", "decode", "checkpoint", "checkpoint", "finish")
"""Calls about one of two twins."""

MOST_POLLS = 6
"""Polls after which a prefetch has asked the store something more."""

N_BEFORE = 2
"""Sequences of others, of a quarter of DEVICE each."""

FILLERS = (1, 1, 1, 99, 99)
"""Sequences that fill the pools, in pages, at most."""

MOST_RESERVED = 9
"""Tokens that the requests decode, or fewer of them, when memory moves under them."""

MOST_MOVES = 16
"""Extents that one pool gives in a row, at most."""

BETWEEN = ("checkpoint", "checkpoint", "finish", "abort", "squeeze", "step_all", "split", "split")
"""Calls between two steps of several requests."""


class Scenes(Picking):
    """Requests that share a load-back, meet a duplicate, end in flight, crowd, or wait in line."""

    @has("unfinished")
    @rule(index=picks, stem=st.sampled_from(STEMS), reserve=st.integers(4, 24))
    @unless_over
    def squeeze_in(self, index: int, stem: tuple[int, ...], reserve: int) -> None:
        """Promise all remaining slots to others; a request is admitted or goes on in an exact fit.

        This shows demands that are too small, chunks that are too large and promises not renewed.
        """
        harness, live = self.harness, self._pick("unfinished", index)
        others = self._promise_the_rest(stem, reserve)
        while not live.admitted and others and live in harness.live:
            self._admit(live)
            if not live.admitted:
                harness.abort(others.pop())
        if live.admitted and not live.loaded:
            harness.load_back(live)
            harness.rooms.step_all()
        if live.admitted and not live.waiting:
            if live.computed < live.prompt:
                harness.prefill(live, live.prompt if reserve % 2 else None)
            others += self._promise_the_rest(stem, 1)
            harness.prefill_all(live)
            while live.computed < live.prompt + live.reserve and harness.decode(live, 1):
                pass
        for other in others:
            harness.abort(other)

    @has_scene()
    @rule(
        stem=st.sampled_from(STEMS),
        less=st.integers(1, 4),
        reserve=st.integers(0, 8),
        faster=st.booleans(),
    )
    @unless_over
    def go_on_in_a_crowd(
        self,
        stem: tuple[int, ...],
        less: int,
        reserve: int,
        faster: bool,  # noqa: FBT001 - drawn by name
    ) -> None:
        """A long prompt goes on while others are promised the rest, in small or larger chunks.

        It was admitted with chunks of a page, which leave much of a window's pool to others. A
        larger chunk is deferred (A5), and each small one takes the slots that the last one freed
        (A7).
        """
        self.scenes += 1
        harness, size = self.harness, self.harness.model.page_size
        self._make_place(3)
        n_tokens = max(1, harness.bench.sizes.device // 2 + 2 - less) * size
        tokens = (harness.unseen(1) + stem * n_tokens)[:n_tokens]
        live = self._begin(None, tokens, 0, size)
        self._along(live, 2)
        if not live.admitted or live.waiting:
            return
        others = self._promise_the_rest(stem, reserve)
        while faster and live.computed < live.prompt and harness.prefill(live, live.prompt):
            pass
        for _ in range(reserve):
            if live.computed < live.prompt:
                harness.prefill(live, None)
        others += self._promise_the_rest(stem, 1)
        harness.prefill_all(live)
        for other in others:
            harness.abort(other)

    def _fill(self) -> None:
        """Others compute and end until no slot of the base is free; their data may leave.

        The first of it, which leaves first, are single pages: each makes room for one request.
        """
        harness, size = self.harness, self.harness.model.page_size
        base = harness.model.components[0]
        for most in FILLERS:
            free = harness.bench.seen.books[base.name, "device"].free // base.slots_per_page
            room = harness.bench.seen.headroom(base.name, "device", None) // base.slots_per_page
            self._compute(None, harness.unseen(max(0, min(most, free, room - 1)) * size))

    def _promise_the_rest(self, stem: tuple[int, ...], reserve: int) -> list[Live]:
        """Others are admitted as long as there is room and place for one, ever smaller ones."""
        others: list[Live] = []
        while reserve >= 0 and len(self.harness.live) < MOST_REQUESTS:
            other = self._begin("the rest", stem[:1], reserve, None)
            if self.harness.admit(other).admitted:
                others.append(other)
            else:
                self.harness.abort(other)
                reserve = reserve // 2 if reserve else -1
        return others

    @has_scene(of_ended=True)
    @rule(
        index=picks,
        share=st.integers(1, 6),
        longest=st.sampled_from((0, 0, 0, 1, 2)),
        first=st.sampled_from((0, 0, 1)),
        fails=st.booleans(),
    )
    @unless_over
    def load_together(
        self,
        index: int,
        share: int,
        longest: int,
        first: int,
        fails: bool,  # noqa: FBT001 - drawn by name
    ) -> None:
        """Requests need data from HOST: one a part, two all of it.

        Where the part comes first, the second waits for that and loads the rest, and a third waits
        for both. The copies end one after the other, in any order; the first may fail.
        """
        self.scenes += 1
        size = self.harness.model.page_size
        namespace, tokens = picked(self.harness.ended, index)
        self._make_place(3)
        rooms, pending = self.harness.rooms, self.harness.bench.engine.pending
        n_pages = self.harness.bench.sizes.device // 3
        tokens = (tokens + self.harness.unseen(n_pages * size))[: n_pages * size]
        part = tokens[: max(1, n_pages * share // 7) * size]
        for each in (part, tokens):
            self._compute(namespace, each)
        self._leave_on_host(namespace, part, tokens)
        waiting: list[Live] = []
        wanted = [tokens, tokens]
        wanted.insert(longest, part)
        for each in wanted:
            live = self._begin(namespace, (*each, 1), 0, None)
            self._along(live, 2)
            if live.deferred and waiting and waiting[-1] in self.harness.live:
                self.harness.abort(waiting.pop())  # its load-back goes on without it
                self._along(live, 2)
            waiting.append(live)
        while pending:
            rooms.step(first % len(pending), fails=fails)
            rooms.poll()
            fails = False
            for live in waiting:
                if live in self._requests("prefilling"):
                    self.harness.prefill(live, None)
        for live in waiting:
            if live in self.harness.live and live.request.load_failed:
                self.harness.restart(live)

    @has_scene()
    @rule(stem=st.sampled_from(STEMS), length=st.integers(0, 8), own=st.integers(1, 3))
    @unless_over
    def arrive_twice(self, stem: tuple[int, ...], length: int, own: int) -> None:
        """Another request computes and inserts a load-back's pages meanwhile (I4)."""
        self.scenes += 1
        harness = self.harness
        self._make_place(3)
        tokens = self._grown(stem[:length]) + harness.unseen(own * harness.model.page_size)
        twin, first = (self._begin(None, tokens, 0, None) for _ in range(2))
        for live in (twin, first):
            self._along(live, 2)
            if live.admitted and live.waiting:
                harness.rooms.step_all()
            if live.admitted and not live.waiting:
                harness.prefill_all(live)
        if first not in harness.live or first.computed < first.prompt:
            return
        harness.finish(first)
        self._leave_on_host(None, tokens)
        self._along(self._begin(None, (*tokens, 1), 0, None), 2)
        if twin in harness.live and twin.computed == twin.prompt:
            harness.finish(twin)
        harness.rooms.step_all()

    @has_scene()
    @rule(
        stem=st.sampled_from(STEMS),
        length=st.integers(0, 8),
        own=st.integers(0, 5),
        chunk=chunks,
        apart=st.sampled_from((False, True, False)),
        calls=st.lists(
            st.tuples(st.booleans(), st.sampled_from(TURNS)), min_size=5, max_size=14
        ).map(tuple),
    )
    @unless_over
    def twins(
        self,
        stem: tuple[int, ...],
        length: int,
        own: int,
        chunk: int | None,
        calls: tuple[tuple[bool, str], ...],
        apart: bool = True,  # noqa: FBT001, FBT002 - drawn by name
    ) -> None:
        """Two requests over one prompt begin together, and go on in turns.

        One shares, gives up or ends data that the other has, too, and both decode the same. Where
        both compute the prompt in chunks, each leaves pages behind at its own time.
        """
        self.scenes += 1
        harness = self.harness
        self._make_place(2)
        tokens = self._grown(stem[:length]) + harness.unseen(own * harness.model.page_size)
        both = [self._begin(None, tokens, 6, each) for each in (None if apart else chunk, chunk)]
        for live in both:
            self._along(live, 2)
        harness.rooms.step_all()
        for which, call in calls:
            live = both[which]
            if live not in harness.live or not live.admitted or live.waiting:
                continue
            if call not in ("prefill", "decode"):
                getattr(harness, call)(live)
            elif live.computed < live.prompt:
                harness.prefill(live, None)
            elif live.computed < live.prompt + live.reserve:
                harness.decode(live, 1)

    @has_scene()
    @rule(
        stem=st.sampled_from(STEMS),
        length=st.integers(0, 6),
        n_requests=st.integers(2, 3),
        rounds=st.lists(
            st.tuples(st.integers(1, 5), st.sampled_from(BETWEEN)), min_size=1, max_size=4
        ).map(tuple),
        form=st.sampled_from(((1, 1),) * 3 + ((2, 2), (2, 1), (4, 3))),
        crowd=st.sampled_from((True, True, False)),
        filled=st.booleans(),
        apart=st.sampled_from((False, True, False)),
    )
    @unless_over
    def decode_together(  # noqa: PLR0913, PLR0917 - drawn by name
        self,
        stem: tuple[int, ...],
        length: int,
        n_requests: int,
        rounds: tuple[tuple[int, str], ...],
        form: tuple[int, int],
        crowd: bool = False,  # noqa: FBT001, FBT002 - drawn by name
        filled: bool = False,  # noqa: FBT001, FBT002
        apart: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Requests of one prompt decode in steps; between two steps one makes other calls.

        In a crowd they go beyond their reservations, and others are promised the remaining slots.
        Where the pools are filled with others' data, each step makes room for all of them. Or
        they are of namespaces apart, and step where room is free.
        """
        self.scenes += 1
        harness, size = self.harness, self.harness.model.page_size
        self._make_place(n_requests)
        prompt = self._grown(stem[:length])
        crowd = crowd and not apart
        lives: list[Live] = []
        for _ in range(n_requests):
            reserve = 1 if crowd and len(lives) != 1 else size + 3
            others = "tenant" if apart and len(lives) == 1 else None
            lives.append(self._begin_decoding(prompt, reserve, others))
        if apart:
            harness.rooms.squeeze()
        elif filled:
            self._fill()
        if crowd:
            self._promise_the_rest(stem, harness.bench.sizes.device * size)
            form = form[0], form[0]  # a pass with drafts goes as far as promised
        for n_tokens, between in rounds:
            harness.step_together((1, 2, 1, 2, 1)[:n_tokens], *form, beyond=5 * crowd)
            live = lives[n_tokens % n_requests]
            if between in {"squeeze", "step_all"}:
                getattr(harness.rooms, between)()
            elif between == "split":
                parted = (*live.tuple[: max(1, live.anchor * size - size * n_tokens)], 0)
                harness.abort(self._begin(None, parted, 0, None))
            elif live in self._requests("decoding"):
                getattr(harness, between)(live)

    @precondition(lambda self: not self.over and self.harness.cache.arenas is not None)
    @has_scene()
    @rule(
        stem=st.sampled_from(STEMS),
        length=st.integers(1, 8),
        chunk=chunks,
        moves=st.lists(st.tuples(picks, picks), min_size=2, max_size=6).map(tuple),
        reserve=st.sampled_from((9, 9, 1, 2)),
        behind=st.booleans(),
        decoded=st.sampled_from((6, 3, 0)),
    )
    @unless_over
    def move_under_requests(
        self,
        stem: tuple[int, ...],
        length: int,
        chunk: int | None,
        moves: tuple[tuple[int, int], ...],
        reserve: int,
        behind: bool = False,  # noqa: FBT001, FBT002 - drawn by name
        decoded: int = 0,
    ) -> None:
        """Boundaries move while requests hold slots of every kind, and go on (K7).

        The first slots go to others' data, which leaves then, so that the requests' slots lie in
        the last extents. The device may lag behind the engine meanwhile. If the requests decoded,
        the pool of their states gives memory first. With a small reservation others are promised
        the remaining slots, so that less than an extent is free of promises.
        """
        self.scenes += 1
        crowd = reserve < MOST_RESERVED
        harness, size = self.harness, self.harness.model.page_size
        self._make_place(2)
        for _ in range(N_BEFORE):
            self._compute(None, harness.unseen(harness.bench.sizes.device // 4 * size))
            harness.rooms.step_all()
        harness.rooms.compute(behind=behind)
        both = []
        for each in (None, chunk):
            tokens = (*self._grown(stem[:length]), *harness.unseen(size))
            live = self._begin(None, tokens, reserve, each)
            self._along(live, 2)
            harness.rooms.step_all()
            if live.admitted and not live.waiting:
                harness.prefill(live, None)
            for _ in range(decoded if live in self._requests("decoding") else 0):
                if live.computed < live.prompt + live.reserve:
                    harness.decode(live, 1)
            both.append(live)
        harness.rooms.squeeze()
        others = self._promise_the_rest(stem, harness.bench.sizes.device * size) if crowd else []
        for giver, taker in ((-1, 0), *moves) if decoded else moves:
            for _ in range(MOST_MOVES):
                if not harness.rooms.move_memory(giver, taker, Tier.DEVICE):
                    break
            for live in both:
                if live not in harness.live or not live.admitted or live.waiting:
                    continue
                if live.computed < live.prompt:
                    harness.prefill(live, None)
                elif live.computed < live.prompt + live.reserve:
                    harness.decode(live, 1)
        for other in others:
            harness.abort(other)
        harness.rooms.settle_memory()

    @has_scene(of_ended=True)
    @rule(index=picks, shared=st.booleans())
    @unless_over
    def abort_in_flight(self, index: int, shared: bool) -> None:  # noqa: FBT001
        """A request ends while its data is on its way; HOST evicts all it can meanwhile (L8)."""
        self.scenes += 1
        harness = self.harness
        namespace, tokens = picked(harness.ended, index)
        self._make_place(2)
        self._leave_on_host(namespace, tokens)
        live = self._begin(namespace, (*tokens, 1), 0, None)
        self._along(live, 2)
        if live not in harness.live or not live.waiting:
            return
        if shared:
            self._along(self._begin(namespace, (*tokens, 2), 0, None), 2)
        harness.abort(live)
        harness.rooms.clear_host()
        harness.rooms.step_all()

    @has_place()
    @has_scene(of_ended=True)
    @rule(index=picks, namespace=st.sampled_from(NAMESPACES))
    @unless_over
    def ask_elsewhere(self, index: int, namespace: object) -> None:
        """The same tokens in a namespace that may look like theirs (T11)."""
        self.scenes += 1
        if len(self.harness.live) >= MOST_REQUESTS:
            raise Impossible
        _, tokens = picked(self.harness.ended, index)
        self.harness.abort(self._begin(namespace, tokens, 0, None))

    @has_scene()
    @rule(
        stem=st.sampled_from(STEMS),
        length=st.integers(1, 5),
        tail=tails,
        chunk=chunks,
        max_deferrals=st.integers(1, 4),
        ends=st.sampled_from(("finish", "finish", "abort", "restart", "")),
        namespace=st.sampled_from((None, None, "tenant")),
    )
    @unless_over
    def compute_once(
        self,
        stem: tuple[int, ...],
        length: int,
        tail: tuple[int, ...],
        chunk: int | None,
        max_deferrals: int,
        ends: str,
        namespace: object,
    ) -> None:
        """Two requests may wait for the pages that a third computes, which may end before (A8).

        One asks a step later than the other, and may be in another namespace.
        """
        self.scenes += 1
        harness, size = self.harness, self.harness.model.page_size
        self._make_place(3)
        tokens = harness.unseen(size) + self._grown(stem[:length])
        first = self._begin(None, tokens + tail, 0, chunk)
        self._along(first, 2)
        others = [
            self._begin(where, (*tokens, *end), 0, None, max_deferrals=max_deferrals)
            for where, end in ((None, (1,)), (namespace, (*tail, 2, 1)))
        ]
        for turn in range(max_deferrals):
            for live in others[: turn + 1]:
                if live in harness.live and not live.admitted:
                    self._along(live, 1)
            if first not in harness.live or not first.admitted or first.waiting:
                continue
            if first.computed < first.prompt and harness.prefill(first, None):
                harness.checkpoint(first)
            elif ends:
                getattr(harness, ends)(first)
        for live in others:
            if live in harness.live and not live.admitted:
                self._along(live, 3)

    @has_scene()
    @rule(
        namespaces=st.lists(st.sampled_from(SHARING), min_size=3, max_size=6).map(tuple),
        share=st.integers(2, 5),
        often=st.booleans(),
        waits=st.lists(st.sampled_from(Wait), max_size=4).map(tuple),
    )
    @unless_over
    def fill_up(
        self,
        namespaces: tuple[object, ...],
        share: int,
        often: bool,  # noqa: FBT001 - drawn by name
        waits: tuple[Wait, ...] = (),
    ) -> None:
        """Sequences of some namespaces fill the pools, so that each takes room of those before.

        Shows which tenant loses data, for which one and how much (K4, K5), and in which order (T7).
        Copies of evicted data may fail, or take longer than the cache waits for them (E4).
        """
        self.scenes += 1
        harness, size = self.harness, self.harness.model.page_size
        self._make_place(2)
        n_pages = max(1, harness.bench.sizes.device // share)
        first = harness.unseen(n_pages * size)
        for at, namespace in enumerate(namespaces):
            if harness.bench.write_back:
                harness.rooms.expect_waits(waits)
            self._compute(
                namespace, harness.unseen(max(1, n_pages - at % 2) * size) if at else first
            )
            if often:
                harness.rooms.step_all()
            if often and at % 2:
                self._compute(namespaces[0], first)

    @has_scene()
    @rule(stem=st.sampled_from(STEMS), large=st.integers(4, 60), small=st.integers(1, 6))
    @unless_over
    def wait_in_line(self, stem: tuple[int, ...], large: int, small: int) -> None:
        """A large request waits while smaller ones behind it come and go (A13).

        Every other one would fit if another request did not hold its pages.
        """
        self.scenes += 1
        harness, size = self.harness, self.harness.model.page_size
        self._make_place(2)
        if large % 2:
            self._along(self._begin(None, harness.unseen(size), size, None), 1)
            base = harness.model.components[0]
            capacity = harness.bench.seen.ceiling(base.name, "device", None)
            large = max(1, capacity // base.slots_per_page - 2 - large % 4) * size
        harness.wait_in_line(stem[:1], large, small)

    @has_scene()
    @rule(namespace=st.sampled_from((Namespaces.ALL, None, "tenant")))
    @unless_over
    def clear(self, namespace: object) -> None:
        """New weights were loaded, or a tenant left."""
        self.scenes += 1
        self.harness.clear(namespace)

    @has_place()
    @has_scene(of_ended=True)
    @rule(index=picks, alone=st.booleans())
    @unless_over
    def clear_before_admission(self, index: int, alone: bool) -> None:  # noqa: FBT001
        """A request that was matched is admitted after its namespace was cleared."""
        self.scenes += 1
        namespace, tokens = picked(self.harness.ended, index)
        live = self._begin(namespace, (*tokens, 1), 0, None)
        self.harness.clear(namespace if alone else Namespaces.ALL)
        if live.adopts:
            self.harness.admit_by_engine(live)
        else:
            self._along(live, 3)

    @precondition(lambda self: not self.over and self.harness.ended and self._fetches_again)
    @rule(
        index=picks,
        length=st.integers(1, 24),
        answers=st.lists(st.sampled_from((Answer.RUNS, *Answer)), max_size=5).map(tuple),
        ends=st.sampled_from(("calm", "calm", "calm", "", "clear", "again")),
    )
    @unless_over
    def fetch_again(self, index: int, length: int, answers: tuple[Answer, ...], ends: str) -> None:
        """A sequence leaves DEVICE and HOST, and comes back from the store (S3, S4)."""
        self._fetch_again(index, length, answers, ends)

    @precondition(lambda self: not self.over and self.harness.ended and self._fetches_again)
    @rule(index=picks, length=st.integers(1, 24))
    @unless_over
    def give_up_while_the_store_reads(self, index: int, length: int) -> None:
        """A sequence leaves both, and is given up when the store has begun to read (S5)."""
        self._fetch_again(index, length, (), "cancel")

    def _fetch_again(self, index: int, length: int, answers: tuple[Answer, ...], ends: str) -> None:
        self.fetches += 1
        harness, fetches, size = self.harness, self.harness.prefetches, self.harness.model.page_size
        self._make_place(1)
        namespace, tokens = picked(harness.ended, index)
        tokens = (tokens + harness.unseen(length))[: harness.bench.sizes.device // 3 * size]
        sequence = (namespace, (*tokens, 1))
        self._compute(namespace, tokens)
        fetches.settle()
        self._leave_on_host(namespace, tokens)
        fetches.settle()
        boundary = fetches.stored(sequence)
        harness.rooms.clear_host()
        fetches.settle()
        fetched = fetches.start(sequence)
        if ends == "again":
            fetches.answer_until("get")
            self._compute(namespace, tokens[: len(tokens) - length % 3 * size])
            harness.rooms.expect_waits([Wait.TIMES_OUT] * len(answers))
            harness.rooms.squeeze()
        for answer in () if ends == "calm" else answers:
            for _ in range(MOST_POLLS):
                if not fetches.pending:
                    harness.rooms.poll()
            if fetches.pending:
                fetches.answer(0, answer)
                harness.rooms.poll()
        if ends == "clear":
            harness.clear(namespace)
        elif ends == "cancel":
            fetches.answer_until("get")
            fetches.cancel(fetched)
        fetches.settle()
        if ends == "calm":
            fetches.check_complete(fetched, boundary)
        if fetched in fetches.fetched and fetched.prefetch.ended:
            self._along(self._begin_fetched(fetched, (1,)), 3)

    @has_place()
    @has_scene(of_ended=True)
    @rule(index=picks, spare=st.integers(0, 2))
    @unless_over
    def pin_when_little_is_left(self, index: int, spare: int) -> None:
        """Nearly all slots are promised to a request when a prefix is pinned (K6)."""
        self.scenes += 1
        harness = self.harness
        sequence = picked(harness.ended, index)
        self._make_place(1)
        base, size = harness.model.components[0], harness.model.page_size
        room = harness.bench.seen.headroom(base.name, "device", None)
        n_pages = max(0, room // base.slots_per_page - 2 - spare)
        self._along(self._begin(None, harness.unseen(size), n_pages * size, None), 1)
        harness.pins.pin(sequence)
