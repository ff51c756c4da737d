"""Drafts: answers and hits are those without them, whichever are accepted (G2 to G4, G6)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from kvgraft import ConfigError, TokenKey
from kvgraft_transformers.engine import (
    Drafter,
    DraftModel,
    Engine,
    EngineSettings,
    FinishReason,
    GenerationRequest,
    PromptLookup,
    Sampling,
)
from kvgraft_transformers.memory import ModelMemory

from .cases import CASES
from .serving_inside import serve_inside

POOLS: dict[str, Any] = {
    "page_size": 16,
    "device_tokens": 768,
    "host_tokens": 1024,
    "guard": "on",
    "load": None,
    "probe_tokens": 0,
    "decode_interval_tokens": 32,
}
DRAFTED_TOKENS = 64
"""Tokens between two states of a decode with drafts, where there are windows as well."""

Tokens = Callable[..., list[int]]


class Known:
    """Drafts from answers that are known; each token is right at random.

    Args:
        sequences: prompts with their answers.
        chance: of a right token.
        seed: of the draws.
        fewest: drafts at a time, at least, of those that are allowed.
    """

    def __init__(
        self, sequences: Sequence[Sequence[int]], chance: float, seed: int, fewest: int = 0
    ) -> None:
        self.sequences = [list(each) for each in sequences]
        self.chance = chance
        self.draw = random.Random(seed)
        self.fewest = fewest

    def propose(self, key: TokenKey, most: int) -> Sequence[int]:
        """Some of the tokens that follow."""
        said = key.tokens().tolist()
        for each in self.sequences:
            if each[: len(said)] == said:
                n_drafts = self.draw.randint(min(self.fewest, most), most)
                right = each[len(said) : len(said) + n_drafts]
                return [t if self.draw.random() < self.chance else 3 + t % 100 for t in right]
        return []

    def close(self) -> None:
        """Nothing is held."""


class Outcome(NamedTuple):
    """Answers, and the tokens of each that the next turn found."""

    answers: list[list[int]]
    cached: list[int | None]
    engine: Engine


def settings(max_drafts: int, **more: Any) -> EngineSettings:
    limits = {"chunk_tokens": 32, "max_running": 4, "reserve_tokens": 8, "step_tokens": 96}
    return EngineSettings(**{**limits, "max_drafts": max_drafts, **more})


def ran(
    model: Any,
    requests: Sequence[GenerationRequest],
    max_drafts: int,
    drafter: Drafter | None = None,
    **more: Any,
) -> Outcome:
    """Answers of requests that run together, and hits of their next turns."""
    engine = Engine.open(model, settings(max_drafts), drafter=drafter, **{**POOLS, **more})
    answered = engine.generate(requests)
    for each in answered:
        assert each.finish in (FinishReason.LENGTH, FinishReason.STOP), each.error
    turns = [
        GenerationRequest([*each.request.tokens, *each.tokens, 7, 8, 9], 1, ignore_end=True)
        for each in answered
    ]
    cached = [engine.generate([turn])[0].cached_tokens for turn in turns]
    engine.memory.cache.drain()
    engine.memory.cache.check_integrity()
    engine.close()
    return Outcome([each.tokens for each in answered], cached, engine)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in ("gemma3_text", "qwen3_next") else pytest.mark.long)
        for case in CASES
    ],
)
def test_answers_and_hits_are_those_without_drafts(case: str, tiny: Any, tokens: Tokens) -> None:
    family, _, sparse = case.partition("+")
    model = tiny(family, torch.float64)
    options: dict[str, Any] = {"sparse_on_host": bool(sparse)}
    if sparse:
        options["components"] = {"hisparse": {"max_running": 4}}
    prompts = [tokens(48) + tokens(8 + 5 * at, seed=10 + at) for at in range(3)]
    requests = [
        GenerationRequest(each, 70 + 9 * at, ignore_end=True) for at, each in enumerate(prompts)
    ]
    plain = ran(model, requests, 0, **options)
    known = [prompt + answer for prompt, answer in zip(prompts, plain.answers)]
    components = plain.engine.memory.cache.tree.components
    has_windows = any(not each.is_state and not each.is_prefix_closed for each in components)
    has_states = any(each.is_state for each in components)
    for max_drafts, chance in ((4, 0.0), (5, 0.7), (3, 1.0)):
        drafted = ran(model, requests, max_drafts, Known(known, chance, max_drafts), **options)
        assert drafted.answers == plain.answers
        for found, cached in zip(drafted.cached, plain.cached):
            assert found is not None
            assert cached is not None
            # states beside windows are kept this far apart (G3)
            assert cached - found <= (DRAFTED_TOKENS if has_windows and has_states else 0)
        totals = drafted.engine.totals
        assert totals.draft_tokens > 20
        assert (totals.accepted_tokens == 0) == (chance == 0.0)
        assert (totals.accepted_tokens == totals.draft_tokens) == (chance == 1.0)
        assert totals.generated_tokens == plain.engine.totals.generated_tokens
    assert totals.passes < plain.engine.totals.passes


class Until:
    """Allows any token, and so many."""

    def __init__(self, n_tokens: int) -> None:
        self.left = n_tokens

    def allowed(self) -> torch.Tensor:
        return torch.ones(512, dtype=torch.bool)

    def accept(self, token: int) -> None:
        self.left -= 1

    @property
    def ended(self) -> bool:
        return not self.left


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_an_answer_that_ends_with_a_page_leaves_that_page_whatever_its_last_pass_rejected(
    family: str, tiny: Any, tokens: Tokens
) -> None:
    """A state behind rejected drafts is computed again where the next turn can resume from it."""
    model, prompt = tiny(family, torch.float64), tokens(40)
    (longest,) = ran(model, [GenerationRequest(prompt, 50, ignore_end=True)], 0).answers
    for n in (9, 25, 40, 41):  # all but the last token are computed: 48, 64, 79 and 80

        def request(n: int = n) -> GenerationRequest:
            return GenerationRequest(prompt, 60, constraint=Until(n), ignore_end=True)

        plain = ran(model, [request()], 0, host_tokens=0)
        assert plain.cached == [(39 + n) // 16 * 16]
        for seed in range(4):
            drafter = Known([prompt + longest], 1.0, seed)
            assert ran(model, [request()], 4, drafter, host_tokens=0)[:2] == plain[:2]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_wrong_drafts_cost_a_request_alone_no_pass(family: str, tiny: Any, tokens: Tokens) -> None:
    """Tokens that were verified before a rejected one are computed beside the next one (G4)."""
    model, prompt = tiny(family, torch.float64), tokens(40)
    requests = [GenerationRequest(prompt, 30, ignore_end=True)]
    plain = ran(model, requests, 0)
    drafted = ran(model, requests, 4, Known([prompt + plain.answers[0]], 0.0, 1))
    assert drafted.answers == plain.answers
    assert drafted.engine.totals.passes == plain.engine.totals.passes
    n_drafts = drafted.engine.totals.draft_tokens
    assert drafted.engine.totals.accepted_tokens == 0
    assert 10 < n_drafts < 30, "it goes without after several passes that rejected all"
    n_more = drafted.engine.totals.computed_tokens - plain.engine.totals.computed_tokens
    assert n_more <= 4 * n_drafts


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_requests_that_accepted_unlike_numbers_of_drafts_share_passes(
    family: str, tiny: Any, tokens: Tokens
) -> None:
    model = tiny(family, torch.float64)
    prompts = [tokens(40, seed=at) for at in range(3)]
    requests = [GenerationRequest(each, 40, ignore_end=True) for each in prompts]
    plain = ran(model, requests, 0)
    known = [prompt + answer for prompt, answer in zip(prompts, plain.answers)]
    drafted = ran(model, requests, 4, Known(known, 0.7, 1, fewest=4))
    assert drafted.answers == plain.answers
    assert drafted.engine.totals.passes < 0.7 * plain.engine.totals.passes


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_a_stop_token_among_accepted_drafts_ends_the_answer(
    family: str, tiny: Any, tokens: Tokens
) -> None:
    model, prompt = tiny(family, torch.float64), tokens(40)
    (answer,) = ran(model, [GenerationRequest(prompt, 40, ignore_end=True)], 0).answers
    stop = answer[29]
    requests = [GenerationRequest(prompt, 40, stop_tokens=frozenset([stop]), ignore_end=True)]
    plain = ran(model, requests, 0)
    drafted = ran(model, requests, 8, Known([prompt + answer], 1.0, 1))
    assert drafted[:2] == plain[:2]
    assert drafted.answers == [answer[: answer.index(stop) + 1]]


def test_sampled_answers_with_a_seed_are_those_without_drafts(tiny: Any, tokens: Tokens) -> None:
    model, prompt = tiny("llama", torch.float64), tokens(40)
    for sampling in (
        Sampling(temperature=0.7, seed=5, logprobs=2),
        Sampling(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5),
    ):
        requests = [GenerationRequest(prompt, 30, sampling=sampling, ignore_end=True)]
        plain = ran(model, requests, 0)
        drafter = Known([prompt + plain.answers[0]], 0.8, 3)
        drafted = ran(model, requests, 4, drafter)
        assert drafted.answers == plain.answers
        assert drafted.engine.totals.accepted_tokens > 5


def test_tokens_of_one_pass_come_out_in_order_each_with_its_logprob(
    tiny: Any, tokens: Tokens
) -> None:
    model, prompt = tiny("llama", torch.float64), tokens(40)
    request = GenerationRequest(prompt, 12, sampling=Sampling(logprobs=1), ignore_end=True)
    (answer,) = ran(model, [request], 0).answers
    said = []
    for drafter in (None, Known([prompt + answer], 1.0, 1)):
        engine = Engine.open(model, settings(4), drafter=drafter, **POOLS)
        generation = engine.submit(request)
        new = list(engine.run())
        assert [each.token for each in new] == generation.tokens == answer
        assert [each.finish for each in new] == [None] * 11 + [FinishReason.LENGTH]
        said.append([each.choice.logprob for each in new if each.choice is not None])
        engine.close()
    assert said[0] == pytest.approx(said[1])


def test_prompt_lookup_proposes_the_tokens_behind_the_same_last_tokens() -> None:
    lookup = PromptLookup(4)
    assert lookup.propose(TokenKey([5, 6, 7, 8, 9, 1, 5, 6, 7]), 4) == [8, 9, 1, 5]
    assert lookup.propose(TokenKey([5, 6, 7, 8, 9, 1, 5, 6, 7]), 2) == [8, 9]
    assert lookup.propose(TokenKey([1, 7, 8, 9, 7]), 4) == [8, 9, 7]
    assert lookup.propose(TokenKey([6, 7, 1, 5, 6, 7, 8, 9, 5, 6, 7]), 4) == [8, 9, 5, 6]  # all 3
    assert lookup.propose(TokenKey([1, 2, 3]), 4) == []
    assert lookup.propose(TokenKey([1]), 4) == []


class Cycle:
    """Allows nothing but five tokens in turn."""

    def __init__(self) -> None:
        self.n = 0

    def allowed(self) -> torch.Tensor:
        return torch.arange(512) == 50 + self.n % 5

    def accept(self, token: int) -> None:
        assert token == 50 + self.n % 5
        self.n += 1

    @property
    def ended(self) -> bool:
        return self.n == 43


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next"])
def test_prompt_lookup_finds_an_answer_that_repeats_itself(
    family: str, tiny: Any, tokens: Tokens
) -> None:
    """Each token is chosen as the answer's constraint says it, drafts as well."""
    found = []
    for max_drafts in (0, 4):
        request = GenerationRequest(tokens(40), 60, constraint=Cycle(), ignore_end=True)
        found.append(ran(tiny(family, torch.float64), [request], max_drafts))
    plain, drafted = found
    assert drafted[:2] == plain[:2]
    assert drafted.answers[0] == [50 + at % 5 for at in range(43)]
    assert drafted.engine.totals.accepted_tokens > 20
    assert drafted.engine.totals.passes < plain.engine.totals.passes / 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", ["llama", "bamba", "gemma3_text"])
