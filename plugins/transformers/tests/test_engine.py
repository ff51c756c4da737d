"""Many requests over one model: right answers under any pressure of memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from kvgraft import ConfigError, Outcome
from kvgraft_testing.stepped import SteppedTransferEngine
from kvgraft_transformers.engine import (
    Engine,
    EngineSettings,
    FinishReason,
    GenerationRequest,
    NewToken,
    Sampling,
)
from kvgraft_transformers.probing import cache_argument
from kvgraft_transformers.tiny import build_tiny_model

from .cases import one_of_each_kind
from .greedy import best_tokens

SMALL = EngineSettings(chunk_tokens=32, max_running=4, reserve_tokens=8, step_tokens=96)
POOLS: dict[str, Any] = {
    "page_size": 16,
    "device_tokens": 512,
    "host_tokens": 1024,
    "guard": "on",
    "load": None,
    "probe_tokens": 0,
}

Opener = Callable[..., Engine]


@pytest.fixture
def open_engine() -> Iterator[Opener]:
    """Engines whose books are recomputed at the end, when nobody may hold anything."""
    opened: list[Engine] = []

    def build(model: PreTrainedModel, limits: EngineSettings = SMALL, **memory: Any) -> Engine:
        engine = Engine.open(model, limits, **{**POOLS, **memory})
        opened.append(engine)
        return engine

    yield build
    for engine in opened:
        for generation in list(engine.schedule.waiting) + engine.schedule.running:
            engine.abort(generation)
        for generation in list(engine.schedule.loading):
            engine.abort(generation)
        engine.memory.cache.drain()
        engine.memory.cache.check_integrity()
        assert not engine.memory.cache.requests
        for component in engine.memory.cache.tree.components:
            assert component.device.counts()["private"] == 0
        engine.close()


def greedy(model: PreTrainedModel, prompt: list[int], n: int) -> list[int]:
    """The answer of transformers itself."""
    ids = torch.tensor(prompt)[None]
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),  # or it hides tokens that look like padding
        max_new_tokens=n,
        do_sample=False,
        eos_token_id=None,
    )
    return [int(token) for token in answer[0, len(prompt) :]]


def test_prompts_that_do_not_fit_into_a_step_together_are_not_cut_into_passes_of_their_own(
    open_engine: Opener, tiny: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("llama", torch.float64)
    engine = open_engine(model)  # 96 tokens a step
    prompts = [tokens(40, seed) for seed in range(1, 5)]
    generations = engine.generate([GenerationRequest(each, 2, ignore_end=True) for each in prompts])
    for prompt, generation in zip(prompts, generations):
        assert generation.tokens == greedy(model, prompt, 2)
    # two prompts; their tokens, and two prompts; their tokens
    assert engine.totals.passes == 4


@pytest.mark.one_in(9)
@pytest.mark.parametrize("case", one_of_each_kind())
def test_answers_of_a_crowd_are_those_of_each_alone(
    case: Any, tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    family, _, sparse = case.partition("+")
    model = tiny(family, torch.float64)
    options = {"components": {"hisparse": {"max_running": 4}}} if sparse else {}
    engine = open_engine(model, device_tokens=368, sparse_on_host=bool(sparse), **options)
    shared = tokens(48)
    prompts = [shared + tokens(8 + 5 * i, seed=10 + i) for i in range(3)]
    for _ in range(2):
        generations = engine.generate(
            GenerationRequest(prompt, 20, ignore_end=True) for prompt in prompts
        )
        for prompt, generation in zip(prompts, generations):
            assert generation.finish is FinishReason.LENGTH
            assert len(generation.tokens) == 20
            assert generation.tokens == best_tokens(model, prompt, generation.tokens)
        prompts = [
            prompt + generation.tokens + tokens(9, seed=20)
            for prompt, generation in zip(prompts, generations)
        ]
    assert engine.totals.rows > engine.totals.passes, "nothing was batched"
    assert all(generation.cached_tokens for generation in generations)


def test_running_requests_make_room_for_one_another_and_still_answer_right(
    tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("gemma3_text", torch.float64)
    limits = EngineSettings(chunk_tokens=32, max_running=6, reserve_tokens=1, step_tokens=96)
    engine = open_engine(model, limits, device_tokens=256)
    prompts = [tokens(20, seed=seed) for seed in range(6)]
    generations = engine.generate(
        GenerationRequest(prompt, 90, ignore_end=True) for prompt in prompts
    )
    assert engine.totals.retractions > 0
    for prompt, generation in zip(prompts, generations):
        assert len(generation.tokens) == 90
        assert generation.tokens == best_tokens(model, prompt, generation.tokens)


def test_answers_stay_right_while_memory_moves_between_pools(
    tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    """Pages and states that running requests read move after every pass, now here, now there."""
    model = tiny("bamba", torch.float64)
    states = {"components": {"mamba": {"states": 40}}}
    engine = open_engine(model, device_tokens=1024, device_memory="4MB", host_tokens=0, **states)
    cache = engine.memory.cache
    shared = tokens(48)
    prompts = [shared + tokens(8 + 5 * i, seed=10 + i) for i in range(3)]
    for _ in range(2):
        generations = [
            engine.submit(GenerationRequest(prompt, 20, ignore_end=True)) for prompt in prompts
        ]
        for _ in range(200):
            engine.step()
            for giver, taker in (("full", "mamba"), ("mamba", "full")):
                # One that waits needs memory where it is: moving it away for ever would starve it.
                while not engine.schedule.waiting and cache.move_memory(giver, taker):
                    pass
            if all(generation.finish is not None for generation in generations):
                break
        for prompt, generation in zip(prompts, generations):
            assert len(generation.tokens) == 20
            assert generation.tokens == best_tokens(model, prompt, generation.tokens)
        prompts = [
            prompt + generation.tokens + tokens(9, seed=20)
            for prompt, generation in zip(prompts, generations)
        ]
    assert cache.arenas is not None
    assert cache.arenas.mover.moved_slots > 0


def test_requests_that_decode_change_in_steps_of_all_of_them_alone(
    tiny: Any, open_engine: Opener, tokens: Callable[..., list[int]]
) -> None:
    """Other calls would mark their rows as stale, and the next step would read them anew."""
    engine = open_engine(tiny("gemma3_text"))
    asked = [engine.submit(GenerationRequest(tokens(20 + n, n), 12)) for n in range(3)]
    while not all(each.tokens for each in asked):
        engine.step()
    for _ in range(8):  # no page ends
        engine.step()
        rows = [each.session.request.row for each in asked if each.session is not None]
        assert len(set(rows)) == 3
        assert min(rows) >= 0
        assert not engine.memory.cache.stepper.rows.stale
    for _ in engine.run():
        pass


def test_all_requests_that_fit_begin_in_one_step(
    tiny: Any, open_engine: Opener, tokens: Callable[..., list[int]]
) -> None:
    engine = open_engine(tiny("llama"), EngineSettings(max_running=8))
    asked = [engine.submit(GenerationRequest(tokens(20, seed=n), 2)) for n in range(8)]
    engine.step()
    assert [len(each.tokens) for each in asked] == [1] * 8
    for _ in engine.run():
        pass


def test_a_request_that_never_fits_is_rejected_at_once_with_the_pool_and_the_numbers(
    tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    engine = open_engine(tiny("llama"), device_tokens=128)
    (large, small) = engine.generate(
        [GenerationRequest(tokens(20), 200), GenerationRequest(tokens(20), 20)]
    )
    assert large.finish is FinishReason.REJECTED
    assert large.tokens == []
    assert large.decision is not None
    assert large.decision.outcome is Outcome.NEVER_FITS
    assert "component 'full' device pool: needs 15 slots" in str(large.decision)
    assert small.finish in (FinishReason.LENGTH, FinishReason.STOP)


def test_aborting_frees_everything_in_every_state(
    tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    engine = open_engine(
        tiny("bamba"),
        device_tokens=256,
        write_policy="write-through",
        transfers=SteppedTransferEngine(),
        components={"mamba": {"states": 12}},
    )
    shared = tokens(64)
    first = engine.submit(GenerationRequest(shared + tokens(10, 2), 4, ignore_end=True))
    while first.finish is None:
        engine.step()
        engine.memory.cache.journal.engine.run_all()
    engine.memory.cache.poll()
    for name in ("full", "mamba"):
        engine.memory.cache.evict(name, 100)
    loading = engine.submit(GenerationRequest(shared + tokens(10, 3), 4))
    engine.step()
    assert loading in engine.schedule.loading
    prefilling = engine.submit(GenerationRequest(tokens(80, 4), 4))
    engine.step()
    assert prefilling in engine.schedule.running
    waiting = engine.submit(GenerationRequest(tokens(120, 5), 4))
    assert waiting in list(engine.schedule.waiting)
    for generation in (loading, prefilling, waiting, first):
        engine.abort(generation)
    assert [each.finish for each in (loading, prefilling, waiting)] == [FinishReason.ABORTED] * 3
    assert first.finish is FinishReason.LENGTH
    assert engine.idle
    engine.memory.cache.journal.engine.run_all()


class BrokenBus(SteppedTransferEngine):
    """Copies to the host arrive; copies from it fail, or never end."""

    def __init__(self, *, ends: bool) -> None:
        super().__init__()
        self.ends = ends

    def move(self) -> None:
        while self.pending:
            if self.pending[0].copies[0].source.shape[0] == HOST_PAGES:
                if not self.ends:
                    return
                self.fail()
            else:
                self.step()


HOST_PAGES = 64
"""Slots of the host mirror in these pools, to tell directions apart."""


@pytest.mark.parametrize("ends", [True, False])
def test_a_bus_that_keeps_failing_costs_hits_or_requests_never_answers_or_progress(
    ends: Any, tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("llama", torch.float64)
    transfers = BrokenBus(ends=ends)
    copied = {"write_policy": "write-through", "transfer_timeout_s": 0.2}
    engine = open_engine(model, transfers=transfers, **copied)
    prompt = tokens(100)
    first = engine.submit(GenerationRequest(prompt, 1, ignore_end=True))
    while not first.finish:
        engine.step()
        transfers.move()
    transfers.move()
    engine.memory.cache.poll()
    engine.memory.cache.evict("full", 100)
    generation = engine.submit(GenerationRequest(prompt, 6, ignore_end=True))
    for _ in range(2000):
        engine.step()
        transfers.move()
        if generation.finish:
            break
    if ends:
        assert generation.tokens == greedy(model, prompt, 6)
        assert generation.cached_tokens == 0, "nothing was reused in the end"
    else:
        assert generation.finish is FinishReason.FAILED
        assert "load-back did not end in 0.2 s" in str(generation.error)
        transfers.run_all()


@pytest.mark.parametrize("write_policy", ["write-through", "write-back"])
def test_where_no_copy_ever_ends_each_request_is_answered_or_told_so(
    write_policy: str, tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    model, transfers = tiny("llama", torch.float64), SteppedTransferEngine()
    slow = {"write_policy": write_policy, "transfer_timeout_s": 0.05}
    engine = open_engine(model, transfers=transfers, **slow)
    prompts = [tokens(100, seed) for seed in range(12)]
    generations = engine.generate([GenerationRequest(each, 6, ignore_end=True) for each in prompts])
    answered = [each for each in generations if each.finish is FinishReason.LENGTH]
    for generation in answered:
        assert generation.tokens == greedy(model, prompts[generations.index(generation)], 6)
    refused = [each for each in generations if each not in answered]
    assert all("overdue" in str(each.error) for each in refused)
    assert len(answered) == 12 or (answered and write_policy == "write-through")
    transfers.run_all()


def test_tokens_come_out_one_by_one_and_the_last_says_why(
    tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    engine = open_engine(tiny("llama"))
    generation = engine.submit(GenerationRequest(tokens(40), 5, ignore_end=True))
    seen = [(new.token, new.finish) for new in engine.run()]
    assert [token for token, _ in seen] == generation.tokens
    assert [finish for _, finish in seen] == [None] * 4 + [FinishReason.LENGTH]


def test_a_stop_token_ends_a_generation(
    tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("llama", torch.float64)
    expected = greedy(model, tokens(40), 8)
    stop = expected[3]
    (generation,) = open_engine(model).generate(
        [GenerationRequest(tokens(40), 8, stop_tokens=frozenset([stop]), ignore_end=True)]
    )
    assert generation.finish is FinishReason.STOP
    assert generation.tokens == expected[: expected.index(stop) + 1]


def test_the_data_of_a_request_that_is_ended_early_stays_cached(
    tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    engine = open_engine(tiny("llama", torch.float64))
    prompt = tokens(40)
    first = engine.submit(GenerationRequest(prompt, 60))
    said: list[int] = []
    while len(said) < 30:
        said += [new.token for new in engine.step() if new.generation is first]
    engine.end(first)
    engine.end(first)  # has ended: nothing more
    engine.abort(first)
    assert first.finish is FinishReason.STOP
    assert (engine.totals.finished, engine.totals.aborted) == (1, 0)
    again = engine.submit(GenerationRequest(prompt + said, 1))
    list(engine.run())
    assert again.cached_tokens == 64  # whole pages of 69 computed tokens


def test_a_request_that_waits_for_anothers_pages_can_be_ended(
    tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    engine = open_engine(tiny("llama", torch.float64))
    first = engine.submit(GenerationRequest(tokens(200), 8))
    engine.step()
    second = engine.submit(GenerationRequest([*tokens(200), 3], 8))
    engine.step()
    assert second in engine.schedule.following
    engine.end(second)
    assert (second.finish, engine.totals.failed) == (FinishReason.STOP, 0)
    list(engine.run())
    assert first.finish is FinishReason.LENGTH


def test_the_models_own_end_token_ends_a_generation(
    tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    model = build_tiny_model("llama", dtype=torch.float64)
    expected = greedy(model, tokens(40), 8)
    model.generation_config.eos_token_id = expected[2]
    (generation,) = open_engine(model).generate([GenerationRequest(tokens(40), 8)])
    assert generation.finish is FinishReason.STOP
    assert len(generation.tokens) == expected.index(expected[2]) + 1


def test_sampled_answers_repeat_with_their_seed_and_differ_without(
    tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    engine = open_engine(tiny("llama"))

    def answer(**sampling: Any) -> list[int]:
        request = GenerationRequest(tokens(40), 24, sampling=Sampling(**sampling), ignore_end=True)
        said: list[int] = engine.generate([request])[0].tokens
        return said

    seeded = {"temperature": 1.5, "top_p": 0.95, "top_k": 100, "seed": 7}
    assert answer(**seeded) == answer(**seeded)
    assert answer(**seeded) != answer(**{**seeded, "seed": 8})
    assert answer(temperature=1.0, top_k=1) == answer()


def test_namespaces_share_nothing(
    tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    engine = open_engine(tiny("llama"))
    prompt = tokens(100)
    for tenant, cached in (("a", 0), ("b", 0), ("a", 96)):
        (generation,) = engine.generate([GenerationRequest(prompt, 1, namespace=tenant)])
        assert generation.cached_tokens == cached


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (GenerationRequest([], 1), "request of 0 tokens"),
        (GenerationRequest([3], 0), "1 tokens, 0 new ones"),
        (GenerationRequest([3, 512], 1), "3..512 of a vocabulary of 512"),
        (GenerationRequest([-1], 1), "-1..-1 of a vocabulary"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    tiny: Any, open_engine: Any, request_: Any, reason: Any
) -> None:
    engine = open_engine(tiny("llama"))
    with pytest.raises(ConfigError, match=reason):
        engine.submit(request_)
    assert engine.idle


def test_a_pass_that_fails_ends_its_requests_and_no_others(
    tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    model = build_tiny_model("bamba", dtype=torch.float64)
    engine = open_engine(model, components={"mamba": {"states": 24}})
    expected = greedy(model, tokens(20), 12)
    other = engine.submit(GenerationRequest(tokens(20), 12, ignore_end=True))
    while len(other.tokens) < 3:
        engine.step()

    def fall_over(module: object, arguments: tuple[torch.Tensor, ...], output: object) -> None:
        if arguments[0].shape[1] > 1:  # prompts only
            raise RuntimeError("the device fell over")

    broken = model.model.layers[2].register_forward_hook(fall_over)
    doomed = engine.submit(GenerationRequest(tokens(50, seed=3), 4))
    seen = list(engine.run())
    broken.remove()
    assert doomed.finish is FinishReason.FAILED
    assert str(doomed.error) == "the device fell over"
    assert NewToken(doomed, None, FinishReason.FAILED) in seen
    assert other.tokens == expected, "no token of the others is lost"
    assert [new.token for new in seen if new.generation is other] == expected[3:]
    (again,) = engine.generate([GenerationRequest(tokens(50, seed=3), 4, ignore_end=True)])
    assert again.tokens == greedy(model, tokens(50, seed=3), 4)


def test_tokens_computed_before_an_error_of_the_engine_come_with_the_next_step(
    tiny: Any, open_engine: Any, tokens: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(tiny("llama"))
    done = engine.submit(GenerationRequest(tokens(20), 2, ignore_end=True))
    engine.step()
    engine.submit(GenerationRequest(tokens(50, seed=2), 2, ignore_end=True))
    with monkeypatch.context() as patched:
        patched.setattr(engine.memory.cache, "next_chunk", _raise)
        with pytest.raises(RuntimeError, match="a book is wrong"):
            engine.step()
    assert done.finish is FinishReason.LENGTH
    ended = [(new.generation, new.token, new.finish) for new in engine.run()]
    assert (done, done.tokens[1], FinishReason.LENGTH) in ended


def _raise(*_: object) -> None:
    raise RuntimeError("a book is wrong")


def test_logits_that_are_no_numbers_fail_one_request(
    tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    model = build_tiny_model("llama", dtype=torch.float64)
    engine = open_engine(model)
    good = engine.submit(GenerationRequest(tokens(20), 4, ignore_end=True))
    bad = engine.submit(GenerationRequest(tokens(20, seed=2), 4, ignore_end=True))

    def spoil(module: object, arguments: object, output: torch.Tensor) -> torch.Tensor:
        output[1] = torch.nan
        return output

    broken = model.lm_head.register_forward_hook(spoil)
    engine.step()
    broken.remove()
    for _ in engine.run():
        pass
    assert bad.finish is FinishReason.FAILED
    assert "512 of 512 logits are NaN" in str(bad.error)
    assert good.tokens == greedy(model, tokens(20), 4)


def test_logits_that_torch_cannot_read_fail_the_requests_of_their_pass(
    tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    model = build_tiny_model("llama", dtype=torch.float64)
    engine = open_engine(model)
    doomed = [engine.submit(GenerationRequest(tokens(20, seed=each), 4)) for each in range(2)]
    broken = model.lm_head.register_forward_hook(lambda *given: given[-1].to(torch.complex128))
    seen = engine.step()
    broken.remove()
    assert sorted(map(id, doomed)) == sorted(id(new.generation) for new in seen)
    assert all(isinstance(each.error, RuntimeError) for each in doomed)
    good = engine.submit(GenerationRequest(tokens(20), 4, ignore_end=True))
    for _ in engine.run():
        pass
    assert good.tokens == greedy(model, tokens(20), 4)


def test_the_coldest_temperature_is_greedy(
    tiny: Any, open_engine: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("llama", torch.float64)
    (generation,) = open_engine(model).generate(
        [GenerationRequest(tokens(20), 6, sampling=Sampling(temperature=1e-320), ignore_end=True)]
    )
    assert generation.tokens == greedy(model, tokens(20), 6)


@given(data=st.data())
def test_every_finished_answer_is_right_as_requests_come_and_go(tiny: Any, data: Any) -> None:
    family = data.draw(st.sampled_from(["gemma3_text", "lfm3", "qwen3_next"]), "family")
    model = tiny(family, torch.float64)
    limits = EngineSettings(
        chunk_tokens=32,
        max_running=3,
        reserve_tokens=2,
        step_tokens=64,
        max_drafts=data.draw(st.sampled_from([0, 0, 3]), "drafts"),
    )
    components = {"mamba": {"states": 14, "host_states": 16}} if family != "gemma3_text" else {}
    engine = Engine.open(model, limits, **{**POOLS, "device_tokens": 256}, components=components)
    generator = torch.Generator().manual_seed(5)
    pieces = torch.randint(3, 500, (4, 24), generator=generator).tolist()
    live, ended = [], []
    for _ in range(data.draw(st.integers(1, 14), "events")):
        action = data.draw(st.sampled_from(["submit", "step", "steps", "abort"]), "action")
        if action == "submit":
            parts = data.draw(st.lists(st.sampled_from(pieces), min_size=1, max_size=4), "prompt")
            request = GenerationRequest(
                [token for part in parts for token in part],
                data.draw(st.integers(1, 20), "n"),
                ignore_end=True,
            )
            live.append(engine.submit(request))
        elif action == "abort" and live:
            engine.abort(live.pop(data.draw(st.integers(0, len(live) - 1), "who")))
        else:
            for _ in range(1 if action == "step" else 12):
                engine.step()
        ended += [each for each in live if each.finish]
        live = [each for each in live if not each.finish]
        engine.memory.cache.check_integrity()
    for _ in engine.run():
        pass
    for generation in ended + live:
        if generation.finish is FinishReason.LENGTH:
            assert len(generation.tokens) == generation.request.max_new_tokens
            prompt = generation.request.tokens
            assert generation.tokens == best_tokens(model, prompt, generation.tokens)
    engine.memory.cache.drain()
    engine.memory.cache.check_integrity()
    engine.close()


@pytest.mark.parametrize("family", ["mamba2", "llama"])
def test_a_cache_is_given_under_the_models_own_name(family: str, tiny: Any) -> None:
    model = tiny(family)
    assert cache_argument(model) in inspect.signature(model.forward).parameters


def test_bounded_page_tables_bound_what_runs_and_refuse_what_is_longer() -> None:
    model = build_tiny_model("llama", dtype=torch.float64)
    settings = EngineSettings(max_running=4, chunk_tokens=32)
    bounds: dict[str, Any] = {"max_requests": 2, "max_tokens": 48}
    sizes: dict[str, Any] = {"page_size": 16, "device_tokens": 512, "host_tokens": 0}
    engine = Engine.open(model, settings, load=None, probe_tokens=0, **sizes, **bounds)
    prompts = [list(range(3 + at * 40, 23 + at * 40)) for at in range(3)]
    with pytest.raises(ConfigError, match="20 tokens, 29 new ones: page tables hold max_tokens=48"):
        engine.submit(GenerationRequest(prompts[0], 29))
    found = engine.generate(GenerationRequest(each, 28, ignore_end=True) for each in prompts)
    assert [(each.finish, len(each.tokens)) for each in found] == [(FinishReason.LENGTH, 28)] * 3
    engine.close()
