"""No tenant falls below its guarantee for another's requests, whatever it does (K4, A7, T8)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvgraft.admission import Outcome

from .engine import PAGE, Player

SETS = (
    ("full",),
    ("full", "swa"),
    ("full", "mamba"),
    ("full", "swa", "mamba"),
    ("swa", "hisparse"),
)

RIGHTS = (
    {"a": {"namespaces": ["a"], "guarantee": 0.5}, "default": {}},
    {
        "a": {"namespaces": ["a"], "guarantee": 0.3, "limit": 0.6, "host_guarantee": 0.5},
        "b": {"prefixes": ["b"], "guarantee": 0.3, "weight": 2},
        "default": {"limit": 0.5},
    },
    {"a": {"namespaces": ["a"]}, "b": {"namespaces": ["b"], "limit": 0.4}, "default": {}},
)
NAMESPACES = ("a", "b", "b2", None)


class Flood(RuleBasedStateMachine):
    """Requests of several tenants in any order, with copies that end late or fail."""

    player: Player

    @initialize(
        components=st.sampled_from(SETS),
        tenants=st.sampled_from(RIGHTS),
        policy=st.sampled_from(("write-through", "write-through-selective", "write-back")),
        keeps=st.sampled_from(("lru", "density")),
        host=st.sampled_from((32, 32, 0)),
    )
    def open(
        self,
        components: tuple[str, ...],
        tenants: dict[str, dict[str, object]],
        policy: str,
        keeps: str,
        host: int,
    ) -> None:
        self.player = Player(
            components, tenants, write_policy=policy, policy=keeps, host_tokens=host * PAGE
        )

    @precondition(lambda self: len(self.player.running) < 4)
    @rule(
        namespace=st.sampled_from(NAMESPACES),
        stem=st.integers(0, 3),
        length=st.integers(1, 60),
        own=st.integers(0, 200),
        reserve=st.integers(0, 6),
        chunk=st.sampled_from((None, 8, 16)),
    )
    def begin(
        self, namespace: str | None, stem: int, length: int, own: int, reserve: int, chunk: int
    ) -> None:
        tokens = [*range(100 * stem, 100 * stem + length), 1000 + own, 1001 + own]
        _, decision = self.player.begin(namespace, tokens, reserve, chunk)
        pinned = len(self.player.cache.pins)
        if decision.outcome is Outcome.DEFERRED and not self.player.running and not pinned:
            waits = decision.waits_for
            assert waits is not None
            assert waits.transfers or waits.storage, f"{decision}: it would wait for ever (A8)"

    @rule(namespace=st.sampled_from(NAMESPACES), stem=st.integers(0, 3), length=st.integers(4, 60))
    def pin(self, namespace: str | None, stem: int, length: int) -> None:
        self.player.pin(namespace, range(100 * stem, 100 * stem + length))

    @rule(namespace=st.sampled_from(NAMESPACES))
    def unpin(self, namespace: str | None) -> None:
        self.player.cache.unpin_all(str(namespace))

    @precondition(lambda self: self.player.running)
    @rule(pick=st.integers(0, 99), steps=st.integers(1, 9))
    def run(self, pick: int, steps: int) -> None:
        for _ in range(steps):
            if self.player.running:
                self.player.step(self.player.running[pick % len(self.player.running)])

    @precondition(lambda self: self.player.running)
    @rule(pick=st.integers(0, 99), how=st.sampled_from(("finish", "finish", "abort", "checkpoint")))
    def end(self, pick: int, how: str) -> None:
        request = self.player.running[pick % len(self.player.running)]
        if how == "abort" or (request.ready and not request.load_failed):
            getattr(self.player, how)(request)

    @rule(fails=st.sampled_from((False, False, False, True)), n=st.integers(1, 6))
    def copy(self, n: int, *, fails: bool) -> None:
        for _ in range(n):
            self.player.copy(fails=fails)

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "player"):
            self.player.cache.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "player"):
            assert self.player.is_empty_after_all()
            self.player.cache.close()


def test_nobody_loses_a_guarantee() -> None:
    run_state_machine_as_test(Flood, settings=settings(max_examples=15, stateful_step_count=25))


@pytest.mark.long
def test_nobody_loses_a_guarantee_in_long_floods() -> None:
    run_state_machine_as_test(Flood, settings=settings(max_examples=200, stateful_step_count=80))