def test_where_slots_are_short_requests_do_without_drafts_and_make_room(
    family: str, tiny: Any, tokens: Tokens
) -> None:
    model = tiny(family, torch.float64)
    prompts = [tokens(20, seed=at) for at in range(5)]
    requests = [GenerationRequest(each, 60, ignore_end=True) for each in prompts]
    plain = ran(model, requests, 0)
    known = [prompt + answer for prompt, answer in zip(prompts, plain.answers)]
    tight = {"device_tokens": 208, "components": {"mamba": {"states": 16}}}
    if family != "bamba":
        del tight["components"]
    drafted = ran(model, requests, 6, Known(known, 0.7, 1), **tight)
    assert drafted.answers == plain.answers
    assert drafted.engine.totals.retractions > 0


def test_logits_of_a_draft_that_are_no_numbers_fail_its_request_alone(
    tiny: Any, tokens: Tokens
) -> None:
    model = tiny("llama", torch.float64)
    prompts = [tokens(20), tokens(20, seed=2)]
    requests = [GenerationRequest(each, 20, ignore_end=True) for each in prompts]
    answers = ran(model, requests, 0).answers
    drafter = Known([prompt + answer for prompt, answer in zip(prompts, answers)], 1.0, 1)
    engine = Engine.open(model, settings(4), drafter=drafter, **POOLS)
    good, bad = (engine.submit(each) for each in requests)

    def spoil(module: object, arguments: object, output: torch.Tensor) -> torch.Tensor:
        if len(output) > 1 and output.shape[1] > 2:
            output[1, 2] = torch.nan
        return output

    broken = model.lm_head.register_forward_hook(spoil)
    new = list(engine.run())
    broken.remove()
    assert bad.finish is FinishReason.FAILED
    assert "logits are NaN" in str(bad.error)
    assert bad.tokens == answers[1][: len(bad.tokens)] != []
    assert [each.token for each in new if each.generation is bad] == [*bad.tokens, None]
    assert good.tokens == answers[0]
    engine.memory.cache.check_integrity()
    engine.close()


