"""Boundaries between pools that move under running requests, driven by one scene (K7)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvgraft import ContractViolation, Tier
from kvgraft.config import WritePolicy
from kvgraft_arena.moving import Mover
from kvgraft_testing.machine import CacheMachine, machine_for, references, setup_for

from .setups import SETUPS

SETUP = replace(setup_for(references()), shared=True, guarded=True)


def moved(*, behind: bool) -> CacheMachine:
    """A pool has given what it could while a request held slots in its last extents."""
    state = machine_for(SETUP)()
    state.open(
        policy=WritePolicy.WRITE_THROUGH, page_size=2, device=12, host=9, load=None, cut_tokens=0
    )
    state.move_under_requests(
        stem=(1, 1, 2, 1, 2, 1),
        length=6,
        chunk=2,
        moves=((0, 2), (0, 2)),
        reserve=2,
        behind=behind,
    )
    return state


@pytest.mark.parametrize("behind", [False, True])
def test_slots_that_requests_hold_move_once_they_are_computed(*, behind: bool) -> None:
    state = moved(behind=behind)
    arenas = state.harness.cache.arenas
    assert arenas is not None
    assert arenas.mover.moved_slots
    state.teardown()


def test_an_engine_that_makes_the_copies_reads_the_old_rows_of_slots_that_move() -> None:
    state = machine_for(SETUPS["full+swa+mamba share"])()
    state.open(
        policy=WritePolicy.WRITE_THROUGH_SELECTIVE,
        page_size=1,
        device=16,
        host=20,
        load=None,
        max_drafts=1,
    )
    assert state.harness.bench.copies
    tail = (2, 1, 2, 2, 1)
    state.begin(stem=(), length=0, tail=(*tail, 10), namespace=None, along=0, reserve=1, chunk=None)
    state.admit(index=0)
    state.step_all()
    state.begin(stem=(), length=0, tail=(*tail, 11), namespace=None, along=0, reserve=4, chunk=None)
    state.admit(index=1)
    state.load_back(index=0)
    state.prefill(index=0, limit=None, whole=True)
    state.checkpoint(index=0)
    state.abort(index=1)
    state.step_together(accepted=1, beyond=0, tokens=[2], width=2)
    state.move_memory(giver=2, taker=0, tier=Tier.DEVICE, times=3)
    arenas = state.harness.cache.arenas
    assert arenas is not None
    assert arenas.mover.moved_slots
    state.teardown()


def test_slots_that_move_before_they_are_computed_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Mover, "_is_behind", lambda self: False)
    with pytest.raises(ContractViolation, match="K7"):
        moved(behind=True)
