"""An engine over storage: queued requests wait for it, nobody else does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from kvgraft import ConfigError
from kvgraft_storage import Status, Value
from kvgraft_storage.tier import StorageTier
from kvgraft_testing.storage import MemoryBackend
from kvgraft_transformers import ModelMemory
from kvgraft_transformers.engine import Engine, EngineSettings, FinishReason, GenerationRequest

LIMITS = EngineSettings(chunk_tokens=32, max_running=4, reserve_tokens=8, step_tokens=96)
POOLS: dict[str, Any] = {
    "page_size": 16,
    "device_tokens": 512,
    "host_tokens": 1024,
    "guard": "on",
    "load": None,
    "probe_tokens": 0,
}
POLICIES = {"store": "write-through", "prefetch": "wait-complete", "threshold_tokens": 16}


class Shelf(MemoryBackend):
    """Outlives the caches attached to it; while a gate is closed, fetches or stores wait.

    Attributes:
        gate, store_gate: of fetches and of stores.
        fault: the error that fetches and stores raise; nothing if None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.store_gate = threading.Event()
        self.store_gate.set()
        self.fault: Exception | None = None

    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        self.gate.wait()
        if self.fault is not None:
            raise self.fault
        return super().get_into(keys, values, deadline_s)

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        self.store_gate.wait()
        if self.fault is not None:
            raise self.fault
        return super().set_from(keys, values, deadline_s)

    def close(self) -> None:
        self.gate.set()
        self.store_gate.set()


Opener = Callable[..., Engine]


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def opened(shelf: Shelf, tiny: Any) -> Iterator[Opener]:
    """Engines over one store whose books are recomputed at the end, when nothing is held."""
    engines: list[Engine] = []

    def build(
        family: str = "gemma3_text",
        limits: EngineSettings = LIMITS,
        storage: dict[str, Any] | None = None,
        **memory: Any,
    ) -> Engine:
        engine = Engine.open(
            tiny(family, torch.float64),
            limits,
            storage={**POLICIES, **(storage or {})},
            **{**POOLS, **memory},
        )
        tier_of(engine).attach(shelf)
        engines.append(engine)
        return engine

    yield build
    shelf.gate.set()
    for engine in engines:
        closed(engine)


def tier_of(engine: Engine) -> StorageTier:
    assert isinstance(engine.memory.cache.storage, StorageTier)
    return engine.memory.cache.storage


def closed(engine: Engine) -> None:
    cache = engine.memory.cache
    if cache.closed:
        return
    assert engine.idle
    assert cache.drain()
    cache.check_integrity()
    assert tier_of(engine).prefetching.nbytes_in_flight == 0
    for component in cache.tree.components:
        for ledger in (component.device, component.host):
            assert ledger is not None
            assert ledger.counts()["private"] == ledger.counts()["pinned"] == 0
    engine.close()


def stocked(opened: Opener, prompt: list[int], **settings: Any) -> list[int]:
    """Serve a prompt, so that it is stored; the answer."""
    engine = opened(**settings)
    (generation,) = engine.generate([GenerationRequest(prompt, 6, ignore_end=True)])
    closed(engine)
    return generation.tokens


def stepped(engine: Engine, until: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not until():
        assert time.monotonic() < deadline, "it did not come about"
        engine.step()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "lfm3"])
def test_a_cold_engine_answers_from_storage_and_says_so(
    family: str, opened: Any, tokens: Callable[..., list[int]]
) -> None:
    prompt = tokens(130)
    answer = stocked(opened, prompt, family=family)
    engine = opened(family=family)
    (generation,) = engine.generate([GenerationRequest(prompt, 6, ignore_end=True)])
    assert generation.tokens == answer
    assert generation.cached_tokens == generation.host_tokens == generation.storage_tokens == 128
    assert engine.totals.storage_tokens == engine.totals.cached_tokens == 128


