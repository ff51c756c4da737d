"""A model's output is the same with and without a reused prefix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvgraft import Tier
from kvgraft_transformers import ModelMemory
from kvgraft_transformers.probing import cache_argument
from kvgraft_transformers.tiny import FAMILIES

from .cases import CASES, one_of_each_kind

PROMPT = 130
"""Tokens: four chunks of 32 and two more, which are decoded one by one."""
CUTS = (32, 64, 96, 128, 129, 130)
BOUNDARY = 128

ATTENTION_LIKE = [name for name in CASES if not FAMILIES[name.partition("+")[0]].recurrent]
RECURRENT = [name for name in CASES if FAMILIES[name.partition("+")[0]].recurrent]


@pytest.fixture
def opened(tiny: Any, open_memory: Any) -> Callable[..., tuple[object, ModelMemory]]:
    def build(case: str, dtype: torch.dtype = torch.float32, **settings: object) -> Any:
        family, _, sparse = case.partition("+")
        model = tiny(family, dtype)
        return model, open_memory(model, sparse_on_host=bool(sparse), **settings)

    return build


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", CASES)
def test_a_reused_prefix_gives_the_same_bits(
    case: Any, opened: Any, run: Any, tokens: Callable[..., list[int]], poison: Any, to_host: Any
) -> None:
    model, memory = opened(case, probe_tokens=256)
    prompt = tokens(PROMPT)

    def check() -> None:
        memory.cache.check_integrity()
        poison(memory)

    poison(memory)
    expected = run(model, prompt, cuts=CUTS)
    with memory.session(prompt, chunk_tokens=32) as session:
        assert session.cached_tokens == 0
        assert torch.equal(run(model, prompt, session, cuts=CUTS, after=check), expected)
    for _ in range(2):  # from the device, and again after having been used
        poison(memory)
        with memory.session(prompt, chunk_tokens=32) as session:
            assert session.cached_tokens == BOUNDARY
            again = run(model, prompt, session, cuts=CUTS, after=check)
            assert torch.equal(again, expected[BOUNDARY:])
    to_host(memory)
    poison(memory)
    with memory.session(prompt, chunk_tokens=32) as session:
        assert session.cached_tokens == BOUNDARY
        assert session.request.device_tokens < BOUNDARY, "nothing came from the host"
        again = run(model, prompt, session, cuts=CUTS, after=check)
        assert torch.equal(again, expected[BOUNDARY:])


@pytest.mark.one_in(9)
@pytest.mark.parametrize("case", one_of_each_kind())
def test_a_partly_shared_prefix_gives_the_same_bits(
    case: Any, opened: Any, run: Any, tokens: Callable[..., list[int]], poison: Any, to_host: Any
) -> None:
    model, memory = opened(case)
    shared = tokens(64)
    first, second, third = (shared + tokens(40, seed) for seed in (2, 3, 4))
    with memory.session(first, chunk_tokens=32) as session:
        run(model, first, session)
    for prompt, leave in ((second, False), (third, True)):
        if leave:
            to_host(memory)
        poison(memory)
        with memory.session(prompt, chunk_tokens=32) as session:
            assert session.cached_tokens == len(shared)
            reused = run(model, prompt, session, after=lambda: poison(memory))
        assert torch.equal(reused, run(model, prompt)[len(shared) :])


def distance_behind_a_reused_prefix(model: Any, memory: Any, run: Any, prompt: Any) -> float:
    """Between logits behind 96 reused tokens and those of one pass over everything."""
    with memory.session(prompt[:100], chunk_tokens=32) as session:
        run(model, prompt[:100], session)
    with memory.session(prompt) as session:
        assert session.cached_tokens == 96
        reused = run(model, prompt, session, cuts=(PROMPT,))
    with torch.no_grad():
        everything = model(input_ids=torch.tensor(prompt)[None], use_cache=False).logits[0]
    return float((reused - everything[96:]).abs().max())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", one_of_each_kind(ATTENTION_LIKE))
def test_in_double_precision_nothing_differs_from_computing_it_all_at_once(
    case: Any, opened: Any, run: Any, tokens: Callable[..., list[int]]
) -> None:
    model, memory = opened(case, torch.float64)
    assert distance_behind_a_reused_prefix(model, memory, run, tokens(PROMPT)) == 0.0


@pytest.mark.parametrize("case", one_of_each_kind(RECURRENT))
def test_a_recurrence_differs_from_computing_it_all_at_once_by_rounding(
    case: Any, opened: Any, run: Any, tokens: Callable[..., list[int]]
) -> None:
    model, memory = opened(case)
    assert distance_behind_a_reused_prefix(model, memory, run, tokens(PROMPT)) <= 1e-5


@pytest.mark.one_in(9)
@pytest.mark.parametrize("case", one_of_each_kind())
def test_one_wrong_page_or_state_shows_in_every_layer(
    case: Any, opened: Any, run: Any, tokens: Callable[..., list[int]]
) -> None:
    """The negative control: without it, the oracles above could be blind."""
    model, memory = opened(case)
    prompt = tokens(PROMPT)
    expected = run(model, prompt, cuts=CUTS)[BOUNDARY:]
    with memory.session(prompt, chunk_tokens=32) as session:
        run(model, prompt, session, cuts=CUTS)
    spots = 0
    for each in memory.cache.mounted:
        tiers = [(Tier.DEVICE, each.component.device)]
        if each.plugin.declaration.home is Tier.HOST:
            tiers.append((Tier.HOST, each.component.host))
        for tier, pool in tiers:
            for spec in pool.specs:
                if tier is Tier.HOST and spec.name == "index":
                    continue  # read on the device
                session = memory.session(prompt, chunk_tokens=32)
                slot = _last_slot(memory, session, each.name, tier)
                plane = pool.plane(spec.layer, spec.name)
                before = plane[slot].clone()
                assert memory.cache.drain(), "a backup under way would read the wrong bytes"
                plane[slot] += 1.0
                wrong = run(model, prompt, session, cuts=CUTS)
                session.abort()
                assert memory.cache.drain()
                plane[slot] = before
                assert not torch.equal(wrong, expected), f"{each.name} {tier} {spec}"
                spots += 1
    assert spots >= len(memory.architecture.components)
    with memory.session(prompt, chunk_tokens=32) as session:
        assert torch.equal(run(model, prompt, session, cuts=CUTS), expected)


def _last_slot(memory: ModelMemory, session: Any, component: str, tier: Tier) -> int:
    """The slot a session resumes from: its last shared page, or the state at its anchor."""
    tree_component = memory.cache.tree.component(component)
    if tree_component.is_state:
        return int.from_bytes(
            session.request.receipt.anchor.cells[tree_component.index].device, "little"
        )
    table = memory.cache.table if tier is Tier.DEVICE else memory.cache.host_table
    return int(table(session.request, component)[-1])


@pytest.mark.one_in(9)
@pytest.mark.parametrize("case", one_of_each_kind())
def test_greedy_continuations_are_equal(
    case: Any, opened: Any, tokens: Callable[..., list[int]], to_host: Any
) -> None:
    model, memory = opened(case)
    prompt = tokens(100)
    ids = torch.tensor(prompt)[None]
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    argument = cache_argument(model)
    expected = model.generate(ids, **settings)[0].tolist()
    answers = []
    for turn in range(3):
        if turn == 2:
            to_host(memory)
        with memory.session(ids, max_new_tokens=12) as session:
            answers.append(model.generate(ids, **{argument: session.cache}, **settings)[0].tolist())
    assert answers == [expected] * 3


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", RECURRENT)
def test_a_new_state_is_not_read(
    case: Any, opened: Any, run: Any, tokens: Callable[..., list[int]]
) -> None:
    """The guard fills it with NaN; prompts are as short as convolutions' own windows."""
    model, memory = opened(case, guard="on")
    for n_tokens in (1, 2, 5):
        prompt = tokens(n_tokens, n_tokens)
        expected = run(model, prompt)
        with memory.session(prompt) as session:
            assert session.request.fresh
            assert torch.equal(run(model, prompt, session), expected)
