"""Prompts hit as deep as they agree, without being told where: engine, `generate`, README."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from kvgraft import ConfigError
from kvgraft_transformers.engine import Engine, EngineSettings, GenerationRequest
from kvgraft_transformers.probing import cache_argument, layer_modules
from kvgraft_transformers.serving.app import ServedModel, build_app
from kvgraft_transformers.serving.protocol import Message
from kvgraft_transformers.serving.text import Tokenizer
from kvgraft_transformers.serving.worker import EngineWorker
from kvgraft_transformers.tiny_tokenizer import build_tiny_tokenizer

from .cases import one_of_each_kind

ROOMY = {"device_tokens": 16_384, "host_tokens": 0, "chunk_tokens": 512}


def long(*cases: object) -> list[Any]:
    """Cases that only the long tests run: others of their kind are run by default."""
    return [pytest.param(each, marks=pytest.mark.long) for each in cases]


Ask = Callable[[Sequence[int]], tuple[int, list[int]]]
"""A prompt through a model: how many of its tokens were cached, and four more."""


@pytest.fixture(params=["engine", "generate in one pass", *long("generate in chunks")])
def ask(request: Any, open_memory: Any) -> Callable[[PreTrainedModel], Ask]:
    """One way to use a memory of the model."""

    def through(model: PreTrainedModel) -> Ask:
        memory = open_memory(model, **ROOMY)
        engine = Engine(memory, EngineSettings(chunk_tokens=512))

        def submit(prompt: Sequence[int]) -> tuple[int, list[int]]:
            (done,) = engine.generate([GenerationRequest(prompt, 4, ignore_end=True)])
            assert done.cached_tokens is not None
            return done.cached_tokens, done.tokens

        def generate(prompt: Sequence[int]) -> tuple[int, list[int]]:
            more = {"prefill_chunk_size": 512} if request.param.endswith("chunks") else {}
            with memory.session(prompt, max_new_tokens=4) as session:
                said = answer(model, prompt, **session.cache.arguments, **more)
            return session.cached_tokens, said

        return submit if request.param == "engine" else generate

    return through


def answer(model: PreTrainedModel, prompt: Sequence[int], **more: object) -> list[int]:
    """Four tokens by `generate`: without more arguments, as transformers itself says them."""
    ids = torch.tensor(prompt)[None]
    said = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=4,
        do_sample=False,
        eos_token_id=None,
        **more,
    )
    answer: list[int] = said[0, len(prompt) :].tolist()
    return answer


def test_an_identical_prompt_is_reused_but_for_its_last_page(
    tiny: Any, ask: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("qwen3_next")
    send, prompt = ask(model), tokens(2000)
    expected = answer(model, prompt)
    for least in (0, 1920, 1920):
        cached, said = send(prompt)
        assert cached >= least
        assert said == expected


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", *long("llama4_text", "lfm3")])
def test_an_identical_prompt_of_whole_pages_hits(
    family: str, tiny: Any, ask: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny(family)
    send, prompt = ask(model), tokens(160)
    expected = answer(model, prompt)
    assert [send(prompt) for _ in range(3)] == [(0, expected), (144, expected), (144, expected)]


@pytest.mark.parametrize(
    "family", [pytest.param("gemma3_text", marks=pytest.mark.long), "qwen3_next"]
)
def test_a_shared_system_prompt_is_hit_whole_by_the_third_user(
    family: str, tiny: Any, ask: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny(family)
    send, system = ask(model), tokens(4000)
    for seed, least in ((2, 0), (3, 0), (4, 3968), (5, 3968)):
        prompt = system + tokens(700, seed)
        cached, said = send(prompt)
        assert cached >= least
        if least:
            assert said == answer(model, prompt)


def test_the_second_question_about_a_document_hits_all_of_it_but_a_page(
    tiny: Any, ask: Any, tokens: Callable[..., list[int]]
) -> None:
    """The README's example: windows that were left behind are there to resume from."""
    model = tiny("gemma3_text")
    send, document = ask(model), tokens(333)
    hits = [send(document + tokens(25, seed))[0] for seed in (2, 3, 4)]
    assert hits == [0, 320, 320]