def test_a_request_storage_keeps_waiting_holds_up_nobody(
    opened: Any, shelf: Any, tokens: Callable[..., list[int]]
) -> None:
    prompt = tokens(130)
    answer = stocked(opened, prompt)
    engine = opened()
    shelf.gate.clear()
    slow = engine.submit(GenerationRequest(prompt, 6, ignore_end=True))
    others = [
        engine.submit(GenerationRequest(tokens(12, seed=seed), 4, ignore_end=True))
        for seed in range(3)
    ]
    # too short to be looked for: in line at once
    assert engine.schedule.fetching == [slow]
    stepped(engine, lambda: all(each.finish is not None for each in others))
    assert engine.schedule.fetching == [slow]
    assert not engine.idle
    shelf.gate.set()
    stepped(engine, lambda: engine.idle)
    assert (slow.tokens, slow.storage_tokens) == (answer, 128)


def test_no_step_waits_for_storage_or_spins(
    opened: Any, shelf: Any, tokens: Callable[..., list[int]]
) -> None:
    stocked(opened, prompt := tokens(130))
    engine = opened()
    shelf.gate.clear()
    slow = engine.submit(GenerationRequest(prompt, 6))
    longest, steps, began, computed = 0.0, 0, time.monotonic(), time.thread_time()
    while time.monotonic() < began + 0.5:
        before = time.monotonic()
        assert engine.step() == []
        longest, steps = max(longest, time.monotonic() - before), steps + 1
    assert longest < 0.2
    assert 20 < steps < 600
    assert time.thread_time() - computed < 0.25
    engine.abort(slow)


def test_a_request_given_up_while_storage_is_asked_leaves_nothing(
    opened: Any, shelf: Any, tokens: Callable[..., list[int]]
) -> None:
    stocked(opened, prompt := tokens(130))
    engine = opened()
    shelf.gate.clear()
    generation = engine.submit(GenerationRequest(prompt, 6))
    stepped(engine, lambda: tier_of(engine).prefetching.nbytes_in_flight)
    engine.abort(generation)
    assert engine.idle
    assert generation.finish is FinishReason.ABORTED
    shelf.gate.set()
    stepped(engine, lambda: not tier_of(engine).prefetching.n_in_flight)
    assert tier_of(engine).counts()["prefetch in vain"] == 1


def test_closing_an_engine_gives_up_its_prefetches(
    opened: Any, shelf: Any, tokens: Callable[..., list[int]]
) -> None:
    stocked(opened, prompt := tokens(130))
    engine = opened()
    shelf.gate.clear()
    generation = engine.submit(GenerationRequest(prompt, 6))
    engine.close()
    assert generation.finish is FinishReason.ABORTED
    assert engine.memory.cache.closed


def test_closing_an_engine_waits_for_data_still_to_be_stored(
    opened: Any, shelf: Any, tokens: Callable[..., list[int]]
) -> None:
    engine = opened()
    shelf.store_gate.clear()
    engine.generate([GenerationRequest(prompt := tokens(130), 6, ignore_end=True)])
    assert engine.storing
    assert not shelf.stored
    threading.Timer(0.3, shelf.store_gate.set).start()
    engine.close()
    (again,) = opened().generate([GenerationRequest(prompt, 6, ignore_end=True)])
    assert again.storage_tokens == 128


def test_a_burst_on_a_small_host_resumes_from_storage_for_the_most_part(
    opened: Any, tokens: Callable[..., list[int]]
) -> None:
    requests = [GenerationRequest(tokens(130, seed=seed), 2, ignore_end=True) for seed in range(10)]
    limits = EngineSettings(chunk_tokens=64, max_running=2, reserve_tokens=8, step_tokens=96)
    stock = opened(limits=limits)
    for request in requests:
        stock.generate([request])
    answers = [each.tokens for each in stock.generate(requests)]
    closed(stock)
    engine = opened(limits=limits, host_tokens=400)
    generations = engine.generate(requests)
    assert [each.tokens for each in generations] == answers
    # How far prefetches are shrunk for want of room depends on when others end.
    assert engine.totals.storage_tokens >= 0.7 * 128 * len(requests), tier_of(engine).counts()


def test_a_time_out_lets_the_request_run_without(
    opened: Any, shelf: Any, tokens: Callable[..., list[int]]
) -> None:
    answer = stocked(opened, prompt := tokens(130))
    engine = opened(storage={"prefetch": "timeout", "prefetch_timeout_s": 0.05})
    shelf.gate.clear()
    (generation,) = engine.generate([GenerationRequest(prompt, 6, ignore_end=True)])
    assert (generation.tokens, generation.storage_tokens) == (answer, 0)


