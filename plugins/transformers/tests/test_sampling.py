"""How a token is chosen, against transformers' own processors and plain arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import RepetitionPenaltyLogitsProcessor

from kvgraft_transformers.engine import Choice, Sampler, Sampling
from kvgraft_transformers.engine.sampling import choose

from .reads import Reads

LOGITS = torch.tensor([2.0, 1.9, -1.0, 0.5, -3.0])


def picks(sampling: Sampling, n: int = 1, prompt: Any = (), constraint: Any = None) -> list[int]:
    """The tokens that the same logits give, one after another."""
    sampler = Sampler(sampling, prompt=prompt, constraint=constraint)
    return [sampler.pick(LOGITS).token for _ in range(n)]


def test_a_presence_penalty_counts_a_produced_token_once() -> None:
    assert picks(Sampling(presence_penalty=0.2), 4) == [0, 1, 0, 0]
    assert picks(Sampling(presence_penalty=-2.0), 3) == [0, 0, 0]


def test_a_frequency_penalty_counts_a_produced_token_every_time() -> None:
    assert picks(Sampling(frequency_penalty=0.2), 4) == [0, 1, 0, 1]


def test_penalties_of_produced_tokens_leave_the_prompt_alone() -> None:
    assert picks(Sampling(presence_penalty=2.0, frequency_penalty=2.0), prompt=[0, 0]) == [0]


@pytest.mark.parametrize("strength", [0.5, 1.3])
def test_a_repetition_penalty_is_that_of_transformers_with_the_prompt(strength: float) -> None:
    theirs: Any = RepetitionPenaltyLogitsProcessor(strength)
    tokens = [2, 0]
    expected = []
    for _ in range(5):
        scores = theirs(torch.tensor([tokens]), LOGITS[None].clone())
        expected.append(int(scores.argmax()))
        tokens.append(expected[-1])
    assert picks(Sampling(repetition_penalty=strength), 5, prompt=[2, 0]) == expected


def test_min_p_keeps_tokens_by_their_share_of_the_likeliest() -> None:
    def drawn(min_p: float) -> set[int]:
        return set(picks(Sampling(temperature=50.0, seed=1, min_p=min_p), 200))

    assert drawn(0.0) == {0, 1, 2, 3, 4}
    # shares at this temperature: 1, 0.998, 0.942, 0.970, 0.905
    assert drawn(0.96) == {0, 1, 3}
    assert drawn(1.0) == {0}


def test_log_probabilities_are_those_of_the_models_own_logits() -> None:
    sampler = Sampler(Sampling(presence_penalty=2.0, logprobs=2))
    expected = torch.log_softmax(LOGITS, dim=-1)
    for token in (0, 1, 3):
        choice = sampler.pick(LOGITS)
        assert choice.token == token
        assert choice.logprob == pytest.approx(float(expected[token]))
        assert choice.top == ((0, float(expected[0])), (1, float(expected[1])))


class Only:
    """Lets one token come, and ends behind it."""

    def __init__(self, *mask: bool) -> None:
        self.mask = torch.tensor(mask)
        self.ended = False

    def allowed(self) -> torch.Tensor:
        return self.mask

    def accept(self, token: int) -> None:
        self.ended = True


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_a_constraint_rules_tokens_out_those_it_does_not_know_too(temperature: float) -> None:
    only = Only(False, False, True)
    sampler = Sampler(Sampling(temperature=temperature), constraint=only)
    assert not sampler.ended
    assert sampler.pick(LOGITS).token == 2
    assert sampler.ended


def test_a_constraint_that_allows_nothing_fails_the_request() -> None:
    with pytest.raises(ValueError, match="allows no token of the model"):
        Sampler(Sampling(), constraint=Only(False)).pick(LOGITS)


MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"logprobs": 0},
    {"temperature": 1.3, "top_k": 3, "top_p": 0.9, "seed": 4, "logprobs": 3},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"temperature": 0.7, "min_p": 0.2, "frequency_penalty": 0.3, "seed": 5},
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_chosen_together_get_the_tokens_that_each_gets_alone(dtype: torch.dtype) -> None:
    settings = [Sampling(**each) for each in MIXED]
    together = [Sampler(each, prompt=[1, 2]) for each in settings]
    alone = [Sampler(each, prompt=[1, 2]) for each in settings]
    torch.manual_seed(0)
    for _ in range(8):
        logits = torch.randn(len(settings), 300).to(dtype)  # in bfloat16 with equal ones
        logits[0, ::7] = logits[0].max()
        expected = [sampler.pick(row) for sampler, row in zip(alone, logits)]
        assert choose(together, logits) == expected
        assert expected[0].token == logits[0].argmax()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_of_logits_that_are_no_numbers_is_refused_alone(
    temperature: float, value: float
) -> None:
    samplers = [Sampler(Sampling(temperature=temperature, seed=1)) for _ in range(3)]
    logits = LOGITS.repeat(3, 1)
    logits[1, 3] = value
    first, second, third = choose(samplers, logits)
    assert isinstance(first, Choice)
    assert first == third
    if temperature == 0.0 and value == torch.inf:
        assert second == Choice(3)
    else:
        assert isinstance(second, ValueError)


def test_a_generator_moves_once_for_each_token_drawn() -> None:
    generator = torch.Generator().manual_seed(11)
    weights = torch.softmax(LOGITS, dim=-1)
    expected = [int(torch.multinomial(weights, 1, generator=generator)) for _ in range(6)]
    assert picks(Sampling(temperature=1.0, seed=11), 6) == expected


def test_no_value_of_a_row_is_read_by_itself() -> None:
    samplers = [Sampler(Sampling(**each), prompt=[1, 2]) for each in MIXED * 3]
    choose(samplers, torch.randn(len(samplers), 300))  # draws its tables once
    with Reads() as reads:  # type: ignore[no-untyped-call]
        choose(samplers, torch.randn(len(samplers), 300))
    assert reads.n == 0


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_seed_that_torch_cannot_take_is_refused_when_it_is_given(seed: int) -> None:
    with pytest.raises(ValidationError, match="seed"):
        Sampling(temperature=1.0, seed=seed)
    for last in (2**64 - 1, -(2**63)):
        Sampler(Sampling(temperature=1.0, seed=last))
