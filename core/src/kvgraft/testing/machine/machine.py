"""The Hypothesis state machine around the driver: any order of calls an engine may make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import hypothesis.strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvgraft.admission import Outcome
from kvgraft.config import LoadModel, WritePolicy
from kvgraft.testing.machine.driver import Driver
from kvgraft.testing.machine.examples import Example, Impossible, picked, unless_over
from kvgraft.testing.machine.fitting import fitting_sizes
from kvgraft.testing.machine.live import Live
from kvgraft.testing.machine.setups import Setup
from kvgraft.testing.machine.sizes import Sizes
from kvgraft.types import Tier

__all__ = ["CacheMachine", "machine_for"]

MOST_REQUESTS = 5
LONGEST = 40
"""A conversation longer than this many stem tokens starts over."""

STEMS = (
    (1, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1, 2, 2, 2, 1, 1, 2, 1, 2, 1, 1, 2, 2, 1),
    (1, 1, 2, 1, 2, 1, 1, 1, 2, 2, 1, 2, 2, 1, 1, 2, 1, 1, 2, 2, 1, 1, 2, 2),
    (2, 1, 2, 2, 1, 1, 2, 1, 1, 1, 2, 1, 2, 2, 2, 1, 1, 2, 1, 2, 2, 1, 1, 1),
)
"""What prompts start with: three sequences over two tokens, two of them sharing a beginning."""

NAMESPACES = (None, "tenant")

picks = st.integers(0, 63)
tails = st.lists(st.sampled_from((1, 2)), max_size=4).map(tuple)
chunks = st.sampled_from((None, 1, 2, 3, 4, 6, 9))
page_sizes = st.runner().flatmap(lambda machine: st.sampled_from(tuple(machine.fitting)))

F = TypeVar("F", bound=Callable[..., None])


class CacheMachine(Example):
    """Any order of calls an engine may make, several requests at a time."""

    @initialize(
        page_size=page_sizes,
        policy=st.sampled_from(WritePolicy),
        load=st.sampled_from((None, LoadModel())),
        device=st.sampled_from((9, 12, 16)),
        host=st.sampled_from((9, 14, 20)),
    )
    @unless_over
    def open(
        self, page_size: int, policy: WritePolicy, load: LoadModel | None, device: int, host: int
    ) -> None:
        scale = self.fitting[page_size]
        sizes = Sizes(page_size, policy, load, device * scale, host * scale)
        self.driver = Driver(self.setup, sizes, self.judge)

    # -- picking

    def _requests(self, stage: str) -> list[Live]:
        live = self.driver.live
        if stage == "leased":
            return [each for each in live if not each.admitted]
        if stage == "admitted":
            return [each for each in live if each.admitted]
        if stage == "loadable":
            return [each for each in live if each.admitted and not each.loaded]
        if stage == "unfinished":
            return [each for each in live if each.computed < each.prompt]
        ready = [each for each in live if each.loaded and not each.waiting]
        if stage == "prefilling":
            return [each for each in ready if each.computed < each.prompt]
        if stage == "decoding":
            return [each for each in ready if each.computed >= each.prompt]
        assert stage == "any"
        return live

    def _pick(self, stage: str, index: int) -> Live:
        return picked(self._requests(stage), index)

    def _begin(
        self, namespace: object, tokens: tuple[int, ...], reserve: int, chunk: int | None
    ) -> Live:
        if len(self.driver.live) >= MOST_REQUESTS:
            raise Impossible
        return self.driver.begin(namespace, tokens or (1,), reserve, chunk)

    @staticmethod
    def _has(stage: str) -> Callable[[F], F]:
        return precondition(lambda self: not self.over and bool(self._requests(stage)))

    @staticmethod
    def _has_place() -> Callable[[F], F]:
        return precondition(lambda self: not self.over and len(self.driver.live) < MOST_REQUESTS)

    def _grown(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """A stem's tokens, each repeated where pages are large, so that it fills some."""
        times = max(1, self.driver.model.page_size // 4)
        return tuple(token for token in tokens for _ in range(times))

    # -- requests

    @_has_place()
    @rule(
        stem=st.sampled_from(STEMS),
        length=st.integers(0, 24),
        tail=tails,
        namespace=st.sampled_from(NAMESPACES + (None,) * 2),
        reserve=st.integers(0, 5),
        chunk=chunks,
        along=st.integers(0, 3),
    )
    @unless_over
    def begin(
        self,
        stem: tuple[int, ...],
        length: int,
        tail: tuple[int, ...],
        namespace: object,
        reserve: int,
        chunk: int | None,
        along: int,
    ) -> None:
        tokens = self._grown(stem[:length]) + tail
        self._along(self._begin(namespace, tokens, reserve, chunk), along)

    @_has_place()
    @precondition(lambda self: self.driver.ended)
    @rule(index=picks, tail=tails, reserve=st.integers(0, 5), chunk=chunks, along=st.integers(0, 3))
    @unless_over
    def go_on(
        self, index: int, tail: tuple[int, ...], reserve: int, chunk: int | None, along: int
    ) -> None:
        """The next turn of a conversation."""
        namespace, tokens = picked(self.driver.ended, index)
        if len(tokens) > len(self._grown(tuple(range(LONGEST)))):
            tokens = tokens[:8]
        self._along(self._begin(namespace, tokens + tail, reserve, chunk), along)

    @_has_place()
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
        driver = self.driver
        namespace: object = None
        tokens = self._grown(stem[:length]) + tail
        longest = len(self._grown(tuple(range(LONGEST))))
        if on and driver.ended and len(driver.ended[-1][1]) < longest:
            namespace, before = driver.ended[-1]
            tokens = before + tail
        live = self._begin(namespace, tokens, len(output), chunk)
        self._along(live, 2)
        if not live.admitted:
            return
        if live.waiting:
            driver.rooms.step_all()
        if live.waiting:
            driver.abort(live)
            return
        while live.computed < live.prompt and driver.prefill(live, None):
            driver.checkpoint(live)
        for token in output if live.computed >= live.prompt else ():
            driver.decode(live, token)
        driver.finish(live)

    @_has("unfinished")
    @rule(index=picks, stem=st.sampled_from(STEMS), reserve=st.integers(4, 24))
    @unless_over
    def squeeze_in(self, index: int, stem: tuple[int, ...], reserve: int) -> None:
        """Promise all that is left to others; a request comes in, or goes on, where it just fits.

        A demand that forgets something, and a chunk that is too large, show here.
        """
        driver, live = self.driver, self._pick("unfinished", index)
        others: list[Live] = []
        while reserve >= 0 and len(driver.live) < MOST_REQUESTS:
            other = self._begin("the rest", stem[:1], reserve, None)
            if driver.admit(other).admitted:
                others.append(other)
            else:
                driver.abort(other)
                reserve = reserve // 2 if reserve else -1
        while not live.admitted and others and not driver.admit(live).admitted:
            driver.abort(others.pop())
        if live.admitted and not live.loaded:
            driver.load_back(live)
            driver.rooms.step_all()
        if live.admitted and not live.waiting and live.computed < live.prompt:
            driver.prefill(live, live.prompt)
        for other in others:
            driver.abort(other)

    @_has_place()
    @precondition(lambda self: self.driver.ended)
    @rule(index=picks, share=st.integers(1, 7), fails=st.booleans())
    @unless_over
    def load_together(self, index: int, share: int, fails: bool) -> None:  # noqa: FBT001
        """Two requests need data from HOST, the first a part of what the second needs."""
        namespace, tokens = picked(self.driver.ended, index)
        if len(self.driver.live) + 2 > MOST_REQUESTS:
            raise Impossible
        self.driver.rooms.squeeze()
        for part in (tokens[: len(tokens) * share // 8], tokens):
            self._along(self._begin(namespace, (*part, 1), 0, None), 2)
        if fails and len(self.driver.bench.engine.pending) > 1:
            self.driver.rooms.step(0, fails=True)
            self.driver.rooms.step_all()

    def _along(self, live: Live, far: int) -> None:
        """Take a request some of its way in one step."""
        if far >= 1:
            self._admit(live)
        if far >= 2 and live.admitted:
            self.driver.load_back(live)
            if far >= 3 and not live.waiting:
                self.driver.prefill_all(live)

    def _admit(self, live: Live) -> None:
        decision = self.driver.admit(live)
        if decision.outcome is Outcome.NEVER_FITS:
            self.driver.abort(live)

    @_has_place()
    @_has("leased")
    @rule(index=picks)
    @unless_over
    def begin_again(self, index: int) -> None:
        if len(self.driver.live) >= MOST_REQUESTS:
            raise Impossible
        self.driver.begin_again(self._pick("leased", index))

    @_has("leased")
    @rule(index=picks)
    @unless_over
    def admit(self, index: int) -> None:
        self._admit(self._pick("leased", index))

    @_has("loadable")
    @rule(index=picks)
    @unless_over
    def load_back(self, index: int) -> None:
        self.driver.load_back(self._pick("loadable", index))

    @_has("any")
    @rule(index=picks)
    @unless_over
    def restart(self, index: int) -> None:
        self.driver.restart(self._pick("any", index))

    @_has("prefilling")
    @rule(index=picks, limit=chunks, whole=st.booleans())
    @unless_over
    def prefill(self, index: int, limit: int | None, whole: bool) -> None:  # noqa: FBT001
        live = self._pick("prefilling", index)
        self.driver.prefill(live, limit)
        if whole:
            self.driver.prefill_all(live)

    @_has("decoding")
    @rule(index=picks, tokens=st.lists(st.sampled_from((1, 2)), min_size=1, max_size=4))
    @unless_over
    def decode(self, index: int, tokens: list[int]) -> None:
        live = self._pick("decoding", index)
        for token in tokens:
            if not self.driver.decode(live, token):
                self.driver.finish(live)
                return

    @_has("admitted")
    @rule(index=picks)
    @unless_over
    def checkpoint(self, index: int) -> None:
        self.driver.checkpoint(self._pick("admitted", index))

    @_has("admitted")
    @rule(index=picks)
    @unless_over
    def finish(self, index: int) -> None:
        self.driver.finish(self._pick("admitted", index))

    @_has("any")
    @rule(index=picks)
    @unless_over
    def abort(self, index: int) -> None:
        self.driver.abort(self._pick("any", index))

    # -- transfers

    @precondition(lambda self: not self.over and self.driver.bench.engine.pending)
    @rule(index=picks, fails=st.sampled_from((False, False, True)), poll=st.booleans())
    @unless_over
    def step(self, index: int, fails: bool, poll: bool) -> None:  # noqa: FBT001
        pending = self.driver.bench.engine.pending
        self.driver.rooms.step(picked(range(len(pending)), index), fails=fails)
        if poll:
            self.driver.rooms.poll()

    @precondition(lambda self: not self.over and self.driver.bench.engine.pending)
    @rule()
    @unless_over
    def step_all(self) -> None:
        self.driver.rooms.step_all()

    @precondition(lambda self: not self.over and self.driver.cache.journal.n_in_flight)
    @rule()
    @unless_over
    def poll(self) -> None:
        self.driver.rooms.poll()

    @precondition(lambda self: not self.over and self.driver.bench.write_back)
    @rule(failures=st.integers(0, 7))
    @unless_over
    def expect_failures(self, failures: int) -> None:
        """The next copies that are waited for may fail."""
        self.driver.rooms.expect_failures(failures)

    # -- room

    @rule(index=picks, n_slots=st.integers(1, 9), tier=st.sampled_from((Tier.DEVICE, Tier.HOST)))
    @unless_over
    def evict(self, index: int, n_slots: int, tier: Tier) -> None:
        components = self.driver.model.components
        self.driver.rooms.evict(components[index % len(components)], n_slots, tier)

    @rule()
    @unless_over
    def squeeze(self) -> None:
        """Everything unpinned leaves DEVICE: the next hits are on HOST."""
        self.driver.rooms.squeeze()

    @precondition(lambda self: not self.over and any(each.deferred for each in self.driver.live))
    @rule(index=picks, finish=st.booleans())
    @unless_over
    def quiesce(self, index: int, finish: bool) -> None:  # noqa: FBT001
        deferred = [each for each in self.driver.live if each.deferred]
        self.driver.quiesce(picked(deferred, index), finish=finish)


def machine_for(setup: Setup, ignored: frozenset[str] = frozenset()) -> type[CacheMachine]:
    """The state machine over one component set.

    Args:
        setup: the component set.
        ignored: rules that are known to be broken.

    Raises:
        ConfigError: the components work together with none of the sizes.
        PluginError: a component refuses its options whatever the sizes.
    """
    body: dict[str, Any] = {
        "setup": setup,
        "fitting": fitting_sizes(setup),
        "ignored": ignored,
        "total": Counter(),
        "failures": [],
    }
    return type(f"CacheMachine_{setup.name}", (CacheMachine,), body)