def test_best_effort_goes_on_fetching_for_a_request_that_does_not_fit_yet(
    opened: Any, shelf: Any, tokens: Callable[..., list[int]]
) -> None:
    answer = stocked(opened, prompt := tokens(130))
    engine = opened(storage={"prefetch": "best-effort"}, device_tokens=256)
    first = engine.submit(GenerationRequest(tokens(150, seed=3), 60, ignore_end=True))
    stepped(engine, lambda: first.tokens)
    shelf.gate.clear()
    second = engine.submit(GenerationRequest(prompt, 6, ignore_end=True))
    assert not engine.schedule.fetching
    engine.step()
    engine.step()
    assert engine.totals.deferrals, "it fits: the test shows nothing"
    shelf.gate.set()
    stepped(engine, lambda: engine.idle)
    assert (second.tokens, second.storage_tokens) == (answer, 128)


def test_storage_is_asked_again_for_a_request_that_made_room(
    opened: Any, tokens: Callable[..., list[int]]
) -> None:
    limits = EngineSettings(chunk_tokens=32, max_running=4, reserve_tokens=1, step_tokens=96)
    engine = opened(limits=limits, device_tokens=160)
    prompts = [tokens(20, seed=seed) for seed in range(4)]
    generations = engine.generate(
        GenerationRequest(prompt, 60, ignore_end=True) for prompt in prompts
    )
    assert engine.totals.retractions > 0
    assert tier_of(engine).counts()["prefetch started"] == 4 + engine.totals.retractions
    alone = opened(storage={"salt": "nothing shared"})
    expected = alone.generate(GenerationRequest(prompt, 60, ignore_end=True) for prompt in prompts)
    assert [each.tokens for each in generations] == [each.tokens for each in expected]


def test_a_request_that_never_fits_is_rejected_and_its_prefetch_ended(
    opened: Any, shelf: Any, tokens: Callable[..., list[int]]
) -> None:
    stocked(opened, prompt := tokens(130))
    engine = opened(storage={"prefetch": "best-effort"}, device_tokens=128)
    shelf.gate.clear()
    generation = engine.submit(GenerationRequest(prompt, 6))
    stepped(engine, lambda: generation.finish)
    assert generation.finish is FinishReason.REJECTED
    shelf.gate.set()
    stepped(engine, lambda: not tier_of(engine).prefetching.n_in_flight)


def test_a_store_that_fails_costs_the_hits_and_nothing_else(
    opened: Any, shelf: Any, tokens: Callable[..., list[int]]
) -> None:
    answer = stocked(opened, prompt := tokens(130))
    engine = opened()
    shelf.fault = OSError("no such store")
    (generation,) = engine.generate([GenerationRequest(prompt, 6, ignore_end=True)])
    assert (generation.tokens, generation.storage_tokens) == (answer, 0)
    shelf.fault = None


def test_a_namespace_storage_cannot_name_is_refused_with_nothing_queued(
    opened: Any, tokens: Callable[..., list[int]]
) -> None:
    engine = opened()
    with pytest.raises(ConfigError, match="canonical bytes"):
        engine.submit(GenerationRequest(tokens(40), 4, namespace=object()))
    assert engine.idle
    assert engine.totals.requests == 0


def test_a_session_waits_as_long_as_the_policy_says_and_is_then_begun(
    opened: Any, shelf: Any, tiny: Any, tokens: Callable[..., list[int]]
) -> None:
    stocked(opened, prompt := tokens(130))
    model = tiny("gemma3_text", torch.float64)
    policies = {**POLICIES, "prefetch": "timeout", "prefetch_timeout_s": 0.3}
    memory = ModelMemory.open(model, chunk_tokens=32, storage=policies, **POOLS)
    assert memory.cache.storage
    memory.cache.storage.attach(shelf)
    shelf.gate.clear()
    began = time.monotonic()
    with memory.session(prompt) as session:
        assert 0.3 <= time.monotonic() - began < 30
        assert session.cached_tokens == 0
        session.abort()
    shelf.gate.set()
    assert memory.cache.drain()
    with memory.session(prompt) as session:
        assert session.storage_tokens == 128
        session.abort()
    memory.close()
