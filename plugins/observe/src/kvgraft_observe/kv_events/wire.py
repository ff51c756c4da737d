"""The messages of vLLM's KV events, as its versions from 0.32 on read them.

A batch is an array, an event in it a map with its kind as `type`. Fields have vLLM's names; a field
is left out where it has its default. `reason` is ours: readers skip fields that they do not know.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["CPU", "END", "GPU", "AllBlocksCleared", "Batch", "BlockRemoved", "BlockStored"]

GPU, CPU = "GPU", "CPU"
"""Where blocks are, as `medium`: DEVICE and HOST."""

END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Consecutive blocks are there now.

    Attributes:
        block_hashes: their names.
        parent_block_hash: the name of the block before; None at the start of a sequence.
        token_ids: their tokens.
        block_size: tokens of each.
        lora_id: always None; adapters are identified by name.
        medium: where they are.
        lora_name: the adapter they were computed with.
        extra_keys: by block, its identity beyond the tokens: an adapter, a salt, and of an image
            in it the identity with its start, counted from the block's.
        group_idx: index of the cache group, which is the component.
        kv_cache_spec_kind: the group's kind of attention.
        kv_cache_spec_sliding_window: tokens of its window.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks are gone.

    Attributes:
        block_hashes: their names.
        medium: where they were.
        group_idx: index of the cache group, which is the component.
        reason: why they left, as in `PoolStats.evicted`.
    """

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    reason: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """All blocks are gone."""


class Batch(msgspec.Struct, array_like=True, gc=False):
    """The payload of one message.

    Attributes:
        ts: when it was made, in seconds of Unix time.
        events: in the order in which they are to be applied.
        data_parallel_rank: data-parallel rank of the engine.
    """

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int
