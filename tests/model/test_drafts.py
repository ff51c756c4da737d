"""Passes with drafts of every component set, against the brute-force model (G1 to G4, G6).

Random calls of the state machine seldom decode for long. Here requests do: any number of drafts is
accepted, none twice in a row, across pages, windows and kept states; requests are aborted and
finished between a pass and its verification.
"""

from __future__ import annotations

import random

import pytest

from kvgraft_testing.machine import Sizes
from kvgraft_testing.machine.harness import Harness
from kvgraft_testing.machine.live import Live

from .setups import SETUPS


def decode_with_drafts(name: str, seed: int, n_rounds: int) -> int:
    """Conversations that decode with drafts; how many passes had some."""
    draw = random.Random(f"{name} {seed}")
    page_size = (2, 4)[seed % 2]
    decode_tokens = draw.choice((0, 5, 12))
    sizes = Sizes(page_size, device=60, host=20, decode_tokens=decode_tokens, max_drafts=3)
    harness = Harness(SETUPS[name], sizes)
    talks: list[tuple[int, ...]] = [tuple(range(1, 8)), tuple(range(30, 39))]
    for _ in range(n_rounds):
        lives: list[Live] = []
        for talk in draw.sample(talks, 2):
            live = harness.begin(None, (*talk, *harness.unseen(2)), draw.randrange(6, 22), 4)
            live.steps = draw.random() < 0.5
            if not harness.admit(live).admitted:
                harness.abort(live)
                continue
            harness.load_back(live)
            harness.rooms.step_all()
            if live.admitted and live.loaded:
                harness.prefill_all(live)
                lives.append(live)
        for _ in range(draw.randrange(2, 9)):
            tokens = [draw.choice((1, 2)) for _ in range(draw.randrange(1, 4))]
            width = draw.randrange(2, 5)
            harness.step_together(tokens, width, draw.randrange(width))
            alone = draw.choice(lives) if lives else None
            if alone is not None and draw.random() < 0.2 and alone.computed < alone.prompt + 1:
                harness.checkpoint(alone)
        for live in lives:
            for _ in range(draw.choice((0, 9, 18))):  # beyond its reservation
                if not harness.decode(live, draw.choice((1, 2))):
                    break
            talks[draw.randrange(2)] = live.tuple[:24]
            if draw.random() < 0.2:
                harness.abort(live)
            elif draw.random() < 0.2:
                harness.begin_again(live)
            else:
                harness.finish(live)
        harness.quiesce(None, finish=True)
    harness.close()
    return harness.bench.counts["drafts"]


@pytest.mark.parametrize("name", ["full+swa+mamba", "broad+local+lean", "mamba+chunked"])
def test_passes_with_drafts_agree_with_the_model(name: str) -> None:
    assert sum(decode_with_drafts(name, seed, 3) for seed in range(2)) > 0


@pytest.mark.long
@pytest.mark.parametrize("name", SETUPS)
def test_passes_with_drafts_of_every_component_set_agree_with_the_model(name: str) -> None:
    assert sum(decode_with_drafts(name, seed, 5) for seed in range(2, 12)) > 0


def test_a_part_of_a_leaf_that_grew_may_count_as_used_with_the_rest() -> None:
    assert decode_with_drafts("swa", 100, 4)
