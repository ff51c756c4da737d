"""vLLM's KV events of a cache inside its scheduler, with vLLM's hashes and groups."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from kvgraft_observe.events import Cleared, EventStream, Evicted, Stored
from kvgraft_vllm.block_layout import BlockLayout

__all__ = ["KvEvents", "Removed"]

MEDIUM = "GPU"

Vllm = Any
"""An object of vLLM, which mypy does not see."""


class Removed(BlockRemoved, tag="BlockRemoved"):  # type: ignore[misc, call-arg]
    """vLLM's event with the reason; readers skip fields that they do not know.

    Attributes:
        reason: why the blocks left, as in `PoolStats.evicted`.
    """

    reason: str | None = None


class KvEvents:
    """Translates the events of one cache.

    Args:
        stream: the cache's events, none taken yet.
        layout: says which component a group belongs to.
    """

    def __init__(self, stream: EventStream, layout: BlockLayout) -> None:
        self._stream = stream
        stream.take()
        self._groups = {each.component: each.groups for each in layout.ranges}
        self._block_size = layout.block_size
        self._hashes: dict[tuple[str, bytes], Vllm] = {}
        """vLLM's hash by component and the hash of a page."""

    def take(self, request: Vllm) -> list[Vllm]:
        """The events since the last call; all new data in them is of that request."""
        told: list[Vllm] = []
        for event in self._stream.take():
            if isinstance(event, Cleared):
                self._hashes.clear()
                told.append(AllBlocksCleared())
            elif isinstance(event, Stored):
                told += self._stored(event, request)
            elif isinstance(event, Evicted):
                told += self._removed(event)
        return told

    def _stored(self, event: Stored, request: Vllm) -> list[Vllm]:
        start, end, size = event.pages.start, event.pages.end, self._block_size
        hashes = [maybe_convert_block_hash(each) for each in request.block_hashes[start:end]]
        for page, named in zip(event.pages.hashes, hashes):
            self._hashes[event.component, page] = named
        before = request.block_hashes[start - 1] if start else None
        adapter = request.lora_request
        keys, at = [], 0
        for first in range(start * size, end * size, size):
            own, at = generate_block_hash_extra_keys(request, first, first + size, at)
            keys.append(own)
        told = {
            "block_hashes": hashes,
            "parent_block_hash": None if before is None else maybe_convert_block_hash(before),
            "token_ids": request.all_token_ids[start * size : end * size],
            "block_size": size,
            "lora_id": adapter.adapter_id if adapter else None,
            "lora_name": adapter.lora_name if adapter else None,
            "medium": MEDIUM,
            "extra_keys": to_event_extra_keys(keys),
            "session_id": getattr(request, "session_id", None),
        }
        told = {name: told[name] for name in BlockStored.__struct_fields__ if name in told}
        return [BlockStored(**told, group_idx=group) for group in self._groups[event.component]]

    def _removed(self, event: Evicted) -> list[Vllm]:
        hashes = [self._hashes.pop((event.component, page)) for page in event.pages.hashes]
        return [
            Removed(block_hashes=hashes, medium=MEDIUM, group_idx=group, reason=event.cause)
            for group in self._groups[event.component]
        ]
