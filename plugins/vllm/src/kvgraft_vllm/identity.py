"""The fingerprint: everything that decides the meaning of a chunk's bytes and is not in its hash.

vLLM's block hash covers the tokens, those before them, the LoRA adapter, images and the cache salt.
An engine reads only data of its own fingerprint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvgraft_storage import Fingerprint

__all__ = ["Engine", "Group", "Plain", "group_name"]

Plain = object
"""None, a bool, an int, a str, bytes, or a tuple of these."""


@dataclass(frozen=True)
class Group:
    """A KV cache group of vLLM: layers whose blocks are kept and dropped together.

    Attributes:
        layers: names of the layers.
        tokens_per_block: tokens of one block.
        window_chunks: chunks that are needed to resume: None for all, as in full attention.
    """

    layers: tuple[str, ...]
    tokens_per_block: int
    window_chunks: int | None = None


@dataclass(frozen=True)
class Engine:
    """Everything about an engine that decides the bytes of a chunk.

    Attributes:
        version: vLLM's version, major and minor: layouts change between them.
        model: its name.
        weights: identifies the weights.
        dtype: element type of the KV cache.
        tokens_per_hash: tokens that one block hash covers.
        blocks_per_chunk: blocks of one chunk, the unit that is stored.
        chunk_nbytes: bytes of one chunk of all workers together.
        groups: in vLLM's order.
        layout: the layout's name and other facts about it.
        parallel: sizes of parallelism by name: they decide how a chunk is divided.
        computes: other settings that change the values: quantization, RoPE, overrides.
        hashing: algorithm and seed of the block hashes.
        salt: see `TierSettings`.
    """

    version: str
    model: str
    weights: str
    dtype: str
    tokens_per_hash: int
    blocks_per_chunk: int
    chunk_nbytes: int
    groups: tuple[Group, ...]
    layout: Plain = None
    parallel: Mapping[str, int | bool] = field(default_factory=dict)
    computes: Plain = None
    hashing: Plain = None
    salt: str | None = None

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint that the store is opened with."""
        return Fingerprint(
            model=self.model,
            weights=self.weights,
            dtype=self.dtype,
            page_size=self.tokens_per_hash,
            geometry={
                group_name(number): (group.tokens_per_block, group.window_chunks, group.layers)
                for number, group in enumerate(self.groups)
            },
            sharding=tuple(sorted(self.parallel.items())),
            salt=(
                "vllm",
                self.version,
                (self.blocks_per_chunk, self.chunk_nbytes),
                self.layout,
                self.computes,
                self.hashing,
                self.salt,
            ),
        )

    def tokens_per_chunk(self, group: int) -> int:
        """Tokens of a chunk; 0 for a group that is not known."""
        if group >= len(self.groups):
            return 0
        return self.groups[group].tokens_per_block * self.blocks_per_chunk


def group_name(number: int) -> str:
    """A group's name in addresses."""
    return f"group{number}"
