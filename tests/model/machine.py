"""The Hypothesis state machine around the driver."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

from kvgraft import LoadModel, WritePolicy
from kvgraft.admission import Outcome
from kvgraft.types import Tier

from .driver import Driver
from .live import Live
from .setups import Setup, Sizes

__all__ = ["CacheMachine", "machine_for"]

MOST_REQUESTS = 5
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


class CacheMachine(RuleBasedStateMachine):
    """Any order of calls an engine may make, several requests at a time.

    Attributes:
        setup: the component set; subclasses name it.
        total: what all machines of the class did.
    """

    setup: Setup
    total: Counter[str]
    driver: Driver

    @initialize(
        page_size=st.sampled_from((1, 2, 4)),
        policy=st.sampled_from(WritePolicy),
        load=st.sampled_from((None, LoadModel())),
        device=st.sampled_from((9, 12, 16)),
        host=st.sampled_from((9, 14, 20)),
    )
    def open(
        self, page_size: int, policy: WritePolicy, load: LoadModel | None, device: int, host: int
    ) -> None:
        self.driver = Driver(self.setup, Sizes(page_size, policy, load, device, host))

    def teardown(self) -> None:
        if hasattr(self, "driver") and self.driver.sound:
            self.driver.close()
        if hasattr(self, "driver"):
            self.total.update(self.driver.counts)
            self.total["examples"] += 1

    def check_invariants(self, *arguments: Any, **options: Any) -> None:
        """Called after every step: count it."""
        self.total["steps"] += 1
        super().check_invariants(*arguments, **options)

    # -- picking

    def _requests(self, stage: str) -> list[Live]:
        live = self.driver.live
        if stage == "leased":
            return [each for each in live if not each.admitted]
        if stage == "admitted":
            return [each for each in live if each.admitted]
        if stage == "loadable":
            return [each for each in live if each.admitted and not each.loaded]
        ready = [each for each in live if each.loaded and not each.waiting]
        if stage == "prefilling":
            return [each for each in ready if each.computed < each.prompt]
        if stage == "decoding":
            return [each for each in ready if each.computed >= each.prompt]
        assert stage == "any"
        return live

    def _pick(self, stage: str, index: int) -> Live | None:
        requests = self._requests(stage)
        return requests[index % len(requests)] if requests else None

    def _has(stage: str) -> Any:  # type: ignore[misc]  # noqa: N805 - used while the class is made
        return precondition(lambda self: bool(self._requests(stage)))

    # -- requests

    @precondition(lambda self: len(self.driver.live) < MOST_REQUESTS)
    @rule(
        stem=st.sampled_from(STEMS),
        length=st.integers(0, 24),
        tail=tails,
        namespace=st.sampled_from(NAMESPACES + (None,) * 2),
        reserve=st.integers(0, 5),
        chunk=chunks,
        along=st.integers(0, 3),
    )
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
        live = self.driver.begin(namespace, stem[:length] + tail or (1,), reserve, chunk)
        self._along(live, along)

    @precondition(lambda self: len(self.driver.live) < MOST_REQUESTS and self.driver.ended)
    @rule(index=picks, tail=tails, reserve=st.integers(0, 5), chunk=chunks, along=st.integers(0, 3))
    def go_on(
        self, index: int, tail: tuple[int, ...], reserve: int, chunk: int | None, along: int
    ) -> None:
        """The next turn of a conversation."""
        ended = self.driver.ended
        namespace, tokens = ended[index % len(ended)]
        if len(tokens) > 40:
            tokens = tokens[:8]
        live = self.driver.begin(namespace, tokens + tail, reserve, chunk)
        self._along(live, along)

    @precondition(lambda self: len(self.driver.live) < MOST_REQUESTS)
    @rule(
        stem=st.sampled_from(STEMS),
        length=st.integers(1, 24),
        tail=tails,
        chunk=chunks,
        output=tails,
        on=st.booleans(),
    )
    def serve(
        self,
        stem: tuple[int, ...],
        length: int,
        tail: tuple[int, ...],
        chunk: int | None,
        output: tuple[int, ...],
        on: bool,  # noqa: FBT001
    ) -> None:
        """A whole request, or the next turn of a conversation, from match to finish."""
        driver = self.driver
        namespace, tokens = None, stem[:length] + tail
        if on and driver.ended and len(driver.ended[-1][1]) < 40:
            namespace, before = driver.ended[-1]
            tokens = before + tail
        live = driver.begin(namespace, tokens, len(output), chunk)
        self._along(live, 2)
        if not live.admitted:
            return
        if live.waiting:
            driver.engine.run_all()
            driver.poll()
        if live.waiting:
            driver.abort(live)
            return
        while live.computed < live.prompt:
            driver.prefill(live, None)
            driver.checkpoint(live)
        for token in output:
            driver.decode(live, token)
        driver.finish(live)

    def _along(self, live: Live, far: int) -> None:
        """Take a request some of its way in one step."""
        if far >= 1:
            self._admit(live)
        if far >= 2 and live.admitted:
            self.driver.load_back(live)
            if far >= 3 and not live.waiting:
                while live.computed < live.prompt:
                    self.driver.prefill(live, None)

    def _admit(self, live: Live) -> None:
        decision = self.driver.admit(live)
        if decision.outcome is Outcome.NEVER_FITS:
            self.driver.abort(live)

    @_has("leased")
    @rule(index=picks)
    def admit(self, index: int) -> None:
        live = self._pick("leased", index)
        assert live is not None
        self._admit(live)

    @_has("loadable")
    @rule(index=picks)
    def load_back(self, index: int) -> None:
        live = self._pick("loadable", index)
        assert live is not None
        self.driver.load_back(live)

    @_has("any")
    @rule(index=picks)
    def restart(self, index: int) -> None:
        live = self._pick("any", index)
        assert live is not None
        self.driver.restart(live)

    @_has("prefilling")
    @rule(index=picks, limit=chunks, whole=st.booleans())
    def prefill(self, index: int, limit: int | None, whole: bool) -> None:  # noqa: FBT001
        live = self._pick("prefilling", index)
        assert live is not None
        self.driver.prefill(live, limit)
        while whole and live.computed < live.prompt:
            self.driver.prefill(live, None)

    @_has("decoding")
    @rule(index=picks, tokens=st.lists(st.sampled_from((1, 2)), min_size=1, max_size=4))
    def decode(self, index: int, tokens: list[int]) -> None:
        live = self._pick("decoding", index)
        assert live is not None
        for token in tokens:
            if not self.driver.decode(live, token):
                self.driver.finish(live)
                return

    @_has("admitted")
    @rule(index=picks)
    def checkpoint(self, index: int) -> None:
        live = self._pick("admitted", index)
        assert live is not None
        self.driver.checkpoint(live)

    @_has("admitted")
    @rule(index=picks)
    def finish(self, index: int) -> None:
        live = self._pick("admitted", index)
        assert live is not None
        self.driver.finish(live)

    @_has("any")
    @rule(index=picks)
    def abort(self, index: int) -> None:
        live = self._pick("any", index)
        assert live is not None
        self.driver.abort(live)

    # -- transfers

    @precondition(lambda self: self.driver.engine.pending)
    @rule(index=picks, fails=st.sampled_from((False, False, True)), poll=st.booleans())
    def step(self, index: int, fails: bool, poll: bool) -> None:  # noqa: FBT001
        engine = self.driver.engine
        position = index % len(engine.pending)
        if fails:
            engine.fail(position)
        else:
            engine.step(position)
        if poll:
            self.driver.poll()

    @precondition(lambda self: self.driver.engine.pending)
    @rule()
    def step_all(self) -> None:
        self.driver.engine.run_all()
        self.driver.poll()

    @precondition(lambda self: self.driver.cache.journal.n_in_flight)
    @rule()
    def poll(self) -> None:
        self.driver.poll()

    @precondition(lambda self: self.driver.write_back)
    @rule(failures=st.integers(0, 7))
    def expect_failures(self, failures: int) -> None:
        """The next copies that are waited for may fail."""
        self.driver.engine.failures = failures

    # -- room

    @rule(index=picks, n_slots=st.integers(1, 9), tier=st.sampled_from((Tier.DEVICE, Tier.HOST)))
    def evict(self, index: int, n_slots: int, tier: Tier) -> None:
        components = self.driver.model.components
        self.driver.evict(components[index % len(components)], n_slots, tier)

    @rule()
    def squeeze(self) -> None:
        """Everything unpinned leaves DEVICE: the next hits are on HOST."""
        for component in self.driver.model.components:
            books = self.driver.seen.books[component.name, "device"]
            self.driver.evict(component, books.capacity, Tier.DEVICE)

    @precondition(lambda self: any(each.deferred for each in self.driver.live))
    @rule(index=picks, finish=st.booleans())
    def quiesce(self, index: int, finish: bool) -> None:  # noqa: FBT001
        deferred = [each for each in self.driver.live if each.deferred]
        self.driver.quiesce(deferred[index % len(deferred)], finish=finish)


def machine_for(setup: Setup) -> type[CacheMachine]:
    """The state machine over one component set."""
    return type(f"CacheMachine_{setup.name}", (CacheMachine,), {"setup": setup, "total": Counter()})
