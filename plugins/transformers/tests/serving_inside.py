"""A server in the tests' own process: no sockets, any model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from kvgraft_transformers.engine import Engine, EngineSettings
from kvgraft_transformers.serving.app import ServedModel, build_app
from kvgraft_transformers.serving.text import Tokenizer
from kvgraft_transformers.serving.worker import EngineWorker
from kvgraft_transformers.tiny_tokenizer import build_tiny_tokenizer

__all__ = ["Inside", "serve_inside"]


class Inside:
    """Talks to an application.

    Attributes:
        served: the application's model.
    """

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.app = build_app(served, log_requests=True)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        """A request for greedy tokens of the tiny model, unless the body says otherwise."""
        whole = {"model": "tiny", "max_tokens": 8, "temperature": 0, **body}
        return self.request("POST", path, json=whole, **options)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def talk() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://served") as client:
                return await client.request(method, path, timeout=60, **options)

        return asyncio.run(talk())

    def complete(self, prompt: object, **body: Any) -> dict[str, Any]:
        """The one choice of a completion, with the reply's usage."""
        return self._choice("/v1/completions", {"prompt": prompt, **body})

    def chat(self, text: str, **body: Any) -> dict[str, Any]:
        """The one choice of a chat of one message, with the reply's usage."""
        messages = [{"role": "user", "content": text}]
        return self._choice("/v1/chat/completions", {"messages": messages, **body})

    def _choice(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = self.post(path, body)
        assert reply.status_code == 200, reply.text
        whole = reply.json()
        (choice,) = whole["choices"]
        return {**choice, "usage": whole["usage"]}

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The one choice of each chunk of a stream."""
        reply = self.post(path, {**body, "stream": True})
        assert reply.status_code == 200, reply.text
        lines = [line for line in reply.text.split("\n\n") if line]
        assert lines.pop() == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        return [chunk["choices"][0] for chunk in chunks]


@contextmanager
def serve_inside(
    model: Any, *, tokenizer: Any = None, limits: EngineSettings | None = None, **memory: Any
) -> Iterator[Inside]:
    """A tiny model behind the application; its books are recomputed at the end."""
    options = {"device_tokens": 4096, "page_size": 16, "probe_tokens": 0, **memory}
    engine = Engine.open(model, limits, **options)
    worker = EngineWorker(engine)
    worker.start()
    text = Tokenizer(tokenizer or build_tiny_tokenizer())
    try:
        yield Inside(ServedModel("tiny", worker, text, 8192, 8192))
    finally:
        worker.stop()
        engine.memory.cache.check_integrity()
        assert not engine.memory.cache.requests
