"""Refusals of a session, in one line each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from kvgraft import ConfigError, SettingsModel
from kvgraft_transformers import ModelMemory, SessionError
from kvgraft_transformers.engine import Engine, EngineSettings
from kvgraft_transformers.engine.sampling import Sampling
from kvgraft_transformers.serving.protocol import ApiError, parse_completion


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[Any]:
    with torch.no_grad():
        yield


def row(tokens: list[int]) -> torch.Tensor:
    return torch.tensor(tokens)[None]


def test_other_tokens_than_the_sessions_are_refused(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("llama")
    session = open_memory(model).session(tokens(40))
    wrong = tokens(40)
    wrong[7] = 400
    with pytest.raises(SessionError, match=r"token 7 is 400, the session was begun with \d+"):
        model(input_ids=row(wrong), **session.cache.arguments)
    session.abort()


def test_a_prompt_with_padding_tokens_is_refused_unless_they_are_meant(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    """`generate` hides them, and a prompt with such tokens would find data computed behind them."""
    model = tiny("llama", torch.float64)
    memory = open_memory(model)
    prompt = tokens(40)
    prompt[5] = model.config.pad_token_id
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    session = memory.session(prompt, max_new_tokens=4)
    with pytest.raises(SessionError, match="attention_mask hides token 5"):
        model.generate(row(prompt), **session.cache.arguments, **settings)
    session.abort()
    ones = torch.ones_like(row(prompt))
    expected = model.generate(row(prompt), attention_mask=ones, **settings)
    for _ in range(2):
        with memory.session(prompt, max_new_tokens=4) as session:
            said = model.generate(
                row(prompt), attention_mask=ones, **session.cache.arguments, **settings
            )
        assert torch.equal(said, expected)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"position_ids": torch.arange(5, 25)[None]}, r"stand at 0\.\.\.19; leave them out"),
        ({"attention_mask": torch.ones(1, 1, 20, 20)}, "give one of ones, one per token"),
        ({"attention_mask": torch.ones(1, 21)}, "give one of ones, one per token"),
        ({"use_cache": False}, "use_cache=False with a session"),
        ({"pixel_values": torch.ones(1, 3, 8, 8)}, "pixel_values: a prefix is found by its tokens"),
    ],
)
def test_input_that_makes_tokens_depend_on_anything_but_earlier_tokens_is_refused(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]], arguments: Any, reason: Any
) -> None:
    model = tiny("llama")
    session = open_memory(model).session(tokens(20))
    with pytest.raises(SessionError, match=reason):
        model(input_ids=row(tokens(20)), **session.cache.arguments, **arguments)
    session.abort()


def test_a_batch_for_one_session_is_refused(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("llama")
    memory = open_memory(model)
    with pytest.raises(ConfigError, match=r"input_ids of shape \[2, 20\]: a session is one"):
        memory.session(torch.tensor([tokens(20), tokens(20)]))
    session = memory.session(tokens(20))
    with pytest.raises(SessionError, match="a batch of 2 rows, sessions: 1; open"):
        model(
            input_ids=torch.tensor([tokens(20), tokens(20)]),
            **session.cache.arguments,
        )
    session.abort()


def test_a_session_that_is_in_a_batch_twice_is_refused(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("llama")
    memory = open_memory(model)
    first, second = (memory.session(tokens(20, seed=seed)) for seed in range(2))
    with pytest.raises(SessionError, match="rows 0 and 2 of a batch are the same session; open on"):
        memory.session_cache([first, second, first])
    for seed, session in enumerate((first, second)):
        model(input_ids=row(tokens(20, seed=seed)), **session.cache.arguments)
        session.abort()


def test_embeddings_instead_of_tokens_are_refused(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("llama")
    session = open_memory(model).session(tokens(20))
    embedded = model.get_input_embeddings()(row(tokens(20)))
    with pytest.raises(SessionError, match="pass input_ids"):
        model(inputs_embeds=embedded, **session.cache.arguments)
    session.abort()


def test_beams_are_refused(tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]) -> None:
    model = tiny("llama")
    session = open_memory(model).session(tokens(20), max_new_tokens=4)
    with pytest.raises(SessionError, match="a batch of 2 rows, sessions: 1; open"):
        model.generate(row(tokens(20)), **session.cache.arguments, max_new_tokens=4, num_beams=2)
    session.abort()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", ["llama", "minimax"])
@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda cache: cache.crop(-1), "cannot be cropped"),
        (lambda cache: cache.reset(), "cannot be reset"),
        (lambda cache: cache.activate_past_recording(), "cannot be cropped"),
        (lambda cache: cache.reorder_cache(torch.tensor([0])), "beam search"),
        (lambda cache: cache.batch_repeat_interleave(2), "one sequence"),
        (lambda cache: cache.batch_select_indices(torch.tensor([0])), "one sequence"),
        (lambda cache: cache.__deepcopy__({}), "cannot be copied"),
    ],
)
def test_impossible_calls_on_a_shared_cache_are_refused(
    tiny: Any,
    open_memory: Any,
    tokens: Callable[..., list[int]],
    family: str,
    call: Any,
    reason: Any,
) -> None:
    session = open_memory(tiny(family)).session(tokens(20))
    with pytest.raises(SessionError, match=reason):
        call(session.cache)
    session.abort()


@pytest.mark.parametrize("family", ["bamba", "minimax"])
def test_sessions_that_begin_and_that_continue_a_state_do_not_mix(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]], family: str
) -> None:
    model = tiny(family)
    memory = open_memory(model)
    first, second = memory.session(tokens(40)), memory.session(tokens(40, seed=2))
    model(input_ids=row(tokens(40)[:8]), **first.cache.arguments)
    with pytest.raises(SessionError, match="1 of 2 sessions begin"):
        model(
            input_ids=torch.tensor([tokens(40)[8:16], tokens(40, seed=2)[:8]]),
            **memory.session_cache([first, second]).arguments,
        )
    first.abort()
    second.abort()


def test_a_pass_with_gradients_is_refused(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("llama")
    session = open_memory(model).session(tokens(20))
    with torch.enable_grad(), pytest.raises(SessionError, match=r"under torch.no_grad\(\)"):
        model(input_ids=row(tokens(20)), **session.cache.arguments)
    session.abort()


def test_a_session_on_another_model_or_a_closed_memory_is_refused(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    memory = open_memory(tiny("llama"))
    session = memory.session(tokens(20))
    with pytest.raises(SessionError, match="is not running it"):
        tiny("qwen3")(input_ids=row(tokens(20)), **session.cache.arguments)
    session.abort()


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([3, 512], r"token ids 3\.\.512 of a vocabulary of 512"),
        ([-1], r"token ids -1\.\.-1"),
        (torch.rand(5), r"input_ids of torch\.float32: give token ids"),
        ([1.5], r"input_ids of torch\.float32: give token ids"),
        (torch.ones(5) > 0, r"input_ids of torch\.bool: give token ids"),
        ("hello", "input_ids='hello': give token ids, a list of them or a tensor"),
        (None, "input_ids=None: give token ids"),
        (["hello"], r"input_ids=\['hello'\]: give token ids"),
        ([[1, 2], [3, 4]], r"input_ids of shape \[2, 2\]: a session is one sequence"),
        ([[1, 2], [3]], r"input_ids=\[\[1, 2\], \[3\]\]: give token ids"),
        ([], "request of 0 tokens"),
    ],
)
def test_invalid_tokens_are_refused(tiny: Any, open_memory: Any, ids: Any, reason: Any) -> None:
    with pytest.raises(ConfigError, match=reason):
        open_memory(tiny("llama")).session(ids)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"chunk_tokens": 40}, "chunk_tokens 40 is not a multiple of page_size 16; use 32"),
        ({"chunk_tokens": 8}, "chunk_tokens 8 is not a multiple of page_size 16; use 16"),
        ({"chunk_tokens": "4k"}, "setting chunk_tokens='4k': give a whole number, 1 or more"),
        ({"page_size": 0}, "setting page_size=0: give a whole number, 1 or more"),
        ({"page_size": 1.5}, "setting page_size=1.5: give a whole number, 1 or more"),
        ({"components": ["swa"]}, r"setting components=\['swa'\]: give options by name, such as"),
        ({"components": {"swa": 3}}, r"setting components=\{'swa': 3\}: give options by name"),
        ({"components": {"mamba": {}}}, r"components \['mamba'\]: the model has \['full'\]"),
        ({"device_tokens": 0}, "device_tokens"),
        ({"colour": "red"}, "no setting 'colour'"),
        (
            {"device_token": 64, "device_tokens": None},
            r"no setting 'device_token'; did you mean 'device_tokens'\? settings: comp",
        ),
        ({"sparse_on_host": True}, "no layer with an indexer"),
    ],
)
def test_settings_that_cannot_work_are_refused(tiny: Any, settings: Any, reason: Any) -> None:
    with pytest.raises(ConfigError, match=reason):
        ModelMemory.open(
            tiny("llama"), **{"page_size": 16, "device_tokens": 256, "chunk_tokens": 32, **settings}
        )
    assert not tiny("llama")._forward_hooks


@pytest.mark.parametrize("opened", [ModelMemory, Engine], ids=lambda each: each.__name__)
@pytest.mark.parametrize("model", ["gemma", None, torch.nn.Linear(2, 2), PreTrainedModel])
def test_an_object_that_is_no_model_is_refused_with_how_to_load_one(
    opened: Any, model: Any
) -> None:
    with pytest.raises(ConfigError) as refused:
        opened.open(model, device_tokens=64)
    kind = type(model).__name__
    assert str(refused.value) == (
        f"model {model!r:.60} is a {kind}, no model of transformers; load it with "
        "AutoModelForCausalLM.from_pretrained(...) and give that model"
    )


SETTINGS = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}


def test_a_prompt_that_differs_within_the_reused_prefix_is_refused(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("llama")
    memory = open_memory(model)
    prompt = tokens(40)
    with memory.session(prompt, max_new_tokens=4) as session:
        model.generate(row(prompt), **session.cache.arguments, **SETTINGS)
    wrong = [*prompt[:5], 400, *prompt[6:]]
    with memory.session(prompt, max_new_tokens=4) as session:
        assert session.cached_tokens == 32
        with pytest.raises(SessionError, match=rf"token 5 is 400, the session .* {prompt[5]}; "):
            model.generate(row(wrong), **session.cache.arguments, **SETTINGS)
        said = model.generate(row(prompt), **session.cache.arguments, **SETTINGS)
    assert torch.equal(said, model.generate(row(prompt), **SETTINGS))


@pytest.mark.parametrize("reused", [False, True])
def test_a_part_of_the_prompt_is_refused_before_anything_is_computed(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]], reused: Any
) -> None:
    model = tiny("llama")
    memory = open_memory(model)
    if reused:
        with memory.session(tokens(40), max_new_tokens=4) as session:
            model.generate(row(tokens(40)), **session.cache.arguments, **SETTINGS)
    with memory.session(tokens(40), max_new_tokens=4) as session:
        before = session.computed
        with pytest.raises(SessionError) as refused:
            model.generate(row(tokens(40)[:20]), **session.cache.arguments, **SETTINGS)
        assert str(refused.value) == (
            f"generate was given 20 tokens, the session has 40 and has computed {before}: give at "
            "least its first 40"
        )
        assert session.computed == before


def test_a_second_answer_to_the_same_prompt_needs_another_session(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("llama")
    with open_memory(model).session(tokens(40), max_new_tokens=8) as session:
        said = model.generate(row(tokens(40)), **session.cache.arguments, **SETTINGS)
        with pytest.raises(SessionError, match="given 40 tokens, the session has 43 and has comp"):
            model.generate(row(tokens(40)), **session.cache.arguments, **SETTINGS)
        more = model.generate(said, **session.cache.arguments, **SETTINGS)
    longer = {**SETTINGS, "max_new_tokens": 8}
    assert torch.equal(more, model.generate(row(tokens(40)), **longer))


def test_more_tokens_than_were_reserved_are_refused(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("llama")
    with open_memory(model).session(tokens(40), max_new_tokens=3) as session:
        with pytest.raises(SessionError) as refused:
            model.generate(row(tokens(40)), **session.cache.arguments, **SETTINGS)
        assert str(refused.value) == (
            "44 tokens in a session that was begun for 43: a prompt of 40 and max_new_tokens 3; "
            "begin it with max_new_tokens=4"
        )
        assert session.computed == 0
        model(input_ids=row(tokens(43)), **session.cache.arguments)
        with pytest.raises(SessionError, match="44 tokens in a session that was begun for 43"):
            model(input_ids=row([5]), **session.cache.arguments)
        assert session.computed == 43


def test_a_session_instead_of_its_cache_and_one_that_has_ended_are_refused(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("llama")
    with open_memory(model).session(tokens(40), max_new_tokens=4) as session:
        cache = session.cache
        (argument,) = cache.arguments
        for call in (model.generate, model):
            with pytest.raises(
                SessionError, match=r"give its cache, \*\*session\.cache\.arguments"
            ):
                call(row(tokens(40)), **{argument: session})
    for call in (model.generate, model):
        with pytest.raises(SessionError, match="the session has ended; begin another"):
            call(row(tokens(40)), **cache.arguments)
    with pytest.raises(SessionError, match="the session has ended; begin another"):
        _ = session.cache


def test_two_memories_of_one_model_check_their_own_sessions_and_leave_no_trace(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("llama")
    first, second = open_memory(model), open_memory(model)
    wrong = row([400, *tokens(40)[1:]])
    for memory in (first, second):
        with memory.session(tokens(40), max_new_tokens=4) as session:
            model.generate(row(tokens(40)), **session.cache.arguments, **SETTINGS)
    copied = copy.deepcopy(model)
    assert copied.generate.__self__ is copied
    first.close()
    session = second.session(tokens(40), max_new_tokens=4)
    with pytest.raises(SessionError, match="token 0 is 400"):
        model.generate(wrong, **session.cache.arguments, **SETTINGS)
    session.abort()
    second.close()
    assert model.generate(wrong, **SETTINGS).shape == (1, 44)


@pytest.mark.parametrize(
    ("settings", "field"),
    [(EngineSettings, each) for each in EngineSettings.model_fields]
    + [(Sampling, each) for each in Sampling.model_fields],
)
def test_true_is_no_number_in_a_setting(settings: type[SettingsModel], field: str) -> None:
    with pytest.raises(ValidationError, match="true and false are no numbers"):
        settings(**{field: True})


@pytest.mark.parametrize("field", ["max_tokens", "temperature", "n", "seed", "resume_at", "prompt"])
def test_true_is_no_number_in_a_clients_request(field: str) -> None:
    given = [True] if field == "prompt" else True
    with pytest.raises(ApiError, match=rf"^{field}\S*=\[?True\]?: ") as refused:
        parse_completion({"model": "m", "prompt": [1, 2], field: given})
    assert str(refused.value.body["error"]["param"]).partition(".")[0] == field
