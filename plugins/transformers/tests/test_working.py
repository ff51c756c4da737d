"""Working copies: what a pass reads of the pools, what it keeps, and what that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from kvgraft import ConfigError
from kvgraft_transformers import ModelMemory
from kvgraft_transformers.engine import Engine, EngineSettings, GenerationRequest
from kvgraft_transformers.session_cache import SessionCache
from kvgraft_transformers.working import Columns, Places, Views, WorkingCopy


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[Any]:
    with torch.no_grad():
        yield


def decode(model: Any, cache: SessionCache, n_tokens: int) -> torch.Tensor:
    """Logits of `n_tokens` given tokens in one batch, `[batch, n_tokens, vocabulary]`."""
    sessions, logits = cache.sessions, []
    for number in range(n_tokens):
        starts = torch.tensor([session.computed for session in sessions])
        columns = torch.arange(int(starts.max()) + 1)
        output = model(
            input_ids=torch.full((len(sessions), 1), 7 + number),
            position_ids=starts[:, None],
            attention_mask=(columns >= starts.max() - starts[:, None]).long(),
            **cache.arguments,
            use_cache=True,
        )
        logits.append(output.logits[:, -1])
    return torch.stack(logits, dim=1)


def _behind(computed: torch.Tensor, first: int) -> list[Places]:
    return [Places(rows[first:], rows[:0], rows[:0]) for rows in computed]


def spoil(memory: ModelMemory) -> None:
    """Change all that the pools hold."""
    for each in memory.cache.mounted:
        for plane in each.component.device.planes:
            plane.add_(1.0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v32"])
def test_a_decoded_token_reads_nothing_of_the_pools(
    family: str, tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    said: list[torch.Tensor] = []
    for n_kept in (None, None, 0):
        memory = open_memory(tiny(family), guard="off", probe_tokens=0, working_tokens=n_kept)
        session = memory.session(tokens(70), max_new_tokens=12)
        cache = session.cache
        memory.model(input_ids=torch.tensor([tokens(70)]), **cache.arguments)
        if len(said) == 1:
            spoil(memory)
        said.append(
            torch.stack(
                [
                    memory.model(input_ids=torch.tensor([[7 + n]]), **cache.arguments).logits
                    for n in range(12)
                ]
            )
        )
        session.abort()
    untouched, spoilt, gathered = said
    assert torch.equal(untouched, spoilt)
    assert torch.equal(untouched, gathered)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_sessions_that_change_batches_say_the_same_with_and_without_copies(
    family: str, tiny: Any, open_memory: Any, run: Any, tokens: Callable[..., list[int]]
) -> None:
    model, said = tiny(family), []
    for n_kept, by_session in ((None, True), (0, True), (0, False)):
        memory = open_memory(model, working_tokens=n_kept, probe_tokens=0)
        sessions = []
        for seed, length in enumerate((60, 45, 33)):
            sessions.append(memory.session(tokens(length, seed=seed), max_new_tokens=80))
            run(model, tokens(length, seed=seed), sessions[-1])
        a, b, c = sessions
        caches = {
            name: memory.session_cache(group)
            for name, group in {"ab": [a, b], "abc": [a, b, c], "a": [a], "b": [b]}.items()
        }
        for cache in caches.values():
            cache._by_session = by_session  # False as on an accelerator
        # alone, both advance alike; then one advances, and the padding is another
        batches = ("ab", 20), ("b", 3), ("a", 3), ("ab", 4), ("b", 2), ("ab", 4), ("abc", 25)
        said.append([decode(model, caches[name], n_tokens) for name, n_tokens in batches])
        for session in sessions:
            session.finish()
        assert memory.working.n_tokens == 0
    for kept, gathered, together in zip(*said):
        assert torch.equal(kept, gathered)
        assert torch.equal(kept, together)


def test_a_session_that_began_in_inference_mode_goes_on_without_it(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    memory = open_memory(tiny("llama"), probe_tokens=0)
    with memory.session(tokens(20), max_new_tokens=4) as session:
        with torch.inference_mode():
            memory.model(input_ids=torch.tensor([tokens(20)]), **session.cache.arguments)
        memory.model(input_ids=torch.tensor([[7]]), **session.cache.arguments)
        assert session.computed == 21


def test_copies_beyond_the_bound_are_not_kept(
    tiny: Any, open_memory: Any, tokens: Callable[..., list[int]]
) -> None:
    memory = open_memory(tiny("llama"), working_tokens=100, probe_tokens=0)
    first, second = (memory.session(tokens(60, seed=n), max_new_tokens=50) for n in (1, 2))
    for session, seed, held in ((first, 1, 60), (second, 2, 60), (first, None, 61)):
        ids = torch.tensor([tokens(60, seed=seed) if seed else [9]])
        memory.model(input_ids=ids, **session.cache.arguments)
        assert memory.working.n_tokens == held
    first.finish()
    memory.model(input_ids=torch.tensor([[9]]), **second.cache.arguments)
    assert memory.working.n_tokens == 61
    second.finish()
    assert memory.working.n_tokens == 0


def test_an_engine_keeps_the_copies_of_decoding_requests_while_others_prefill(
    tiny: Any, tokens: Callable[..., list[int]]
) -> None:
    settings = EngineSettings(chunk_tokens=32, step_tokens=40)
    engine = Engine.open(tiny("llama"), settings, device_tokens=1024, probe_tokens=0)
    decoding = [engine.submit(GenerationRequest(tokens(20, seed=n), 30)) for n in (1, 2)]
    while not all(each.tokens for each in decoding):
        engine.step()
    engine.step()
    kept = engine._cache_for(decoding)
    long = engine.submit(GenerationRequest(tokens(200, seed=3), 2))
    while not long.tokens:
        engine.step()
        assert long.tokens or engine._cache_for(decoding) is kept
    for _ in engine.run():
        pass
    assert engine.memory.working.n_tokens == 0
    engine.close()


def test_a_copy_of_a_window_moves_on_and_keeps_its_size() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.full((400, 2, 3), torch.nan)
    tokens = torch.randn((1, 2, 400, 3), generator=generator)
    copy, window, largest, past = WorkingCopy(Views.of(rows, 16)), 20, 0, 0
    while past < 380:
        end = past + int(torch.randint(1, 20, (1,), generator=generator))
        first = max(0, past - window + 1)
        computed = torch.arange(past)[None]
        columns = Columns(first, past, end, torch.arange(past, end), partial(_behind, computed))
        seen = copy.extend(columns, tokens[:, :, past:end])
        assert torch.equal(seen, tokens[:, :, first:end])
        largest = max(largest, seen.untyped_storage().nbytes() // (2 * 3 * 4))
        past = end
    assert largest <= window + 20 + 64


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_a_bound_that_is_no_number_of_tokens_is_refused(value: object, tiny: Any) -> None:
    with pytest.raises(ConfigError, match=r"working_tokens=.*0 keeps no working copies"):
        ModelMemory.open(tiny("llama"), working_tokens=value)  # type: ignore[arg-type]
