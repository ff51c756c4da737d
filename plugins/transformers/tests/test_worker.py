"""The server when the model fails."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from kvgraft_transformers.engine import Engine
from kvgraft_transformers.engine.drafting import PromptLookup
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


BODY = {"model": "tiny", "prompt": "x = 1", "max_tokens": 4, "temperature": 0}
"""A completion's request."""


def serve(engine: Engine) -> ServedModel:
    """A model behind a worker that runs."""
    worker = EngineWorker(engine)
    worker.start()
    return ServedModel("tiny", worker, Tokenizer(build_tiny_tokenizer()), 8192, 8192)


def serve_tiny(device_tokens: int = 512) -> ServedModel:
    """A tiny model, in the same way."""
    model = build_tiny_model("llama")
    return serve(Engine.open(model, device_tokens=device_tokens, page_size=16, probe_tokens=0))


def test_a_pass_that_fails_is_a_server_error_and_serving_goes_on() -> None:
    model, fuse = build_tiny_model("llama"), Fuse()
    model.model.layers[1].register_forward_hook(fuse)
    engine = Engine.open(model, device_tokens=512, page_size=16, probe_tokens=0)
    served = serve(engine)
    worker = served.worker

    async def talk() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=build_app(served))
        async with httpx.AsyncClient(transport=transport, base_url="http://served") as client:
            good = await client.post("/v1/completions", json=BODY)
            fuse.blown = True
            bad = await client.post("/v1/completions", json=BODY)
            fuse.blown = False
            again = await client.post("/v1/completions", json=BODY)
            metrics = await client.get("/metrics")
        return [good, bad, again, metrics]

    good, bad, again, metrics = asyncio.run(talk())
    assert bad.status_code == 500
    assert bad.json()["error"]["message"] == "the engine failed: RuntimeError: the device fell over"
    assert bad.json()["error"]["type"] == "server_error"
    assert again.json()["choices"] == good.json()["choices"]
    assert "kvgraft_failed_total 1.0" in metrics.text
    assert "kvgraft_failed_steps_total 0.0" in metrics.text
    assert "kvgraft_admitted_requests_total 3.0" in metrics.text
    assert "kvgraft_match_duration_seconds_count 3.0" in metrics.text
    worker.stop()
    assert not worker.alive
    assert not engine.memory.cache.requests


def test_requests_in_flight_hear_of_a_shutdown() -> None:
    served = serve_tiny(device_tokens=4096)
    worker, engine = served.worker, served.worker.engine
    long = {**BODY, "max_tokens": 3000}

    async def talk() -> httpx.Response:
        transport = httpx.ASGITransport(app=build_app(served))
        async with httpx.AsyncClient(transport=transport, base_url="http://served") as client:
            asked = asyncio.create_task(client.post("/v1/completions", json=long))
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
    served = serve_tiny()
    worker, engine = served.worker, served.worker.engine

    def wrong(*_: object) -> int:
        raise RuntimeError("a book is wrong")

    async def talk() -> tuple[list[httpx.Response], httpx.Response]:
        transport = httpx.ASGITransport(app=build_app(served))
        async with httpx.AsyncClient(transport=transport, base_url="http://served") as client:
            monkeypatch.setattr(engine.memory.cache, "next_chunk", wrong)
            replies = []
            for _ in range(5):
                replies.append(await client.post("/v1/completions", json=BODY))
            worker.stop()
            return [*replies, await client.post("/v1/completions", json=BODY)], await client.get(
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
    served = serve_tiny()
    worker, engine = served.worker, served.worker.engine

    def wrong(*_: object) -> str:
        raise TypeError("no such byte")

    monkeypatch.setattr(TextStream, "push", wrong)

    async def talk() -> httpx.Response:
        transport = httpx.ASGITransport(app=build_app(served))
        async with httpx.AsyncClient(transport=transport, base_url="http://served") as client:
            return await client.post("/v1/completions", json=BODY)

    reply = asyncio.run(talk())
    worker.stop()
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == "the server failed: TypeError"
    assert not engine.memory.cache.requests


def test_a_publisher_of_events_is_closed_before_its_cache() -> None:
    model = build_tiny_model("llama")
    engine = Engine.open(model, device_tokens=512, page_size=16, probe_tokens=0)
    ended: list[str] = []

    class Told(PromptLookup):
        def close(self) -> None:
            ended.append("engine")

    engine.drafter = Told(1)
    worker = EngineWorker(engine, [lambda: ended.append("publisher")])
    worker.start()
    worker.stop()
    assert ended == ["publisher", "engine"]
