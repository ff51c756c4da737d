"""Conversations that decode in passes with drafts: random calls seldom decode for long.

Any number of drafts is accepted, none several times in a row, across pages, windows and kept
states. Requests end, restart and are aborted with slots of rejected drafts.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping

from kvgraft.errors import ContractViolation
from kvgraft_testing.machine.examples import Failure
from kvgraft_testing.machine.fitting import quiet_log
from kvgraft_testing.machine.harness import Harness
from kvgraft_testing.machine.judging import Judge, Stopped
from kvgraft_testing.machine.live import Live
from kvgraft_testing.machine.setups import Setup
from kvgraft_testing.machine.sizes import Sizes

__all__ = ["converse", "search_drafts", "sizes_for"]

MOST_DRAFTS = 3
ROUNDS = 3
"""Rounds of one search."""


def sizes_for(fitting: Mapping[int, int], draw: random.Random) -> Sizes:
    """Pools in which some requests decode; a page has several drafts where that is possible."""
    page_size = draw.choice([size for size in fitting if size in (2, 4)] or [*fitting])
    device, host = 60 * fitting[page_size], 20 * fitting[page_size]
    decode_tokens = draw.choice((0, 5, 12))
    return Sizes(
        page_size, device=device, host=host, decode_tokens=decode_tokens, max_drafts=MOST_DRAFTS
    )


def converse(harness: Harness, draw: random.Random, n_rounds: int) -> None:
    """Two conversations go on at a time, decode with drafts, and end in every way."""
    talks: list[tuple[int, ...]] = [tuple(range(1, 8)), tuple(range(30, 39))]
    for _ in range(n_rounds):
        lives = [live for talk in draw.sample(talks, 2) if (live := _begun(harness, draw, talk))]
        for _ in range(draw.randrange(2, 9)):
            tokens = [draw.choice((1, 2)) for _ in range(draw.randrange(1, 4))]
            width = draw.randrange(2, 2 + MOST_DRAFTS)
            harness.step_together(tokens, width, draw.randrange(width))
            alone = draw.choice(lives) if lives else None
            if alone is not None and draw.random() < 0.2 and alone.computed < alone.prompt + 1:
                harness.checkpoint(alone)
            elif alone is not None and draw.random() < 0.25:
                lives.remove(alone)
                _end(harness, draw, alone)
        for live in lives:
            for _ in range(draw.choice((0, 9, 18))):  # beyond its reservation
                if not harness.decode(live, draw.choice((1, 2))):
                    break
            talks[draw.randrange(2)] = live.tuple[:24]
            if draw.random() < 0.2:
                harness.begin_again(live)
            else:
                _end(harness, draw, live)
        harness.quiesce(None, finish=True)


def _begun(harness: Harness, draw: random.Random, talk: tuple[int, ...]) -> Live | None:
    """A request at the end of its prompt; None if it is not admitted."""
    live = harness.begin(None, (*talk, *harness.unseen(2)), draw.randrange(6, 22), 4)
    live.steps = draw.random() < 0.5
    if not harness.admit(live).admitted:
        harness.abort(live)
        return None
    harness.load_back(live)
    harness.rooms.step_all()
    if not live.admitted or not live.loaded:
        return None
    harness.prefill_all(live)
    return live


def _end(harness: Harness, draw: random.Random, live: Live) -> None:
    """A request leaves its data, or loses it: before it is over, or to begin anew."""
    end = draw.random()
    if end < 0.5:
        harness.finish(live)
        return
    if end < 0.7:
        harness.restart(live)
    harness.abort(live)


def search_drafts(
    setup: Setup, fitting: Mapping[int, int], seeds: Iterable[object], ignored: frozenset[str]
) -> tuple[Failure | None, Counter[str]]:
    """The first conversation that breaks a rule, and what was counted."""
    counts = Counter[str]()
    for seed in seeds:
        draw = random.Random(f"{setup.name} {seed}")
        with quiet_log():
            harness = Harness(setup, sizes_for(fitting, draw), Judge(ignored))
            try:
                converse(harness, draw, ROUNDS)
                harness.close()
            except Stopped:
                pass
            except ContractViolation as violation:
                return Failure(violation, harness.bench.trace.lines(), []), counts
            finally:
                counts += harness.bench.counts
    return None, counts