def test_a_document_that_ends_on_the_grid_is_hit_at_the_second_question(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    """A state is resumed from where one was captured: here at the end of every chunk."""
    model = tiny("qwen3_next")
    memory = open_memory(model, **{**ROOMY, "chunk_tokens": 64})
    engine = Engine(memory, EngineSettings(chunk_tokens=64))
    document = tokens(320)
    hits = [
        engine.generate([GenerationRequest(document + tokens(25, seed), 2)])[0].cached_tokens
        for seed in (2, 3)
    ]
    assert hits == [0, 320]


def test_a_pass_whose_logits_are_all_needed_is_never_cut(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("qwen3_next")
    memory = open_memory(model)
    ids = torch.tensor(tokens(150))[None]
    for more in ({}, {"logits_to_keep": 2}, {"logits_to_keep": 1, "output_hidden_states": True}):
        with torch.no_grad(), memory.session(ids) as session, lengths_of(model) as lengths:
            output = model(input_ids=ids, **session.cache.arguments, **more)
            session.abort()
        assert lengths == [150]
        assert output.logits.shape[1] == more.get("logits_to_keep", 150)


@pytest.mark.parametrize(("family", "cut"), [("qwen3_next", [960, 40]), ("gemma3_text", [1000])])
def test_a_prompt_of_generate_is_cut_where_a_state_is_kept(
    family: str, cut: Any, tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    model, prompt = tiny(family), tokens(1000)
    memory = open_memory(model, **{**ROOMY, "page_size": 64, "chunk_tokens": 1024})
    with memory.session(prompt, max_new_tokens=4) as session, lengths_of(model) as lengths:
        answer(model, prompt, **session.cache.arguments)
    assert lengths == [*cut, 1, 1, 1]


NAMED = 333
"""The end of a document that is no multiple of anything."""


@pytest.mark.parametrize("named", [[100, NAMED], *long(NAMED, (NAMED,))])
def test_a_session_names_where_others_go_on(
    named: Any, tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    """Without a name a state is where the first prompt ended, and at multiples of chunk_tokens."""
    model, document = tiny("qwen3_next"), tokens(NAMED)
    for resume_at, least in ((None, 0), (named, 320)):
        memory = open_memory(model, **ROOMY)
        hits = []
        for seed in (2, 3):
            prompt = document + tokens(150, seed)
            with memory.session(prompt, max_new_tokens=4, resume_at=resume_at) as session:
                said = answer(model, prompt, **session.cache.arguments)
            hits.append(session.cached_tokens)
            assert said == answer(model, prompt)
        assert hits == [0, least]


@pytest.mark.parametrize("named", [NAMED, [100, NAMED]])
def test_a_request_to_the_engine_names_where_others_go_on(
    named: Any, tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    memory = open_memory(tiny("qwen3_next"), **ROOMY)
    engine = Engine(memory, EngineSettings(chunk_tokens=512))
    document = tokens(NAMED)
    asked = [GenerationRequest(document + tokens(150, s), 2, resume_at=named) for s in (2, 3)]
    assert [engine.generate([each])[0].cached_tokens for each in asked] == [0, 320]


@pytest.mark.parametrize("named", [[4, 11], "5", True, *long(-1, 11, 2.5, [None])])
def test_an_invalid_position_is_refused_before_anything_is_held(
    named: Any, tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    memory = open_memory(tiny("qwen3_next"))
    engine = Engine(memory, EngineSettings(chunk_tokens=512))
    line = r"resume_at .*in a prompt of 10 tokens.*; give"
    with pytest.raises(ConfigError, match=line):
        memory.session(tokens(10), max_new_tokens=4, resume_at=named)
    with pytest.raises(ConfigError, match=line):
        engine.submit(GenerationRequest(tokens(10), 4, resume_at=named))
    assert engine.idle
    assert not memory.cache.requests


THINKS = "<|user|>\n<think>\n"
"""Tokens that a template may begin an answer with, and leave out when it repeats the answer."""


@pytest.fixture
def post(
    request: Any, tiny: Any, open_memory: Any
) -> Iterator[Callable[[str, dict[str, Any]], httpx.Response]]:
    """Requests to a server of a tiny hybrid model, in this process."""
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% endif %}", f"{getattr(request, 'param', '')}{{% endif %}}"
    )
    engine = Engine(open_memory(tiny("qwen3_next"), **ROOMY), EngineSettings(chunk_tokens=512))
    worker = EngineWorker(engine)
    worker.start()
    served = ServedModel("tiny", worker, Tokenizer(tokenizer), 8192, 8192)

    def send(path: str, body: dict[str, Any]) -> httpx.Response:
        async def talk() -> httpx.Response:
            transport = httpx.ASGITransport(app=build_app(served))
            async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
                whole = {"model": "tiny", "max_tokens": 2, "temperature": 0, **body}
                return await client.post(path, json=whole)

        return asyncio.run(talk())

    yield send
    worker.stop()


def cached(reply: httpx.Response) -> int:
    tokens: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_chats_with_one_system_prompt_share_it_from_the_second_on(post: Any) -> None:
    system = {"role": "system", "content": "You answer in the language of the question. " * 40}
    questions = ("What is a page? " * 30, "And which unit is a slot? " * 25)
    chats = [[system, {"role": "user", "content": each}] for each in questions]
    replies = [post("/v1/chat/completions", {"messages": each}) for each in chats]
    tokenizer = Tokenizer(build_tiny_tokenizer())
    shared = tokenizer.system_tokens(
        [Message.model_validate(each) for each in chats[0]],
        tokenizer.encode_chat([Message.model_validate(each) for each in chats[0]]),
    )
    assert shared > 128
    assert [cached(each) for each in replies] == [0, shared // 16 * 16]


@pytest.mark.parametrize("post", [THINKS, *long("")], indirect=True, ids=["left out", "repeated"])
def test_the_next_turn_of_a_chat_resumes_in_the_page_where_the_last_one_of_its_user_ends(
    post: Any,
) -> None:
    """Wherever in a page that is, though the prompt ends in the next one."""
    tokenizer = Tokenizer(build_tiny_tokenizer())
    turns, hits = [], []
    for extra in range(16):
        question = "What is a page? " * 14 + "Q" * extra
        chat = [{"role": "user", "content": question}]
        for _ in range(2):
            reply = post("/v1/chat/completions", {"messages": chat, "cache_salt": str(extra)})
            answer = reply.json()["choices"][0]["message"]["content"]
            chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Why?"}]
        turns.append(len(tokenizer.encode(f"<|user|>{question}<|end|>")))
        hits.append(cached(reply))
    assert {each % 16 for each in turns} == set(range(16))
    assert all(hit >= turn // 16 * 16 for hit, turn in zip(hits, turns)), hits


def test_a_completion_names_where_others_go_on(post: Any, tokens: Callable[..., list[int]]) -> None:
    document = tokens(NAMED)
    prompts = [document + tokens(150, seed) for seed in (2, 3)]
    hits = [
        cached(post("/v1/completions", {"prompt": each, "resume_at": named, "cache_salt": at}))
        for at, named in (("a", None), ("b", NAMED), ("c", [NAMED, 480]))
        for each in prompts
    ]
    assert hits == [0, 0, 0, 320, 0, 320]


@pytest.mark.parametrize("named", ["five", 484, *long(-1, [2.5], {"at": 3})])
def test_an_invalid_position_is_a_bad_request(
    named: Any, post: Any, tokens: Callable[..., list[int]]
) -> None:
    reply = post("/v1/completions", {"prompt": tokens(483), "resume_at": named})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] in {"resume_at", "resume_at.0"}  # an item of a list
    assert "\n" not in reply.json()["error"]["message"]


@contextmanager
def lengths_of(model: PreTrainedModel) -> Iterator[list[int]]:
    """The tokens of each pass through the model while the block runs."""
    lengths: list[int] = []

    def note(_: object, args: tuple[torch.Tensor, ...], output: object) -> None:
        lengths.append(args[0].shape[1])

    _, first = next(iter(layer_modules(model).items()))
    handle = first.register_forward_hook(note)
    try:
        yield lengths
    finally:
        handle.remove()


@pytest.mark.parametrize("family", ["mamba2", "bamba", "lfm2"])
def test_generate_goes_on_behind_cached_tokens_for_every_caller_that_gives_the_whole_prompt(
    family: str, tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    model, prompt = tiny(family), tokens(330)
    memory = open_memory(model, **ROOMY)
    expected = answer(model, prompt)
    for hit in (0, 320, 320):
        with memory.session(prompt, max_new_tokens=4) as session, lengths_of(model) as lengths:
            said = answer(model, prompt, **{cache_argument(model): session.cache})
        assert session.cached_tokens == hit
        assert sum(lengths) == len(prompt) - hit + 3
        assert said == expected


def test_a_few_tokens_behind_a_cached_prompt_are_one_pass(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    """A state at their last boundary would save a repetition fewer tokens than a pass costs."""
    model, prompt = tiny("lfm2"), tokens(330)
    memory = open_memory(model, **ROOMY)
    for ids, passes in ((prompt, [320, 10]), (prompt[:320] + tokens(41, 2), [41])):
        with memory.session(ids, max_new_tokens=4) as session, lengths_of(model) as lengths:
            answer(model, ids, **session.cache.arguments)
        assert lengths == [*passes, 1, 1, 1]


@pytest.mark.parametrize("case", one_of_each_kind())
def test_two_sessions_with_one_prompt_share_pages_and_read_their_own(
    case: Any, tiny: Any, open_memory: Any, tokens: Callable[..., list[int]], run: Any, poison: Any
) -> None:
    """Pages that the other one shared first take the place of a session's own, which are freed."""
    family, _, sparse = case.partition("+")
    model = tiny(family)
    memory = open_memory(model, sparse_on_host=bool(sparse), device_tokens=1024)
    prompt = tokens(130)
    cuts = (32, 64, 96, 128, 129, 130)
    expected = run(model, prompt, cuts=cuts)
    sessions: list[Any] = [memory.session(prompt, chunk_tokens=32) for _ in range(2)]
    said: list[list[torch.Tensor]] = [[], []]
    for end in cuts:
        for session, logits in zip(sessions, said):
            logits.append(run(model, prompt[:end], session, cuts=(end,)))
            memory.cache.check_integrity()
            poison(memory)
    for session, logits in zip(sessions, said):
        assert torch.equal(torch.cat(logits), expected)
        session.finish()
