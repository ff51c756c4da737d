"""Books and choices of tenants, each wrong in one way: a flood shows it."""

from __future__ import annotations

import inspect
import random
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from kvgraft.errors import ContractViolation, IntegrityError
from kvgraft.tree import eviction, pinning
from kvgraft.tree.tree import Tree
from kvgraft_retention.tenants import SharedLedger, TenantLedger

from .test_flood import NAMESPACES, RIGHTS, SETS, Flood

Patch = pytest.MonkeyPatch

SEEDS = 60
STEPS = 40


def flood(seed: int) -> None:
    """A random flood, with a guard that looks at everything."""
    chance = random.Random(seed)
    state = Flood()
    try:
        state.open(
            chance.choice(SETS),
            chance.choice(RIGHTS),
            chance.choice(("write-through", "write-back")),
            chance.choice(("lru", "density")),
            chance.choice((32, 0)),
        )
        for _ in range(STEPS):
            kind = chance.random()
            if kind < 0.4 and len(state.player.running) < 4:
                stem, length, own = (
                    chance.randrange(4),
                    chance.randint(1, 60),
                    chance.randrange(200),
                )
                reserve, chunk = chance.randint(0, 6), chance.choice((None, 8, 16))
                state.begin(chance.choice(NAMESPACES), stem, length, own, reserve, chunk)
            elif kind < 0.75 and state.player.running:
                state.run(chance.randrange(100), chance.randint(1, 9))
            elif kind < 0.87 and state.player.running:
                state.end(chance.randrange(100), chance.choice(("finish", "abort", "checkpoint")))
            elif kind < 0.9:
                state.pin(chance.choice(NAMESPACES), chance.randrange(4), chance.randint(4, 60))
            elif kind < 0.92:
                state.unpin(chance.choice(NAMESPACES))
            else:
                state.copy(chance.randint(1, 6), fails=chance.random() < 0.2)
            state.books_are_right()
        assert state.player.is_empty_after_all()
    finally:
        state.player.cache.close()


def floods(n: int) -> None:
    for seed in range(n):
        flood(seed)


def replaced(patch: Patch, owner: Any, name: str, old: str, new: str) -> None:
    """Put in a function whose text differs in one place."""
    function = inspect.getattr_static(owner, name)
    inner: Any = function.fget if isinstance(function, property) else function
    text = textwrap.dedent(inspect.getsource(inner)).replace("@property\n", "")
    assert text.count(old) == 1, (name, old)
    scope: dict[str, Any] = {}
    exec(compile(text.replace(old, new), name, "exec"), inner.__globals__, scope)
    changed = scope[name]
    patch.setattr(owner, name, property(changed) if inner is not function else changed)


def guarantees_count_for_nothing_at_eviction(patch: Patch) -> None:
    replaced(patch, TenantLedger, "over", " - self.guarantee", "")


def victims_are_not_cut_at_the_guarantee(patch: Patch) -> None:
    patch.setattr(eviction, "_keep_guaranteed", lambda *given: None)


def slots_on_their_way_out_count_as_borrowed(patch: Patch) -> None:
    replaced(patch, TenantLedger, "over", " - self.leaving", "")


def who_borrowed_least_gives_first(patch: Patch) -> None:
    replaced(patch, SharedLedger, "giver", "rank > most", "rank < most")


def weights_count_for_nothing(patch: Patch) -> None:
    replaced(patch, SharedLedger, "giver", "over / ledger.tenant.weight", "float(over)")


def limits_count_for_nothing_at_admission(patch: Patch) -> None:
    replaced(
        patch,
        TenantLedger,
        "headroom",
        "min(self.allocator.capacity - others, self.limit)",
        "self.allocator.capacity - others",
    )


def limits_count_for_nothing_at_eviction(patch: Patch) -> None:
    replaced(patch, TenantLedger, "room", "self.limit - self.used", "self.allocator.n_free")


def promises_count_on_others_guarantees(patch: Patch) -> None:
    replaced(
        patch,
        TenantLedger,
        "claim",
        "kept if kept > guarantee else guarantee",
        "kept",
    )


def promises_of_others_are_forgotten(patch: Patch) -> None:
    replaced(
        patch,
        TenantLedger,
        "claim",
        "kept if kept > guarantee else guarantee",
        "guarantee",
    )


def an_evicted_slot_stays_its_tenants(patch: Patch) -> None:
    replaced(
        patch,
        Tree,
        "leaves",
        "(component.devices if on_device else component.hosts)[node.tenant]",
        "component.devices[0] if on_device else component.hosts[node.tenant]",
    )


def a_slot_dropped_on_host_is_taken_off_anothers_books(patch: Patch) -> None:
    replaced(
        patch,
        Tree,
        "leaves",
        "(component.devices if on_device else component.hosts)[node.tenant]",
        "component.devices[node.tenant] if on_device else component.hosts[-1]",
    )


def a_pin_is_booked_for_another(patch: Patch) -> None:
    replaced(
        patch,
        pinning,
        "_unpin",
        "ledger = component.devices[anchor.tenant]",
        "ledger = component.devices[-1]",
    )


DEFECTS: list[tuple[Callable[[Patch], None], str]] = [
    (guarantees_count_for_nothing_at_eviction, "K4 K5"),
    (victims_are_not_cut_at_the_guarantee, "K4"),
    (slots_on_their_way_out_count_as_borrowed, "K4 K5"),
    (who_borrowed_least_gives_first, "K5"),
    (weights_count_for_nothing, "K5"),
    (limits_count_for_nothing_at_admission, "A7 A8 A12 K5"),
    (limits_count_for_nothing_at_eviction, "K5"),
    (promises_count_on_others_guarantees, "A7 A8 A12 K4"),
    (promises_of_others_are_forgotten, "A7 A8 A12 K4"),
    (an_evicted_slot_stays_its_tenants, "T8"),
    (a_slot_dropped_on_host_is_taken_off_anothers_books, "T8"),
    (a_pin_is_booked_for_another, "T8"),
]


@pytest.mark.one_in(3)
@pytest.mark.plain_build
@pytest.mark.parametrize(
    ("defect", "rules"),
    [
        pytest.param(
            *each,
            id=each[0].__name__,
            marks=pytest.mark.long if each[0] is slots_on_their_way_out_count_as_borrowed else (),
        )
        for each in DEFECTS
    ],
)
def test_a_flood_shows(
    defect: Callable[[Patch], None], rules: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    with pytest.raises((ContractViolation, IntegrityError)) as caught:
        floods(3 * SEEDS)
    assert caught.value.rule in rules.split(), caught.value


def test_a_core_without_defect_stands_the_same_floods() -> None:
    floods(SEEDS // 4)
