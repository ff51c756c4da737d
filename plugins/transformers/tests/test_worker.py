"""What the server does when the model fails."""

from __future__ import annotations

import asyncio

import httpx

from kvgraft_transformers.engine import Engine
from kvgraft_transformers.serving.app import ServedModel, build_app
from kvgraft_transformers.serving.text import Tokenizer
from kvgraft_transformers.serving.worker import EngineWorker
from kvgraft_transformers.tiny import build_tiny_model
from kvgraft_transformers.tiny_tokenizer import build_tiny_tokenizer


class Fuse:
    """A layer's hook that raises while it is blown."""

    blown = False

    def __call__(self, *_: object) -> None:
        if self.blown:
            raise RuntimeError("the device fell over")


def test_a_pass_that_fails_is_a_server_error_and_serving_goes_on():
    model, fuse = build_tiny_model("llama"), Fuse()
    model.model.layers[1].register_forward_hook(fuse)
    engine = Engine.open(model, device_tokens=512, page_size=16)
    worker = EngineWorker(engine)
    worker.start()
    served = ServedModel("tiny", worker, Tokenizer(build_tiny_tokenizer()), 8192)
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
    assert "kvgraft_failed_passes_total 1.0" in metrics.text
    worker.stop()
    assert not worker.alive
    assert not engine.memory.cache.requests


def test_requests_in_flight_hear_of_a_shutdown():
    engine = Engine.open(build_tiny_model("llama"), device_tokens=4096, page_size=16)
    worker = EngineWorker(engine)
    worker.start()
    served = ServedModel("tiny", worker, Tokenizer(build_tiny_tokenizer()), 8192)
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
    assert reply.status_code == 500
    assert "shutting down" in reply.json()["error"]["message"]