def test_a_memory_that_cannot_take_drafts_is_refused(tiny: Any) -> None:
    few: dict[str, Any] = {"page_size": 16, "device_tokens": 256, "probe_tokens": 0, "load": None}
    memory = ModelMemory.open(tiny("llama"), max_drafts=2, **few)
    with pytest.raises(ConfigError, match="max_drafts=4, the memory's cache has max_drafts=2; op"):
        Engine(memory, settings(4))
    memory.close()


def test_the_server_counts_drafts_and_answers_as_without(tiny: Any, tokens: Tokens) -> None:
    model = tiny("gemma3_text", torch.float64)
    body: dict[str, Any] = {"prompt": tokens(48), "max_tokens": 40, "ignore_eos": True}
    said, samples = [], {}
    for max_drafts in (0, 4):
        limits = settings(max_drafts)
        with serve_inside(model, limits=limits, **{**POOLS, "device_tokens": 4096}) as inside:
            said += [inside.complete(**body), inside.complete(**body)]
            lines = inside.get("/metrics").text.splitlines()
        samples = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    assert said[2:] == said[:2]
    drafted, accepted = (
        float(samples[f"kvgraft_{name}_tokens_total"]) for name in ("draft", "accepted")
    )
    assert drafted >= accepted > 0


# -- a draft model


