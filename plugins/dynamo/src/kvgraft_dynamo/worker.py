"""The engine behind Dynamo's interface for engines.

Dynamo's runtime registers the model, passes requests on, and ends the worker. The engine runs in
its own thread (`EngineWorker`); here are coroutines of Dynamo's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
from collections.abc import AsyncIterator, Mapping
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ZmqSource
from dynamo.common.constants import DisaggregationMode
from dynamo.llm import exceptions

from kvgraft import KvgraftError
from kvgraft_dynamo.handing import Handing, Role
from kvgraft_dynamo.requests import chunk_of, generation_request
from kvgraft_transformers.engine import FinishReason, GenerationRequest, NewToken
from kvgraft_transformers.serving.app import ServedModel
from kvgraft_transformers.serving.worker import ShutdownError

__all__ = ["DynamoEngine", "mode_of"]

WATCH_S = 0.5
"""Seconds between two looks at whether the engine's thread runs."""

log = logging.getLogger("kvgraft.dynamo")


class DynamoEngine(LLMEngine):
    """A model that is served, as Dynamo calls it.

    Args:
        served: the model with its running engine.
        model: the directory or name of the model, which the frontend reads its tokenizer from.
        role: the part of each request that this worker computes.
        handing: the hand-over to or from other workers; None for both parts.

    Attributes:
        failed: whether the engine ended by itself.
    """

    def __init__(
        self,
        served: ServedModel,
        model: str,
        role: Role = Role.BOTH,
        handing: Handing | None = None,
    ) -> None:
        self._served = served
        self._model = model
        self._role = role
        self._handing = handing
        self._engine = served.worker.engine
        self._leaving: dict[str, asyncio.Event] = {}
        self._watching: asyncio.Task[None] | None = None
        self.failed = False

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[DynamoEngine, WorkerConfig]:
        """Not used: `kvgraft dynamo-worker` reads the arguments."""
        raise NotImplementedError("kvgraft dynamo-worker makes this engine")

    async def start(self, worker_id: int) -> EngineConfig:
        """Return the figures that Dynamo registers: context, page size, pages, limits."""
        del worker_id
        served, memory = self._served, self._engine.memory
        self._watching = asyncio.create_task(self._watch())
        settings = self._engine.settings
        return EngineConfig(
            model=self._model,
            served_model_name=served.name,
            llm=LlmRegistration(
                context_length=self._room_tokens,
                kv_cache_block_size=memory.page_size,
                total_kv_blocks=memory.room_tokens // memory.page_size,
                max_num_seqs=settings.max_running,
                max_num_batched_tokens=settings.step_tokens,
            ),
        )

    async def kv_event_sources(self) -> list[ZmqSource]:
        """Name the address at which the cache's events are published, in vLLM's format."""
        endpoint = self._served.kv_events
        return [] if endpoint is None else [ZmqSource(endpoint)]

    async def health_check_payload(self) -> dict[str, Any] | None:
        """A request of one token."""
        payload: dict[str, Any] = build_health_check_payload(0)
        return payload

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncIterator[Any]:
        """Yield tokens as they come."""
        left = self._leaving.setdefault(context.id(), asyncio.Event())
        try:
            asked = await self._begin(request)
            tokens = self._served.worker.generate(asked)
            async with contextlib.aclosing(tokens):
                async for new in _until(tokens, left):
                    yield {**chunk_of(new), **await self._handed(new)}
        except ShutdownError as error:
            raise exceptions.EngineShutdown(str(error)) from error
        except KvgraftError as error:
            raise exceptions.InvalidArgument(str(error)) from error
        finally:
            self._leaving.pop(context.id(), None)

    async def abort(self, context: Any) -> None:
        """End a request whose client has gone."""
        if (left := self._leaving.get(context.id())) is not None:
            left.set()

    async def cleanup(self) -> None:
        """Stop the engine; may be called twice."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if self._handing is not None:
            await self._handing.close()
        await asyncio.to_thread(self._served.worker.stop)

    async def _begin(self, request: Mapping[str, Any]) -> GenerationRequest:
        """The part of a request that is computed here, once its data from elsewhere has come."""
        asked = generation_request(request, self._room_tokens)
        if self._handing is None:
            return asked
        if self._role is Role.PREFILL:
            return dataclasses.replace(asked, max_new_tokens=1, min_new_tokens=0)
        given = (request.get("prefill_result") or {}).get("disaggregated_params") or {}
        await self._handing.take(given, asked.tokens, asked.namespace)
        return asked

    async def _handed(self, new: NewToken) -> dict[str, Any]:
        """Fields of the last chunk of a prompt, for the worker that decodes."""
        ended = new.finish in (FinishReason.STOP, FinishReason.LENGTH)
        if self._handing is None or self._role is not Role.PREFILL or not ended:
            return {}
        asked = new.generation.request
        return {"disaggregated_params": await self._handing.offer(asked.tokens, asked.namespace)}

    @property
    def _room_tokens(self) -> int:
        return min(self._served.context_tokens, self._served.room_tokens)

    async def _watch(self) -> None:
        """End the process, by Dynamo's own way, if the engine ended."""
        while self._served.worker.alive:
            await asyncio.sleep(WATCH_S)
        self.failed = True
        log.error("the engine has stopped; the worker ends")
        os.kill(os.getpid(), signal.SIGTERM)


def mode_of(role: Role) -> DisaggregationMode:
    """Dynamo's name of a role."""
    names = {Role.PREFILL: DisaggregationMode.PREFILL, Role.DECODE: DisaggregationMode.DECODE}
    return names.get(role, DisaggregationMode.AGGREGATED)


async def _until(tokens: AsyncIterator[NewToken], left: asyncio.Event) -> AsyncIterator[NewToken]:
    """The tokens that come before the client leaves."""
    leaving = asyncio.create_task(left.wait())
    try:
        while True:
            coming = asyncio.ensure_future(anext(tokens))
            await asyncio.wait({coming, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                coming.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await coming
                return
            try:
                new = coming.result()
            except StopAsyncIteration:
                return
            yield new
    finally:
        leaving.cancel()
