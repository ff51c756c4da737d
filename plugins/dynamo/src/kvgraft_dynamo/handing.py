"""Requests go from workers that prefill to workers that decode, over `kvgraft-nixl`.

prefill    computes the prompt and one token, then offers what is cached of the prompt
frontend   sends the offer to a decode worker, beside the request
decode     takes the data over into its cache, and runs the request, which finds it there

A request whose data does not come is computed where it decodes.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import enum
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from kvgraft import ConfigError, KvgraftError, TokenKey
from kvgraft_transformers.identity import digest_weights
from kvgraft_transformers.serving.worker import EngineFailureError, EngineWorker

__all__ = ["Handing", "Role"]

OFFER = "kvgraft_offer"
"""The offer's name in what the frontend passes on."""

PAUSE_S = 0.002
"""Pause between two polls while data is on its way."""

log = logging.getLogger("kvgraft.dynamo")


class Role(str, enum.Enum):
    """The part of each request that a worker computes."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Handing:
    """The hand-over of one worker, for coroutines.

    Args:
        worker: the engine's running thread.
        handed: the engine's end of the hand-over.
    """

    def __init__(self, worker: EngineWorker, handed: Any) -> None:
        self._worker = worker
        self._handed = handed
        self._polling: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, worker: EngineWorker, name: str) -> Handing:
        """Open the hand-over in the engine's thread.

        Args:
            worker: the engine's running thread.
            name: the model's name, which both sides must have in common.

        Raises:
            ConfigError: the hand-over or NIXL is not installed, or the pools cannot be read.
        """
        try:
            from kvgraft_nixl import HandOver, NixlTransport
        except ImportError as error:
            raise ConfigError(
                f"--role needs kvgraft-nixl, and there is no {error.name}; in a clone of kvgraft, "
                "pip install ./plugins/nixl"
            ) from error
        memory = worker.engine.memory
        weights = digest_weights(memory.model)

        def make() -> Any:
            return HandOver(memory.cache, NixlTransport(), model=name, weights=weights)

        return cls(worker, await worker.call(make))

    async def offer(self, tokens: Sequence[int], namespace: object) -> dict[str, Any]:
        """Offer what is cached of a prompt; the answer goes to the worker that decodes it."""
        if len(tokens) < 2:
            return {}
        key = TokenKey(list(tokens[:-1]), namespace=namespace)
        offer = await self._worker.call(lambda: self._handed.offer(key))
        if offer is None:
            return {}
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll_while_offered())
        return {OFFER: base64.b64encode(bytes(offer)).decode()}

    async def take(
        self, given: Mapping[str, Any], tokens: Sequence[int], namespace: object
    ) -> None:
        """Take an offered prompt's data into the cache; nothing if there is none, or it fails."""
        try:
            offer = base64.b64decode(given.get(OFFER, ""), validate=True)
        except (binascii.Error, TypeError, ValueError):
            offer = b""
        if not offer:
            return
        key = TokenKey(list(tokens), namespace=namespace)
        arrival = await self._worker.call(lambda: self._handed.accept(offer, key))
        try:
            while not arrival.ended:
                await asyncio.sleep(PAUSE_S)
                await self._worker.call(self._handed.poll)
            if arrival.failed:
                log.warning("a prompt is computed again: %s", arrival.reason or arrival.decision)
        finally:
            self._worker.post(lambda: self._handed.give_up(arrival))

    async def close(self) -> None:
        """End it, before the engine."""
        if self._polling is not None:
            self._polling.cancel()
        with contextlib.suppress(EngineFailureError, KvgraftError):
            await self._worker.call(self._handed.close)

    async def _poll_while_offered(self) -> None:
        while self._handed.n_offers:
            await self._worker.call(self._handed.poll)
            await asyncio.sleep(PAUSE_S)