FAMILIES = ("llama", "gemma3_text", "qwen3_next")


def requests_of(tokens: Tokens, n: int = 3) -> list[GenerationRequest]:
    prompts = [tokens(48) + tokens(8 + 5 * at, seed=10 + at) for at in range(n)]
    return [
        GenerationRequest(each, 40 + 9 * at, ignore_end=True) for at, each in enumerate(prompts)
    ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_model_that_is_the_model_itself_is_always_right(
    family: str, tiny: Any, tokens: Tokens
) -> None:
    model, requests = tiny(family, torch.float64), requests_of(tokens)
    plain = ran(model, requests, 0)
    drafter = DraftModel.open(tiny(family, torch.float64), chunk_tokens=32, **POOLS)
    cache = drafter.memory.cache
    drafted = ran(model, requests, 4, drafter)
    assert drafted.answers == plain.answers
    totals = drafted.engine.totals
    assert totals.draft_tokens > 60
    assert totals.accepted_tokens == totals.draft_tokens
    assert totals.passes < plain.engine.totals.passes / 2
    # each call resumes from the calls before it: from the last page, or the last kept state
    stats = cache.stats()
    again = 32 if "next" in family else POOLS["page_size"]
    assert 20 < stats.requests.admitted < totals.draft_tokens
    assert stats.tokens.computed < stats.requests.admitted * (again + 4) + 3 * 96
    assert not cache.requests
    cache.check_integrity()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_and_hits_are_those_without_a_draft_model_that_is_often_wrong(
    family: str, tiny: Any, tokens: Tokens
) -> None:
    model, requests = tiny("llama", torch.float64), requests_of(tokens)
    plain = ran(model, requests, 0)
    drafted = ran(model, requests, 4, DraftModel.open(tiny(family), chunk_tokens=32, **POOLS))
    assert drafted[:2] == plain[:2]
    assert drafted.engine.totals.draft_tokens > 20


class Asked:
    """Notes the drafts that another proposes."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.proposed: list[int] = []

    def propose(self, key: TokenKey, most: int) -> Sequence[int]:
        drafts = self.drafter.propose(key, most)
        self.proposed.append(len(drafts))
        return drafts

    def close(self) -> None:
        self.drafter.close()


@pytest.mark.long
def test_requests_go_without_drafts_where_the_draft_models_pools_are_too_small(
    tiny: Any, tokens: Tokens
) -> None:
    model, requests = tiny("llama", torch.float64), requests_of(tokens)
    plain = ran(model, requests, 0)
    asked = Asked(DraftModel.open(model, chunk_tokens=32, **{**POOLS, "device_tokens": 96}))
    drafted = ran(model, requests, 4, asked)
    assert drafted.answers == plain.answers
    assert {0, 4} <= set(asked.proposed)


def test_a_draft_model_with_a_smaller_vocabulary_proposes_nothing_behind_a_token_outside(
    tiny: Any,
) -> None:
    drafter = DraftModel.open(tiny("llama"), chunk_tokens=32, **POOLS)
    assert len(drafter.propose(TokenKey(range(1, 20)), 4)) == 4
    assert not drafter.propose(TokenKey([*range(1, 20), 100_000]), 4)
    drafter.close()


def test_a_failed_pass_of_a_draft_model_is_logged_and_requests_go_on(
    tiny: Any, tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    model, requests = tiny("llama", torch.float64), requests_of(tokens, 1)
    plain = ran(model, requests, 0)
    failing = tiny("llama")
    drafter = DraftModel.open(failing, chunk_tokens=32, **POOLS)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    broken = failing.lm_head.register_forward_hook(fail)
    drafted = ran(model, requests, 4, drafter)
    broken.remove()
    assert drafted[:2] == plain[:2]
    assert drafted.engine.totals.draft_tokens == 0
    assert "the draft model proposes nothing: out of memory" in caplog.text
    assert not drafter.memory.cache.requests


class Beyond:
    """Drafts of which the third is no token of the model."""

    def propose(self, key: TokenKey, most: int) -> Sequence[int]:
        """Two tokens, one that a larger vocabulary has, and more."""
        return [5, 6, 512, 7][:most]

    def close(self) -> None:
        """Nothing is held."""


def test_a_draft_outside_the_models_vocabulary_is_left_out_with_those_behind_it(
    tiny: Any, tokens: Tokens
) -> None:
    model, requests = tiny("llama", torch.float64), requests_of(tokens, 1)
    plain = ran(model, requests, 0)
    drafted = ran(model, requests, 4, Beyond())
    assert drafted[:2] == plain[:2]
    assert drafted.engine.totals.draft_tokens > 0
