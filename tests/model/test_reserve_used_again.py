"""A run of the clean reserve that was used again does not lead to what is above it (T7)."""

from __future__ import annotations

from kvgraft import WritePolicy
from kvgraft_testing.machine import machine_for

from .setups import SETUPS


def test_older_data_enters_the_reserve_before_data_above_a_run_used_again() -> None:
    state = machine_for(SETUPS["full+swa"])()
    state.open(
        page_size=4,
        load=None,
        decode_tokens=0,
        variant=0,
        cut_tokens=0,
        device=16,
        max_drafts=0,
        policy=WritePolicy.WRITE_BACK,
        host=14,
    )
    state.fill_up(namespaces=("", "the rest", None, 0), often=True, share=2)
    state.ask_elsewhere(index=4, namespace=b"")
    stem = (1, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1, 2, 2, 2, 1, 1, 2, 1, 2, 1, 1, 2, 2, 1)
    state.compute_once(
        chunk=3,
        ends="finish",
        length=5,
        max_deferrals=2,
        namespace="tenant",
        stem=stem,
        tail=(),
    )
    state.decode_together(
        form=(2, 1),
        length=0,
        n_requests=2,
        rounds=((3, "checkpoint"), (4, "abort"), (2, "finish")),
        stem=(2, 1, 2, 2, 1, 1, 2, 1, 1, 1, 2, 1, 2, 2, 2, 1, 1, 2, 1, 2, 2, 1, 1, 1),
    )
    assert state.harness.bench.counts["copied ahead"]
    state.teardown()
