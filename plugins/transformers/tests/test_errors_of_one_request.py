"""An error of the cache that is about one request ends that one; the others are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from kvgraft import TransferError
from kvgraft.transfers import CpuTransferEngine, Fence, PlaneCopy, Ticket
from kvgraft_transformers import ModelMemory
from kvgraft_transformers.engine import Engine, EngineSettings, FinishReason, GenerationRequest
from kvgraft_transformers.errors import PassError, SessionError
from kvgraft_transformers.serving.app import build_app
from kvgraft_transformers.tiny import build_tiny_model

from .greedy import best_tokens
from .test_worker import BODY, serve

POLICY = """
from kvgraft.policies.recency import LeastRecentlyUsed

class Thrown(LeastRecentlyUsed):
    name, classifies = "thrown", True

    def finished(self, use, stamp, hint):
        if use.prompt_tokens == 50:
            raise KeyError("fifty tokens")
        return 0
"""
"""An eviction policy that cannot take the end of some requests."""


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same, installed under this name."""
    (tmp_path / "kvgraft_thrown.py").write_text(POLICY)
    info = tmp_path / "kvgraft_thrown-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvgraft-thrown\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvgraft.policies]\nthrown = kvgraft_thrown:Thrown\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "thrown"


SMALL = EngineSettings(chunk_tokens=32, max_running=4, reserve_tokens=8, step_tokens=96)
POOLS: dict[str, Any] = {
    "page_size": 16,
    "device_tokens": 512,
    "host_tokens": 1024,
    "probe_tokens": 0,
}


def test_a_request_that_cannot_finish_ends_alone_with_the_reason(
    policy: str, tokens: Callable[..., list[int]]
) -> None:
    model = build_tiny_model("llama", dtype=torch.float64)
    engine = Engine.open(model, SMALL, policy=policy, guard="on", **POOLS)
    prompts = [tokens(n, n) for n in (40, 50, 60)]
    ended = engine.generate([GenerationRequest(each, 6, ignore_end=True) for each in prompts])
    finishes = [each.finish for each in ended]
    assert finishes == [FinishReason.LENGTH, FinishReason.FAILED, FinishReason.LENGTH]
    assert "policy 'thrown': `finished` raised KeyError: 'fifty tokens'" in str(ended[1].error)
    for each, prompt in zip(ended, prompts):
        assert each.tokens == best_tokens(model, prompt, each.tokens)
    assert engine.totals.failed == 1
    assert not engine.memory.cache.requests
    engine.memory.cache.check_integrity()
    engine.close()


def test_clients_of_a_server_are_answered_beside_one_whose_request_cannot_finish(
    policy: str,
) -> None:
    model = build_tiny_model("llama")
    served = serve(Engine.open(model, SMALL, policy=policy, **POOLS))
    worker = served.worker
    bodies = [{**BODY, "prompt": [7] * n, "max_tokens": 40} for n in (30, 50, 60)]

    async def talk() -> tuple[list[httpx.Response], httpx.Response]:
        transport = httpx.ASGITransport(app=build_app(served))
        async with httpx.AsyncClient(transport=transport, base_url="http://served") as client:
            asked = [client.post("/v1/completions", json=body) for body in bodies]
            return list(await asyncio.gather(*asked)), await client.get("/metrics")

    replies, metrics = asyncio.run(talk())
    worker.stop()
    assert [reply.status_code for reply in replies] == [200, 500, 200]
    assert "policy 'thrown': `finished` raised KeyError" in replies[1].json()["error"]["message"]
    assert "kvgraft_failed_total 1.0" in metrics.text
    assert "kvgraft_failed_steps_total 0.0" in metrics.text
    assert not worker.engine.memory.cache.requests


class Refusing(CpuTransferEngine):
    """Takes all copies but those of some calls."""

    def __init__(self, refuses: set[int]) -> None:
        super().__init__()
        self.refuses, self.n_calls = refuses, 0

    def submit(self, copies: Sequence[PlaneCopy], fence: Fence | None = None) -> Ticket:
        self.n_calls += 1
        if self.n_calls in self.refuses:
            raise TransferError("no descriptor left")
        return super().submit(copies, fence)


@pytest.mark.parametrize("refused", [2, 6])
def test_a_copy_that_cannot_begin_ends_one_request_of_a_pass(
    refused: int, tokens: Callable[..., list[int]]
) -> None:
    model, transfers = build_tiny_model("llama", dtype=torch.float64), Refusing({refused})
    settings: dict[str, Any] = {**POOLS, "write_policy": "write-through", "guard": "on"}
    engine = Engine.open(model, SMALL, transfers=transfers, **settings)
    prompts = [tokens(20, seed) for seed in range(4)]
    ended = engine.generate([GenerationRequest(each, 30, ignore_end=True) for each in prompts])
    (failed,) = [each for each in ended if each.finish is FinishReason.FAILED]
    assert "no descriptor left" in str(failed.error)
    assert bool(failed.tokens) == (refused > 4), "the first four are copies of prompts"
    for each, prompt in zip(ended, prompts):
        assert len(each.tokens) == 30 or each is failed
        assert not each.tokens or each.tokens == best_tokens(model, prompt, each.tokens)
    assert not engine.memory.cache.requests
    engine.memory.cache.check_integrity()
    engine.close()


def test_a_pass_over_several_sessions_names_those_that_failed_and_keeps_its_output(
    tokens: Callable[..., list[int]],
) -> None:
    model, transfers = build_tiny_model("llama", dtype=torch.float64), Refusing({1})
    settings: dict[str, Any] = {**POOLS, "write_policy": "write-through", "guard": "on"}
    with ModelMemory.open(
        model, transfers=transfers, load=None, chunk_tokens=32, **settings
    ) as memory:
        prompts = [tokens(20, seed) for seed in range(2)]
        pair = [memory.session(each, max_new_tokens=8) for each in prompts]
        cache = memory.session_cache(pair)
        with torch.no_grad(), pytest.raises(PassError, match="1 of 2 sessions failed") as raised:
            model(input_ids=torch.tensor(prompts), **cache.arguments)
        assert raised.value.output.logits.shape[:2] == (2, 20)
        failed, other = pair
        with pytest.raises(SessionError, match="no descriptor left; abort it"):
            failed.finish()
        failed.abort()
        assert other.error is None
        assert other.finish() == 16


class _Breaks:
    """A constraint with a fault of its own."""

    ended = False

    def __init__(self, where: str) -> None:
        self._where = where

    def allowed(self) -> torch.Tensor:
        if self._where == "allowed":
            raise KeyError("a constraint's own")
        return torch.ones(512, dtype=torch.bool)

    def accept(self, token: int) -> None:
        if self._where == "accept":
            raise KeyError("a constraint's own")


@pytest.mark.parametrize("where", ["allowed", "accept"])
def test_a_constraint_that_fails_ends_its_request_and_no_other(where: str, tiny: Any) -> None:
    engine = Engine.open(tiny("llama"), device_tokens=512, probe_tokens=0)
    plain = engine.submit(GenerationRequest([5, 6, 7], 4, ignore_end=True))
    broken = engine.submit(GenerationRequest([5, 6, 8], 3, constraint=_Breaks(where)))
    for _ in engine.run():
        pass
    assert (broken.finish, type(broken.error)) == (FinishReason.FAILED, KeyError)
    assert (plain.finish, len(plain.tokens)) == (FinishReason.LENGTH, 4)
    engine.close()
