"""The costs of loads and passes are measured on the engine, by a clock that the test turns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
import torch

from kvgraft.transfers import CpuTransferEngine, Fence, PlaneCopy, Ticket
from kvgraft_transformers import ModelMemory
from kvgraft_transformers.engine import Engine, EngineSettings
from kvgraft_transformers.engine.measuring import measured_load
from kvgraft_transformers.tiny import build_tiny_model

from .test_latencies import Clock

PASS_S, TOKENS_S = 0.018, 10_000.0
LATENCY_S, BYTES_S = 0.004, 1e7


class TimedTransfers(CpuTransferEngine):
    """Copies that take a time of the clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def submit(self, copies: Sequence[PlaneCopy], fence: Fence | None = None) -> Ticket:
        ticket = super().submit(copies, fence)
        nbytes = sum(len(each.source_rows) * each.source[0].nbytes for each in copies)
        self.clock.now += LATENCY_S + nbytes / BYTES_S
        return ticket


def test_passes_and_loads_are_measured_as_they_are(tiny: Any) -> None:
    model, clock = tiny("llama", torch.float64), Clock()

    def takes(model: Any, given: Any, named: dict[str, Any]) -> None:
        clock.now += max(PASS_S, named["input_ids"].numel() / TOKENS_S)

    hook = model.register_forward_pre_hook(takes, with_kwargs=True)
    memory = ModelMemory.open(
        model,
        page_size=16,
        device_tokens=2048,
        host_tokens=1024,
        probe_tokens=0,
        load=None,
        transfers=TimedTransfers(clock),
    )
    engine = Engine(memory, EngineSettings(step_tokens=512))
    try:
        found = measured_load(engine, clock)
    finally:
        hook.remove()
        engine.close()
    assert found is not None
    assert found.pass_tokens == 512
    assert found.pass_s == pytest.approx(PASS_S)
    assert found.prefill_tokens_s == pytest.approx(TOKENS_S)
    assert found.bandwidth_bytes_s == pytest.approx(BYTES_S)
    assert found.latency_s == pytest.approx(LATENCY_S)


def test_a_model_is_measured_on_pools_of_its_own(tiny: Any) -> None:
    settings = EngineSettings(chunk_tokens=32, step_tokens=64)
    found = Engine.measured_load(tiny("llama", torch.float64), settings, host_tokens=64)
    assert found is not None
    assert found.pass_s > 0
    assert found.pass_tokens == 64


def test_no_prompt_is_longer_than_the_context() -> None:
    """Its positions are learned: another one is an error, which on a device ends the process."""
    settings = EngineSettings(step_tokens=512)
    model = build_tiny_model("gpt2", max_position_embeddings=160)
    found = Engine.measured_load(model, settings, host_tokens=64)
    assert found is not None
    assert found.pass_tokens == 512
    short = build_tiny_model("gpt2", max_position_embeddings=64)
    assert Engine.measured_load(short, settings, host_tokens=64) is None


@pytest.mark.parametrize(("kind", "host_tokens"), [("llama", 0), ("bamba", 64)])
def test_nothing_is_measured_where_nothing_is_weighed(
    tiny: Any, kind: str, host_tokens: int
) -> None:
    model = tiny(kind, torch.float64)
    assert Engine.measured_load(model, EngineSettings(), host_tokens=host_tokens) is None


@pytest.mark.gpu
def test_an_engine_on_an_accelerator_measures_what_it_is_not_told() -> None:
    model = build_tiny_model("llama").to("cuda")
    with closing(Engine.open(model, device_tokens=4096, host_tokens=4096)) as engine:
        load = engine.memory.cache.config.load
        assert load is not None
        assert load.pass_s > 0
