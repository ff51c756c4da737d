"""How long requests wait, by a clock that the test turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from prometheus_client import Histogram

from kvgraft_testing.stepped import SteppedTransferEngine
from kvgraft_transformers import ModelMemory
from kvgraft_transformers.engine import Engine, EngineSettings, GenerationRequest
from kvgraft_transformers.tiny import build_tiny_model

from .serving_inside import serve_inside


class Clock:
    """Seconds, as the test says."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_wait_is_measured_where_it_is(tiny: Any, tokens: Callable[..., list[int]]) -> None:
    bus, clock = SteppedTransferEngine(), Clock()
    memory = ModelMemory.open(
        tiny("llama", torch.float64),
        page_size=16,
        device_tokens=128,
        host_tokens=256,
        write_policy="write-through",
        probe_tokens=0,
        load=None,
        transfers=bus,
    )
    engine = Engine(memory, EngineSettings(max_running=1), clock)
    seen = engine.latencies

    def n_and_sum(histogram: Histogram) -> tuple[float, float]:
        (metric,) = histogram.collect()
        told = {each.name.rpartition("_")[2]: each.value for each in metric.samples}
        return told["count"], told["sum"]

    def step_until(done: Callable[[], bool], seconds: float) -> None:
        """Steps of so many seconds."""
        while not done():
            clock.now += seconds
            engine.step()

    prompt = tokens(60)
    first = engine.submit(GenerationRequest(prompt, 3, ignore_end=True))
    waits = engine.submit(GenerationRequest(tokens(60, 2), 1))
    step_until(lambda: first.finish is not None, 1.0)
    assert n_and_sum(seen.queue) == (1, 1.0)
    assert n_and_sum(seen.first_token) == (1, 1.0)
    assert n_and_sum(seen.between_tokens) == (2, 2.0)
    assert n_and_sum(seen.whole) == (1, 3.0)
    assert n_and_sum(seen.load_back) == (0, 0.0)
    step_until(lambda: waits.finish is not None, 10.0)
    assert n_and_sum(seen.queue) == (2, 1.0 + 13.0)  # it waited for the first one's place

    bus.run_all()
    memory.cache.poll()
    memory.cache.evict("full", 8)
    again = engine.submit(GenerationRequest(prompt, 1))
    clock.now += 0.5
    engine.step()
    assert again in engine.schedule.loading
    clock.now += 4.0
    bus.run_all()
    step_until(lambda: again.finish is not None, 0.0)
    assert again.host_tokens == 48
    assert n_and_sum(seen.load_back) == (1, 4.0)
    assert n_and_sum(seen.queue) == (3, 14.0 + 0.5)
    assert n_and_sum(seen.first_token)[0] == n_and_sum(seen.whole)[0] == 3
    engine.close()


def test_the_server_shows_histograms_and_hits() -> None:
    with serve_inside(build_tiny_model("gemma3_text"), host_tokens=1024) as inside:
        prompt = list(range(3, 203))
        for _ in range(2):
            inside.complete(prompt, max_tokens=4, ignore_eos=True)
        lines = inside.get("/metrics").text.splitlines()
    samples = {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")
    }
    assert samples["kvgraft_time_to_first_token_seconds_count"] == 2
    assert samples["kvgraft_inter_token_latency_seconds_count"] == 6
    assert samples["kvgraft_e2e_request_latency_seconds_count"] == 2
    assert samples["kvgraft_request_queue_time_seconds_count"] == 2
    assert samples["kvgraft_load_back_time_seconds_count"] == 0
    assert samples['kvgraft_time_to_first_token_seconds_bucket{le="+Inf"}'] == 2
    assert samples["kvgraft_time_to_first_token_seconds_sum"] > 0
    assert samples['kvgraft_hit_slots_total{component="full",tier="device"}'] == 12
    assert samples['kvgraft_hit_slots_total{component="swa",tier="device"}'] > 0
    assert "# TYPE kvgraft_time_to_first_token_seconds histogram" in lines
