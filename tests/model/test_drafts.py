"""Passes with drafts of every component set, against the brute-force model (G1 to G4, G6)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import settings

from kvgraft_testing.machine import Sizes, drive
from kvgraft_testing.machine.drafting import converse
from kvgraft_testing.machine.driving import EXAMPLES_A_TALK
from kvgraft_testing.machine.harness import Harness

from ..mutants import cores_of_drafts as _drafts  # noqa: F401 - fills CORES
from ..mutants.cores import CORES
from .setups import SETUPS


class Decoded(NamedTuple):
    """Conversations that agreed with the model.

    Attributes:
        drafts: passes that had some.
        calls: of the cache; everything that can be seen was compared after each.
    """

    drafts: int
    calls: int


def decode_with_drafts(name: str, seed: int, n_rounds: int) -> Decoded:
    """Conversations that decode with drafts."""
    draw = random.Random(f"{name} {seed}")
    page_size = (2, 4)[seed % 2] if seed < 12 else draw.choice((1, 2, 4))
    decode_tokens = draw.choice((0, 5, 12))
    sizes = Sizes(page_size, device=60, host=20, decode_tokens=decode_tokens, max_drafts=3)
    harness = Harness(SETUPS[name], sizes)
    converse(harness, draw, n_rounds)
    harness.close()
    return Decoded(harness.bench.counts["drafts"], harness.bench.n_calls)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["full+swa+mamba", "broad+local+lean", "mamba+chunked"])
def test_passes_with_drafts_agree_with_the_model(name: str) -> None:
    assert sum(decode_with_drafts(name, seed, 3).drafts for seed in range(2)) > 0


@pytest.mark.long
@pytest.mark.parametrize("name", SETUPS)
def test_passes_with_drafts_of_every_component_set_agree_with_the_model(
    name: str, fuzz_steps: int, record_property: Callable[[str, object], None]
) -> None:
    """`make fuzz` does the same for a million calls."""
    decoded = [decode_with_drafts(name, seed, 5) for seed in range(2, 12)]
    while sum(each.calls for each in decoded) * len(SETUPS) < fuzz_steps:
        decoded.append(decode_with_drafts(name, len(decoded) + 2, 5))
    drafts, calls = map(sum, zip(*decoded))
    record_property("drafts", {"conversations": len(decoded), "passes": drafts, "calls": calls})
    assert drafts


ONE_EXAMPLE = settings(max_examples=1, stateful_step_count=1, derandomize=True)


def test_a_check_of_components_decodes_with_drafts_whatever_its_examples_draw() -> None:
    found = drive(SETUPS["full+swa+mamba"], settings=ONE_EXAMPLE)
    assert found.violation is None
    assert found.counts["drafts"] > 0


@pytest.mark.one_in(3)
@pytest.mark.plain_build
@pytest.mark.parametrize("ending", ["an_abort", "a_restart", "an_end"])
def test_slots_of_rejected_drafts_that_are_lost_where_a_request_ends_are_found(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G2: four conversations are as many as `kvgraft check` makes."""
    chosen = settings(ONE_EXAMPLE, max_examples=4 * EXAMPLES_A_TALK, stateful_step_count=1)
    mutant = next(name for name in CORES if name.endswith(f"drafts_are_lost_at_{ending}"))
    CORES[mutant].put_in(monkeypatch)
    found = drive(SETUPS["full"], settings=chosen)
    assert found.violation is not None
    assert found.violation.rule in CORES[mutant].rules
    assert any("Form(width=" in line for line in found.steps)


def test_a_part_of_a_leaf_that_grew_may_count_as_used_with_the_rest() -> None:
    assert decode_with_drafts("swa", 100, 4).drafts
