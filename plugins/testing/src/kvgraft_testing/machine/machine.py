"""The Hypothesis state machine around the harness: any order of calls an engine may make."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvgraft.config import LoadModel, WritePolicy
from kvgraft.types import Tier
from kvgraft_testing.machine.brute_force import Prefix
from kvgraft_testing.machine.engines import Wait
from kvgraft_testing.machine.examples import Impossible, picked, unless_over
from kvgraft_testing.machine.fitting import fitting_sizes, opens
from kvgraft_testing.machine.harness import Harness
from kvgraft_testing.machine.picking import (
    LONGEST,
    MOST_REQUESTS,
    MOST_SCENES,
    NAMESPACES,
    STEMS,
    chunks,
    has,
    has_place,
    picks,
    tails,
)
from kvgraft_testing.machine.scenes import Scenes
from kvgraft_testing.machine.setups import Setup, drawn_setups
from kvgraft_testing.machine.sizes import STATES, Sizes
from kvgraft_testing.machine.stores import Answer

__all__ = ["CacheMachine", "machine_for"]

PASSES = LoadModel(latency_s=2e-4, pass_s=3e-4, pass_tokens=8)
"""A few more tokens take no longer pass; more than eight take another pass."""

page_sizes = st.runner().flatmap(lambda machine: st.sampled_from(tuple(machine.fitting)))
variants = st.runner().flatmap(lambda machine: st.integers(0, len(machine.variants) - 1))


class CacheMachine(Scenes):
    """Any order of calls an engine may make, several requests at a time."""

    @initialize(
        page_size=page_sizes,
        policy=st.sampled_from(WritePolicy),
        load=st.sampled_from((None, LoadModel(), PASSES)),
        device=st.sampled_from((9, 12, 16)),
        host=st.sampled_from((9, 14, 20)),
        cut_tokens=st.sampled_from((0, 0, 5)),
        decode_tokens=st.sampled_from((0, 0, 5)),
        max_drafts=st.sampled_from((3, 0)),
        states=st.sampled_from((STATES, STATES, 3, 3 * STATES)),
        variant=variants,
    )
    @unless_over
    def open(  # noqa: PLR0913, PLR0917 - drawn by name
        self,
        page_size: int,
        policy: WritePolicy,
        load: LoadModel | None,
        device: int,
        host: int,
        cut_tokens: int = 0,
        decode_tokens: int = 0,
        max_drafts: int = 0,
        states: int = STATES,
        variant: int = 0,
    ) -> None:
        setup, scale = self.variants[variant], self.fitting[page_size]
        sizes = Sizes(
            page_size,
            policy,
            load,
            device * scale,
            host * scale,
            cut_tokens,
            decode_tokens=decode_tokens,
            max_drafts=max_drafts,
            states=max(STATES, states) if setup.tenants else states,
        )
        self.harness = Harness(setup, sizes, self.judge)

    # -- requests

    @has_place()
    @rule(
        stem=st.sampled_from(STEMS),
        length=st.integers(0, 24),
        tail=tails,
        namespace=st.sampled_from(NAMESPACES + (None,) * 10 + ("tenant",) * 3),
        reserve=st.integers(0, 5),
        chunk=chunks,
        along=st.integers(0, 3),
        max_deferrals=st.sampled_from((0,) * 5 + (1, 3)),
    )
    @unless_over
    def begin(  # noqa: PLR0913, PLR0917 - drawn by name
        self,
        stem: tuple[int, ...],
        length: int,
        tail: tuple[int, ...],
        namespace: object,
        reserve: int,
        chunk: int | None,
        along: int,
        max_deferrals: int = 0,
    ) -> None:
        tokens = self._grown(stem[:length]) + tail
        live = self._begin(namespace, tokens, reserve, chunk, max_deferrals=max_deferrals)
        self._along(live, along)

    @has_place()
    @rule(
        stem=st.sampled_from(STEMS),
        length=st.integers(0, 24),
        mark=st.integers(1, 16),
        chunk=chunks,
        along=st.integers(0, 3),
    )
    @unless_over
    def begin_marked(
        self, stem: tuple[int, ...], length: int, mark: int, chunk: int | None, along: int
    ) -> None:
        """The engine knows where others will go on differently: the end of a system prompt."""
        tokens = self._grown(stem[:length])
        mark = min(mark * max(1, self.harness.model.page_size // 4), len(tokens))
        self._along(self._begin(None, tokens, 0, chunk, mark), along)

    @has_place()
    @precondition(lambda self: self.harness.ended)
    @rule(index=picks, tail=tails, reserve=st.integers(0, 5), chunk=chunks, along=st.integers(0, 3))
    @unless_over
    def go_on(
        self, index: int, tail: tuple[int, ...], reserve: int, chunk: int | None, along: int
    ) -> None:
        """The next turn of a conversation."""
        namespace, tokens = picked(self.harness.ended, index)
        if len(tokens) > len(self._grown(tuple(range(LONGEST)))):
            tokens = tokens[:8]
        self._along(self._begin(namespace, tokens + tail, reserve, chunk), along)

    @has_place()
    @rule(
        stem=st.sampled_from(STEMS),
        length=st.integers(1, 24),
        tail=tails,
        chunk=chunks,
        output=tails,
        on=st.booleans(),
    )
    @unless_over
    def serve(
        self,
        stem: tuple[int, ...],
        length: int,
        tail: tuple[int, ...],
        chunk: int | None,
        output: tuple[int, ...],
        on: bool,  # noqa: FBT001 - drawn by name
    ) -> None:
        """A whole request, or the next turn of a conversation, from match to finish."""
        harness = self.harness
        namespace: object = None
        tokens = self._grown(stem[:length]) + tail
        longest = len(self._grown(tuple(range(LONGEST))))
        if on and harness.ended and len(harness.ended[-1][1]) < longest:
            namespace, before = harness.ended[-1]
            tokens = before + tail
        live = self._begin(namespace, tokens, len(output), chunk)
        self._along(live, 2)
        if not live.admitted:
            return
        if live.waiting:
            harness.rooms.step_all()
        if live.waiting:
            harness.abort(live)
            return
        while live.computed < live.prompt and harness.prefill(live, None, fenced=False):
            harness.checkpoint(live)
        for at, token in enumerate(output if live.computed >= live.prompt else ()):
            harness.decode(live, token, fenced=at < len(output) - 1)
        harness.finish(live)

    @has_place()
    @has("leased")
    @rule(index=picks)
    @unless_over
    def begin_again(self, index: int) -> None:
        if len(self.harness.live) >= MOST_REQUESTS:
            raise Impossible
        self.harness.begin_again(self._pick("leased", index))

    @has("leased")
    @rule(index=picks)
    @unless_over
    def admit(self, index: int) -> None:
        self._admit(self._pick("leased", index))

    @has("loadable")
    @rule(index=picks)
    @unless_over
    def load_back(self, index: int) -> None:
        self.harness.load_back(self._pick("loadable", index))

    @has("any")
    @rule(index=picks)
    @unless_over
    def restart(self, index: int) -> None:
        self.harness.restart(self._pick("any", index))

    @has("prefilling")
    @rule(index=picks, limit=chunks, whole=st.booleans())
    @unless_over
    def prefill(self, index: int, limit: int | None, whole: bool) -> None:  # noqa: FBT001
        live = self._pick("prefilling", index)
        self.harness.prefill(live, limit)
        if whole:
            self.harness.prefill_all(live)

    @has("decoding")
    @rule(
        index=picks,
        tokens=st.lists(st.sampled_from((1, 2)), min_size=1, max_size=4),
    )
    @unless_over
    def decode(self, index: int, tokens: list[int]) -> None:
        live = self._pick("decoding", index)
        for token in tokens:
            if not self.harness.decode(live, token):
                self.harness.finish(live)
                return

    @precondition(lambda self: not self.over and self.may_step)
    @rule(
        tokens=st.lists(st.sampled_from((1, 2)), min_size=1, max_size=3),
        width=st.sampled_from((1, 1, 2, 4)),
        accepted=st.integers(0, 4),
        beyond=st.sampled_from((0, 0, 1, 2)),
    )
    @unless_over
    def step_together(self, tokens: list[int], width: int, accepted: int, beyond: int = 0) -> None:
        """All decoding requests take tokens in one step, or in some; drafts may be rejected.

        Some of the steps may go beyond the reservations. Where none can step, two are begun.
        """
        if self.harness.step_together(tokens, width, accepted, beyond):
            return
        if self.scenes >= MOST_SCENES:
            raise Impossible
        self.scenes += 1
        self._make_place(2)
        for _ in range(2):
            self._begin_decoding((), len(tokens) * width)
        self.harness.step_together(tokens, width, accepted, beyond)

    @has("admitted")
    @rule(index=picks, keep_slots=st.booleans())
    @unless_over
    def checkpoint(self, index: int, keep_slots: bool = False) -> None:  # noqa: FBT001, FBT002
        self.harness.checkpoint(self._pick("admitted", index), keep_slots=keep_slots)

    @has_place()
    @has("admitted")
    @rule(index=picks, tail=tails, reserve=st.integers(0, 5), along=st.integers(0, 3))
    @unless_over
    def fork(self, index: int, tail: tuple[int, ...], reserve: int, along: int) -> None:
        """Another sample of a running request's tokens so far."""
        live = self._pick("admitted", index)
        if live.cleared or len(self.harness.live) >= MOST_REQUESTS:
            raise Impossible
        self.harness.misuse(live)
        self._along(self.harness.fork(live, tail, reserve), along)

    @has("admitted")
    @rule(index=picks)
    @unless_over
    def finish(self, index: int) -> None:
        self.harness.finish(self._pick("admitted", index))

    @has("any")
    @rule(index=picks)
    @unless_over
    def abort(self, index: int) -> None:
        self.harness.abort(self._pick("any", index))

    # -- pinned prefixes

    @precondition(lambda self: not self.over and self.harness.ended)
    @rule(index=picks, part=st.integers(1, 4))
    @unless_over
    def pin(self, index: int, part: int) -> None:
        """A prefix of a sequence that was finished."""
        namespace, tokens = picked(self.harness.ended, index)
        self.harness.pins.pin((namespace, tokens[: -(-len(tokens) * part // 4)]))

    @precondition(lambda self: not self.over and self.harness.pins.kept)
    @rule(index=picks)
    @unless_over
    def unpin(self, index: int) -> None:
        self.harness.pins.unpin(picked(self.harness.pins.kept, index))

    # -- transfers

    @precondition(lambda self: not self.over and self.harness.bench.engine.pending)
    @rule(index=picks, fails=st.sampled_from((False, False, True)), poll=st.booleans())
    @unless_over
    def step(self, index: int, fails: bool, poll: bool) -> None:  # noqa: FBT001
        pending = self.harness.bench.engine.pending
        self.harness.rooms.step(picked(range(len(pending)), index), fails=fails)
        if poll:
            self.harness.rooms.poll()

    @precondition(lambda self: not self.over and self.harness.bench.engine.pending)
    @rule()
    @unless_over
    def step_all(self) -> None:
        self.harness.rooms.step_all()

    @precondition(lambda self: not self.over and self.harness.cache.journal.n_in_flight)
    @rule()
    @unless_over
    def poll(self) -> None:
        self.harness.rooms.poll()

    @precondition(lambda self: not self.over and self.harness.bench.write_back)
    @rule(outcomes=st.lists(st.sampled_from(Wait), max_size=6).map(tuple))
    @unless_over
    def expect_waits(self, outcomes: tuple[Wait, ...]) -> None:
        """The next copies that are waited for may fail, or take too long."""
        self.harness.rooms.expect_waits(outcomes)

    # -- a store

    @precondition(lambda self: not self.over and self.harness.prefetches.may_start)
    @rule(stem=st.sampled_from(STEMS), length=st.integers(1, 24), index=picks, on=st.booleans())
    @unless_over
    def prefetch(self, stem: tuple[int, ...], length: int, index: int, on: bool) -> None:  # noqa: FBT001
        """A request waits in a queue; its data is fetched from the store meanwhile."""
        sequence: Prefix = (None, self._grown(stem[:length]))
        if on and self.harness.ended:
            namespace, tokens = picked(self.harness.ended, index)
            sequence = (namespace, (*tokens, 1))
        self.harness.prefetches.start(sequence)

    @precondition(lambda self: not self.over and self.harness.prefetches.pending)
    @rule(index=picks, answer=st.sampled_from((*(Answer.RUNS,) * 4, *Answer)))
    @unless_over
    def store_answers(self, index: int, answer: Answer) -> None:
        pending = self.harness.prefetches.pending
        self.harness.prefetches.answer(picked(range(pending), index), answer)
        self.harness.rooms.poll()

    @precondition(lambda self: not self.over and self.harness.prefetches.tier is not None)
    @rule(settles=st.booleans())
    @unless_over
    def go_on_storing(self, settles: bool) -> None:  # noqa: FBT001
        if settles:
            self.harness.prefetches.settle()
        self.harness.rooms.poll()

    @has_place()
    @precondition(lambda self: self.harness.prefetches.fetched)
    @rule(index=picks, tail=tails, along=st.integers(0, 3), gives_up=st.booleans())
    @unless_over
    def begin_fetched(
        self,
        index: int,
        tail: tuple[int, ...],
        along: int,
        gives_up: bool,  # noqa: FBT001 - drawn by name
    ) -> None:
        """The request of a prefetch begins, or is given up; one under way is given up."""
        fetched = picked(self.harness.prefetches.fetched, index)
        if gives_up or not fetched.prefetch.ended:
            self.harness.prefetches.cancel(fetched)
            return
        self._along(self._begin_fetched(fetched, tail), along)

    # -- room

    @rule(index=picks, n_slots=st.integers(1, 9), tier=st.sampled_from((Tier.DEVICE, Tier.HOST)))
    @unless_over
    def evict(self, index: int, n_slots: int, tier: Tier) -> None:
        components = self.harness.model.components
        self.harness.rooms.evict(components[index % len(components)], n_slots, tier)

    @precondition(lambda self: not self.over and self.has_unpinned)
    @rule()
    @unless_over
    def squeeze(self) -> None:
        """Everything unpinned leaves DEVICE: the next hits are on HOST."""
        self.harness.rooms.squeeze()

    @precondition(lambda self: not self.over and any(each.deferred for each in self.harness.live))
    @rule(index=picks, finish=st.booleans(), polls=st.booleans())
    @unless_over
    def quiesce(self, index: int, finish: bool, polls: bool) -> None:  # noqa: FBT001
        deferred = [each for each in self.harness.live if each.deferred]
        self.harness.quiesce(picked(deferred, index), finish=finish, polls=polls)

    # -- boundaries between pools that share a budget (K7)

    @precondition(lambda self: not self.over and self.harness.cache.arenas is not None)
    @rule(
        giver=picks,
        taker=picks,
        tier=st.sampled_from((Tier.DEVICE, Tier.DEVICE, Tier.HOST)),
        times=st.integers(1, 4),
    )
    @unless_over
    def move_memory(self, giver: int, taker: int, tier: Tier, times: int) -> None:
        for _ in range(times):
            self.harness.rooms.move_memory(giver, taker, tier)

    @precondition(lambda self: not self.over and self.harness.cache.arenas is not None)
    @rule(behind=st.booleans())
    @unless_over
    def compute(self, behind: bool) -> None:  # noqa: FBT001
        self.harness.rooms.compute(behind=behind)

    @precondition(lambda self: not self.over and self.harness.cache.arenas is not None)
    @rule()
    @unless_over
    def settle_memory(self) -> None:
        """Extents on their way arrive."""
        self.harness.rooms.settle_memory()


def machine_for(setup: Setup, ignored: frozenset[str] = frozenset()) -> type[CacheMachine]:
    """The state machine over one component set.

    Args:
        setup: the component set.
        ignored: rules that are known to be broken.

    Raises:
        ConfigError: the components work together with none of the sizes.
        PluginError: a component refuses its options for all sizes.
    """
    fitting = fitting_sizes(setup)
    body: dict[str, Any] = {
        "setup": setup,
        "fitting": fitting,
        "variants": tuple(each for each in drawn_setups(setup) if opens(each, fitting)),
        "ignored": ignored,
        "total": Counter(),
        "failures": [],
    }
    return type(f"CacheMachine_{setup.name}", (CacheMachine,), body)
