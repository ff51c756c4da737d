"""Picking requests for the rules of the machine, and bringing them to a stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import hypothesis.strategies as st
from hypothesis.stateful import precondition

from kvgraft.admission import Outcome
from kvgraft.config import WritePolicy
from kvgraft_testing.machine.examples import Example, Impossible, picked
from kvgraft_testing.machine.live import Live
from kvgraft_testing.machine.prefetches import Fetched

__all__ = [
    "LONGEST",
    "MOST_REQUESTS",
    "MOST_SCENES",
    "NAMESPACES",
    "SHARING",
    "STEMS",
    "Picking",
    "chunks",
    "has",
    "has_place",
    "has_scene",
    "picks",
    "tails",
]

MOST_REQUESTS = 5
MOST_DEFERRED = 16
"""Times that a request is deferred before its client leaves: it may be passed as often (A13)."""

MOST_SCENES = 4
MOST_FETCHES = 3
LONGEST = 40
"""A conversation longer than this many stem tokens starts over."""

STEMS = (
    (1, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1, 2, 2, 2, 1, 1, 2, 1, 2, 1, 1, 2, 2, 1),
    (1, 1, 2, 1, 2, 1, 1, 1, 2, 2, 1, 2, 2, 1, 1, 2, 1, 1, 2, 2, 1, 1, 2, 2),
    (2, 1, 2, 2, 1, 1, 2, 1, 1, 1, 2, 1, 2, 2, 2, 1, 1, 2, 1, 2, 2, 1, 1, 1),
)
"""Beginnings of prompts: three sequences over two tokens, two of which share a beginning."""

NAMESPACES = (None, "tenant", "", 0, "0", b"", "None", ())
"""Different ones by `==`, among them falsy ones and some of equal text (T11)."""

SHARING = (None, "tenant", "", 0, "the rest")
"""Namespaces that have tenants, priorities and times to live of their own where such are drawn."""

picks = st.integers(0, 63)
tails = st.lists(st.sampled_from((1, 2)), max_size=4).map(tuple)
chunks = st.sampled_from((None, 1, 2, 3, 4, 6, 9))

F = TypeVar("F", bound=Callable[..., None])


def has(stage: str) -> Callable[[F], F]:
    """For rules about a request in some stage."""
    return precondition(lambda self: not self.over and bool(self._requests(stage)))


def has_place() -> Callable[[F], F]:
    """For rules that begin a request."""
    return precondition(lambda self: not self.over and len(self.harness.live) < MOST_REQUESTS)


def has_scene(*, of_ended: bool = False) -> Callable[[F], F]:
    """For rules that are many calls: an example has few of them."""
    return precondition(
        lambda self: (
            not self.over
            and self.scenes < MOST_SCENES
            and (not of_ended or bool(self.harness.ended))
        )
    )


class Picking(Example):
    """An example that finds its requests by stage."""

    def __init__(self) -> None:
        super().__init__()
        self.scenes = self.fetches = 0

    def _requests(self, stage: str) -> list[Live]:
        live = self.harness.live
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

    @property
    def _fetches_again(self) -> bool:
        """Whether a sequence may leave all tiers and be fetched, beside the other scenes."""
        return self.harness.prefetches.may_start and self.fetches < MOST_FETCHES

    @property
    def may_step(self) -> bool:
        """Whether some request decodes, or may be begun for a step of several."""
        return self.scenes < MOST_SCENES or bool(self._requests("decoding"))

    @property
    def has_unpinned(self) -> bool:
        """Whether data may leave DEVICE."""
        books = self.harness.bench.seen.books
        return any(each.evictable for (_, tier), each in books.items() if tier == "device")

    def _pick(self, stage: str, index: int) -> Live:
        return picked(self._requests(stage), index)

    def _begin(
        self,
        namespace: object,
        tokens: tuple[int, ...],
        reserve: int,
        chunk: int | None,
        mark: int = 0,
        max_deferrals: int = 0,
    ) -> Live:
        if len(self.harness.live) >= MOST_REQUESTS:
            raise Impossible
        return self.harness.begin(namespace, tokens or (1,), reserve, chunk, mark, max_deferrals)

    def _begin_fetched(self, fetched: Fetched, tail: tuple[int, ...]) -> Live:
        namespace, tokens = fetched.sequence
        return self.harness.begin(namespace, (*tokens, *tail), 0, None, fetched=fetched)

    def _grown(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """A stem's tokens, each repeated where pages are large, so that it fills some."""
        times = max(1, self.harness.model.page_size // 4)
        return tuple(token for token in tokens for _ in range(times))

    def _leave_on_host(self, namespace: object, *sequences: tuple[int, ...]) -> None:
        """Evict the data of some sequences from DEVICE, once HOST has it."""
        if self.harness.bench.sizes.policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            for tokens in sequences:  # the second touch
                self.harness.abort(self._begin(namespace, (*tokens, 1), 0, None))
        self.harness.rooms.step_all()
        self.harness.rooms.squeeze()

    def _compute(self, namespace: object, tokens: tuple[int, ...]) -> None:
        """Have a sequence computed and shared, if there is room for it."""
        if not tokens:
            return
        live = self._begin(namespace, tokens, 0, None)
        self._along(live, 2)
        if live.admitted and live.waiting:
            self.harness.rooms.step_all()
        if live.admitted and not live.waiting:
            self.harness.prefill_all(live)
            self.harness.finish(live)
        elif live in self.harness.live:
            self.harness.abort(live)

    def _begin_decoding(
        self, prompt: tuple[int, ...], reserve: int, namespace: object = None
    ) -> Live:
        """A request decodes in steps, if there is room for it; no other has its last page."""
        harness = self.harness
        live = self._begin(namespace, (*prompt, *harness.unseen(1)), reserve, None)
        live.steps = True
        self._along(live, 2)
        harness.rooms.step_all()
        if live.admitted and not live.waiting:
            harness.prefill_all(live)
            harness.checkpoint(live)  # the next one has no page of the same tokens of its own
            if live.standing:
                harness.decode(live, 1)
        return live

    def _make_place(self, n_requests: int) -> None:
        """End the oldest requests until that many have a place, and room."""
        while len(self.harness.live) > MOST_REQUESTS - 2 - n_requests:
            live = self.harness.live[0]
            if live.admitted:
                self.harness.finish(live)
            else:
                self.harness.abort(live)

    def _along(self, live: Live, far: int) -> None:
        """Take a request some of its way in one step."""
        if far >= 1:
            self._admit(live)
        if far >= 2 and live.admitted:
            self.harness.load_back(live)
            if far >= 3 and not live.waiting:
                self.harness.prefill_all(live)

    def _admit(self, live: Live) -> None:
        decision = self.harness.admit(live)
        live.n_deferred += live.deferred
        if decision.outcome is Outcome.NEVER_FITS or live.n_deferred == MOST_DEFERRED:
            self.harness.abort(live)
