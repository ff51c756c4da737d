"""Shows the cache to people and routers: state, explanations, and events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool

from kvgraft import ConfigError, TokenKey
from kvgraft.parts import EventStream
from kvgraft_observe.events import Cleared, Event, Evicted, Hit, Moved, Stored
from kvgraft_transformers.serving.protocol import ApiError
from kvgraft_transformers.serving.watching import HitLog, explanation_as_json
from kvgraft_transformers.serving.worker import EngineFailureError, EngineWorker

__all__ = ["Inspection"]

EVENTS_EVERY_S = 0.1
"""Pause between two polls for events."""

HEARTBEAT_S = 15.0
"""Longest silence of an event stream; then a comment shows whether its reader is there."""

MOST_READERS = 8
"""Most concurrent event streams; each costs the engine a copy of every event."""


class Inspection:
    """Reads and clears the cache of one worker, on the engine's thread.

    Args:
        worker: the engine's thread.
    """

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker
        self._cache = worker.engine.memory.cache
        self._hits = HitLog(self._cache)
        self._readers = 0

    async def state(self) -> dict[str, Any]:
        """Every pool's slots by owner, and recently admitted requests."""
        return await self._worker.call(self._state)

    def _state(self) -> dict[str, Any]:
        stats, schedule = self._cache.stats(), self._worker.engine.schedule
        components = {
            name: {
                "hits": component.hits._asdict(),
                "tiers": {
                    tier: {**pool.owners, "capacity": pool.capacity, "evicted": dict(pool.evicted)}
                    for tier, pool in (("device", component.device), ("host", component.host))
                    if pool is not None
                },
            }
            for name, component in stats.components.items()
        }
        lines = ("fetching", "waiting", "following", "loading", "running")
        return {
            "page_size": self._cache.config.page_size,
            "tokens": stats.tokens._asdict(),
            "requests": {name: len(getattr(schedule, name)) for name in lines},
            "components": components,
            "hits": self._hits.look(),
        }

    async def explain(self, prompt: Sequence[int], salt: str | None) -> dict[str, Any]:
        """Explain where a prompt would resume, by component."""
        try:
            key = TokenKey(prompt, namespace=salt)
        except ConfigError as error:
            raise ApiError(str(error)) from error
        return explanation_as_json(await self._worker.call(lambda: self._cache.explain(key)))

    async def clear(self) -> dict[str, Any]:
        """Drop all data on the device and the host, so that nothing old is hit.

        Data that running requests hold is dropped when they end. Data in storage stays.
        """
        cleared = await self._worker.call(self._cache.clear)
        return {
            "freed_slots": {"device": dict(cleared.device), "host": dict(cleared.host)},
            "held_slots": {"device": dict(cleared.held_device), "host": dict(cleared.held_host)},
            "complete": cleared.complete,
        }

    # -- events

    async def events(self) -> AsyncGenerator[str, None]:
        """Server-sent events of every change, from a snapshot on; until the server ends.

        Raises:
            ApiError: there are too many readers.
        """
        if self._readers >= MOST_READERS:
            raise ApiError(
                f"{self._readers} event streams are open, the most at a time", status=503
            )
        self._readers += 1
        stream: EventStream | None = None
        try:
            stream = await self._worker.call(self._cache.events)
            silent_s = 0.0
            while not self._worker.draining:
                events = await self._worker.call(stream.take)
                if events:
                    silent_s = 0.0
                    yield await run_in_threadpool(self._as_text, events)
                elif silent_s >= HEARTBEAT_S:
                    silent_s = 0.0
                    yield ": nothing new\n\n"
                await asyncio.sleep(EVENTS_EVERY_S)
                silent_s += EVENTS_EVERY_S
        except EngineFailureError:
            return
        finally:
            self._readers -= 1
            if stream is not None:
                self._worker.post(stream.close)

    def _as_text(self, events: Sequence[Event]) -> str:
        return "".join(map(self._one_as_text, events))

    def _one_as_text(self, event: Event) -> str:
        data = self._as_json(event)
        return f"event: {type(event).__name__.lower()}\ndata: {json.dumps(data)}\n\n"

    def _as_json(self, event: Event) -> dict[str, Any]:
        if isinstance(event, Cleared):
            return {"lost": event.lost, "page_size": self._cache.config.page_size}
        if isinstance(event, Hit):
            slots = {name: of._asdict() for name, of in event.slots.items()}
            tiers = {"device": event.device, "host": event.host, "storage": event.storage}
            return {"prompt": event.prompt, **tiers, "slots": slots}
        assert isinstance(event, Stored | Moved | Evicted)
        data: dict[str, Any] = {"component": event.component, "tier": event.tier.value}
        if isinstance(event, Moved):
            data["source"] = event.source.value
        if isinstance(event, Evicted):
            data["cause"] = event.cause
        parent = event.pages.parent
        return {
            **data,
            "start": event.pages.start,
            "parent": None if parent is None else parent.hex(),
            "hashes": [each.hex() for each in event.pages.hashes],
        }
