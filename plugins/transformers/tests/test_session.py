"""A session beside `generate`: the data it keeps, the calls it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvgraft import TokenKey
from kvgraft_testing.stepped import SteppedTransferEngine
from kvgraft_transformers import AdmissionRefusedError, ModelMemory, Session, SessionError
from kvgraft_transformers.tiny import build_tiny_model


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[Any]:
    with torch.no_grad():
        yield


def row(tokens: list[int]) -> torch.Tensor:
    return torch.tensor(tokens)[None]


def test_generate_leaves_a_conversation_that_the_next_turn_resumes(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("gemma3_text", torch.float64)
    memory = open_memory(model)
    history = tokens(70)
    for turn in range(3):
        ids = row(history)
        expected = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)
        with memory.session(ids, max_new_tokens=20) as session:
            assert session.cached_tokens == (0 if turn == 0 else (len(history) - 9) // 16 * 16)
            said = model.generate(
                ids,
                **session.cache.arguments,
                max_new_tokens=20,
                do_sample=False,
                eos_token_id=None,
            )
        assert said.tolist() == expected.tolist()
        history = said[0].tolist() + tokens(8, seed=turn)


def test_chunks_of_generate_leave_states_behind(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("qwen3_next", torch.float64)
    memory = open_memory(model)
    prompt = tokens(110)
    with memory.session(prompt, max_new_tokens=2) as session:
        model.generate(
            row(prompt),
            **session.cache.arguments,
            max_new_tokens=2,
            do_sample=False,
            prefill_chunk_size=32,
        )
    with memory.session(prompt[:100] + tokens(10, seed=9)) as session:
        assert session.cached_tokens == 96


def test_a_sampled_generate_runs_on_a_session_too(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("lfm3")
    memory = open_memory(model)
    ids = row(tokens(50))

    def sample(**given: object) -> list[int]:
        torch.manual_seed(3)
        said = model.generate(ids, **given, max_new_tokens=12, do_sample=True, eos_token_id=None)
        answer: list[int] = said[0].tolist()
        return answer

    expected = sample()
    with memory.session(ids, max_new_tokens=12) as session:
        assert sample(**session.cache.arguments) == expected


def test_an_exception_in_the_block_aborts_the_session(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("llama")
    memory = open_memory(model)
    prompt = tokens(40)
    with pytest.raises(KeyError), memory.session(prompt) as session:
        raise KeyError("something else went wrong")
    assert session.ended
    assert not memory.cache.requests
    with memory.session(prompt) as again:
        assert again.cached_tokens == 0


@pytest.mark.parametrize("family", ["llama", "bamba", "lfm2", "qwen3_next", "kimi_linear"])
def test_a_pass_that_fails_halfway_leaves_nothing_for_others(
    family: str, open_memory: Any, tokens: Callable[..., list[int]], run: Any
) -> None:
    model = build_tiny_model(family)
    memory = open_memory(model)
    prompt = tokens(96)
    expected = run(model, prompt)

    def fall_over(*_: object) -> None:
        raise RuntimeError("the device fell over")

    with memory.session(prompt, chunk_tokens=32) as session:
        run(model, prompt[:64], session)
        broken = model.model.layers[-1].register_forward_hook(fall_over)
        with pytest.raises(RuntimeError, match="fell over"):
            run(model, prompt[:80], session, cuts=(80,))
        broken.remove()
        with pytest.raises(SessionError, match="left its states incomplete"):
            run(model, prompt[:80], session, cuts=(80,))
        with pytest.raises(SessionError, match="left its states incomplete"):
            session.finish()
    assert session.ended
    with memory.session(prompt, chunk_tokens=32) as session:
        assert session.cached_tokens == 64
        assert torch.equal(run(model, prompt, session), expected[64:])


def test_a_session_runs_alone_and_in_company_by_turns(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("lfm3", torch.float64)
    memory = open_memory(model)
    first, second = tokens(60), tokens(60, seed=2)
    sessions = [memory.session(each) for each in (first, second)]
    expected = [model(input_ids=row(each), use_cache=False).logits[0] for each in (first, second)]

    def compute(cache: Any, start: int, end: int) -> torch.Tensor:
        rows = [first, second] if len(cache.sessions) == 2 else [first]
        ids = torch.tensor([each[start:end] for each in rows])
        found: torch.Tensor = model(
            input_ids=ids,
            position_ids=torch.arange(start, end).expand(len(rows), -1),
            **cache.arguments,
        ).logits
        return found

    both = memory.session_cache(sessions)
    compute(both, 0, 20)
    compute(sessions[0].cache, 20, 30)
    compute(sessions[0].cache, 30, 40)
    ids = row(second[20:40])
    model(input_ids=ids, **sessions[1].cache.arguments)
    said = compute(both, 40, 50)
    alone = compute(sessions[0].cache, 50, 60)
    assert torch.allclose(said[0], expected[0][40:50], atol=1e-9)
    assert torch.allclose(said[1], expected[1][40:50], atol=1e-9)
    assert torch.allclose(alone[0], expected[0][50:60], atol=1e-9)
    for session in sessions:
        session.finish()


def test_a_batch_without_room_for_one_changes_none_of_its_sessions(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("llama")
    memory = open_memory(model, device_tokens=160)
    roomy = memory.session(tokens(48), max_new_tokens=32)
    tight = Session(memory, TokenKey(tokens(48, seed=2)))  # as an engine's: without a limit
    tight.open()
    cache = memory.session_cache([roomy, tight])
    model(input_ids=torch.tensor([tokens(48), tokens(48, seed=2)]), **cache.arguments)
    with pytest.raises(SessionError, match="no slots for 20 tokens"):
        model(input_ids=torch.tensor([[7] * 20, [8] * 20]), **cache.arguments)
    assert roomy.key.n_tokens == roomy.computed == 48
    ids = torch.tensor([[9]])
    model(input_ids=ids, **roomy.cache.arguments)
    assert roomy.key.n_tokens == 49
    for session in (roomy, tight):
        session.abort()


def test_closing_the_memory_ends_open_sessions(tiny: Any, tokens: Callable[..., list[int]]) -> None:
    memory = ModelMemory.open(tiny("llama"), page_size=16, device_tokens=256)
    session = memory.session(tokens(40))
    memory.close()
    assert session.ended
    memory.cache.check_integrity()


def test_a_session_that_does_not_fit_says_which_pool_is_short(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    memory = open_memory(tiny("gemma3_text"), device_tokens=128)
    with pytest.raises(AdmissionRefusedError, match="component 'full' device pool: needs 14 slots"):
        memory.session(tokens(200))
    assert not memory.cache.requests
    holder = memory.session(tokens(100))
    with pytest.raises(AdmissionRefusedError, match="deferred; component 'full' device pool"):
        memory.session(tokens(100, seed=2))
    holder.abort()
    memory.session(tokens(100, seed=2)).abort()


def test_decoding_beyond_the_reserve_names_the_next_action(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("llama")
    memory = open_memory(model, device_tokens=96)
    prompt = tokens(60)
    session = memory.session(prompt)
    with pytest.raises(SessionError, match="begin it with max_new_tokens=60"):
        model.generate(row(prompt), **session.cache.arguments, max_new_tokens=60, eos_token_id=None)
    session.abort()


def test_a_failed_load_back_is_computed_again(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]], run: Any
) -> None:
    model = tiny("llama")
    transfers = SteppedTransferEngine()
    memory = open_memory(model, transfers=transfers, write_policy="write-through")
    prompt = tokens(70)
    with memory.session(prompt) as session:
        expected = run(model, prompt, session)
    transfers.run_all()
    memory.cache.poll()
    memory.cache.evict("full", 100)

    session = Session(memory, TokenKey(prompt))
    assert session.admit().admitted
    session.load_back()
    assert not session.ready
    transfers.fail()
    memory.cache.poll()
    assert session.load_failed
    session.restart()
    assert session.admit().admitted
    session.load_back()
    assert session.cached_tokens == 0
    assert torch.allclose(run(model, prompt, session), expected, atol=1e-5)
    session.finish()
    transfers.run_all()


def test_inference_mode_runs_sessions_too(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]], run: Any
) -> None:
    model = tiny("lfm3")
    memory = open_memory(model)
    prompt = tokens(70)
    expected = run(model, prompt)
    for cached in (0, 64):
        with torch.inference_mode(), memory.session(prompt, chunk_tokens=32) as session:
            assert session.cached_tokens == cached
            assert torch.equal(run(model, prompt, session), expected[cached:])


def test_two_memories_on_one_model_do_not_meddle(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]], run: Any
) -> None:
    model = tiny("bamba")
    first, second = open_memory(model), open_memory(model, page_size=32)
    prompt = tokens(70)
    expected = run(model, prompt)
    for memory in (first, second, first):
        with memory.session(prompt, chunk_tokens=32) as session:
            assert torch.equal(run(model, prompt, session), expected[session.cached_tokens :])
            assert session.computed == len(prompt)


def test_sessions_take_turns_on_one_memory(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]], run: Any
) -> None:
    model = tiny("lfm3")
    memory = open_memory(model)
    shared = tokens(40)
    prompts = [shared + tokens(50, seed=seed) for seed in (2, 3)]
    sessions = [memory.session(prompt, chunk_tokens=32) for prompt in prompts]
    said: list[list[torch.Tensor]] = [[], []]
    for end in (32, 64, 90):
        for prompt, session, logits in zip(prompts, sessions, said):
            logits.append(run(model, prompt[:end], session, cuts=(end,)))
            memory.cache.check_integrity()
    for prompt, session, logits in zip(prompts, sessions, said):
        assert torch.equal(torch.cat(logits), run(model, prompt))
        session.finish()


def test_an_open_session_is_named_when_memory_runs_short(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    memory = open_memory(tiny("llama"), device_tokens=96)
    forgotten = memory.session(tokens(70))
    with pytest.raises(AdmissionRefusedError, match="1 open sessions hold memory until they"):
        memory.session(tokens(70, seed=2))
    forgotten.abort()


def test_tenants_share_nothing(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    memory = open_memory(tiny("llama"))
    for tenant, cached in (("a", 0), ("b", 0), ("a", 32)):
        with memory.session(tokens(40), namespace=tenant) as session:
            assert session.cached_tokens == cached
            ids = row(tokens(40)[session.computed :])
            memory.model(input_ids=ids, **session.cache.arguments)


def test_closing_the_memory_leaves_the_model_as_it_was(
    tiny: Any, tokens: Callable[..., list[int]]
) -> None:
    model = tiny("deepseek_v32")
    before = model(row(tokens(40))).logits
    memory = ModelMemory.open(
        model, sparse_on_host=True, device_tokens=512, host_tokens=512, page_size=16
    )
    assert torch.equal(model(row(tokens(40))).logits, before), "passes without a session change"
    memory.close()
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert torch.equal(model(row(tokens(40))).logits, before)


def test_a_sparse_model_moves_less_than_it_would_densely(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]], run: Any
) -> None:
    model = tiny("deepseek_v32")
    memory = open_memory(
        model, sparse_on_host=True, components={"hisparse": {"hot_tokens": 64, "max_running": 2}}
    )
    prompt = tokens(200)
    with memory.session(prompt, chunk_tokens=32) as session:
        run(model, prompt, session)
    cuts = (*range(193, 201),)
    with memory.session(prompt, chunk_tokens=32) as session:
        assert session.cached_tokens == 192
        run(model, prompt, session, cuts=cuts)
        assert session.swapped.rows_moved < session.rows_dense / 2
    assert session.rows_dense == 4 * sum(range(192, 200))


def test_memories_and_sessions_print_their_state(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    memory = open_memory(tiny("llama"))
    prompt = tokens(40)
    with memory.session(prompt) as session:
        assert repr(session) == "<Session 0 of 40 tokens computed, 0 cached>"
    assert repr(session) == "<Session 0 of 40 tokens computed, 0 cached, ended>"
    assert repr(memory).startswith("<ModelMemory of LlamaForCausalLM: <Cache full: page size 16, ")
