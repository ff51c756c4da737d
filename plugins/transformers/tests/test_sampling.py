"""How a token is chosen, against transformers' own processors and plain arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from kvgraft_transformers.engine import Sampler, Sampling

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
