"""The server when the model fails."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from kvgraft_transformers.engine import Engine
from kvgraft_transformers.serving.app import ServedModel, build_app
from kvgraft_transformers.serving.text import TextStream, Tokenizer
from kvgraft_transformers.serving.worker import EngineWorker
from kvgraft_transformers.tiny import build_tiny_model
from kvgraft_transformers.tiny_tokenizer import build_tiny_tokenizer


class Fuse:
    """A layer's hook that raises while it is blown."""

    blown = False

    def __call__(self, *_: object) -> None:
        if self.blown:
            raise RuntimeError("the device fell over")


def test_a_pass_that_fails_is_a_server_error_and_serving_goes_on() -> None:
    model, fuse = build_tiny_model("llama"), Fuse()
    model.model.layers[1].register_forward_hook(fuse)
    engine = Engine.open(model, device_tokens=512, page_size=16)
    worker = EngineWorker(engine)
    worker.start()
    served = ServedModel("tiny", worker, Tokenizer(build_tiny_tokenizer()), 8192, 8192)
    body = {"model": "tiny", "prompt": "x = 1", "max_tokens": 4, "temperature": 0}

    async def talk() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=build_app(served))
        async with httpx.AsyncClient(transport=transport, base_url="http://served") as client:
            good = await client.post("/v1/completions", json=body)
            fuse.blown = True
            bad = await client.post("/v1/completions", json=body)
            fuse.blown = False
            again = await client.post("/v1/completions", json=body)
            metrics = await client.get("/metrics")
        return [good, bad, again, metrics]

    good, bad, again, metrics = asyncio.run(talk())
    assert bad.status_code == 500
    assert bad.json()["error"]["message"] == "the engine failed: RuntimeError: the device fell over"
    assert bad.json()["error"]["type"] == "server_error"
    assert again.json()["choices"] == good.json()["choices"]
    assert "kvgraft_failed_total 1.0" in metrics.text
    assert "kvgraft_failed_steps_total 0.0" in metrics.text
    worker.stop()
    assert not worker.alive
    assert not engine.memory.cache.requests


def test_requests_in_flight_hear_of_a_shutdown() -> None:
    engine = Engine.open(build_tiny_model("llama"), device_tokens=4096, page_size=16)
    worker = EngineWorker(engine)
    worker.start()
    served = ServedModel("tiny", worker, Tokenizer(build_tiny_tokenizer()), 8192, 8192)
    body = {"model": "tiny", "prompt": "x = 1", "max_tokens": 3000, "temperature": 0}

    async def talk() -> httpx.Response:
        transport = httpx.ASGITransport(app=build_app(served))
        async with httpx.AsyncClient(transport=transport, base_url="http://served") as client:
            asked = asyncio.create_task(client.post("/v1/completions", json=body))
            while not engine.schedule.running:
                await asyncio.sleep(0.01)
            worker.stop()
            return await asked

    reply = asyncio.run(talk())
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"
    assert "shutting down" in reply.json()["error"]["message"]


def test_an_engine_that_keeps_failing_is_given_up_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine.open(build_tiny_model("llama"), device_tokens=512, page_size=16)
    worker = EngineWorker(engine)
    worker.start()
    served = ServedModel("tiny", worker, Tokenizer(build_tiny_tokenizer()), 8192, 8192)
    body = {"model": "tiny", "prompt": "x = 1", "max_tokens": 4, "temperature": 0}

    def wrong(*_: object) -> int:
        raise RuntimeError("a book is wrong")

    async def talk() -> tuple[list[httpx.Response], httpx.Response]:
        transport = httpx.ASGITransport(app=build_app(served))
        async with httpx.AsyncClient(transport=transport, base_url="http://served") as client:
            monkeypatch.setattr(engine.memory.cache, "next_chunk", wrong)
            replies = []
            for _ in range(5):
                replies.append(await client.post("/v1/completions", json=body))
            worker.stop()
            return [*replies, await client.post("/v1/completions", json=body)], await client.get(
                "/health"
            )

    replies, health = asyncio.run(talk())
    assert [reply.status_code for reply in replies] == [500] * 6
    assert "a book is wrong" in replies[0].json()["error"]["message"]
    assert "the engine has stopped" in replies[-1].json()["error"]["message"]
    assert health.status_code == 503
    assert not engine.memory.cache.requests


def test_text_that_cannot_be_decoded_is_a_server_error_not_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine.open(build_tiny_model("llama"), device_tokens=512, page_size=16)
    worker = EngineWorker(engine)
    worker.start()
    served = ServedModel("tiny", worker, Tokenizer(build_tiny_tokenizer()), 8192, 8192)
    body = {"model": "tiny", "prompt": "x = 1", "max_tokens": 4, "temperature": 0}

    def wrong(*_: object) -> str:
        raise TypeError("no such byte")

    monkeypatch.setattr(TextStream, "push", wrong)

    async def talk() -> httpx.Response:
        transport = httpx.ASGITransport(app=build_app(served))
        async with httpx.AsyncClient(transport=transport, base_url="http://served") as client:
            return await client.post("/v1/completions", json=body)

    reply = asyncio.run(talk())
    worker.stop()
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == "the server failed: TypeError"
    assert not engine.memory.cache.requests
