"""The fingerprint: everything that decides the meaning of a page's bytes and is not in its hash.

SGLang's page hash covers the tokens, those before them, and the request's extra key and cache salt.
An engine reads only data of its own fingerprint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvgraft_storage import Fingerprint

__all__ = ["KV", "Engine", "Plain", "Pool"]

Plain = object
"""None, a bool, an int, a str, bytes, or a tuple of these; facts of a pool hold no bool."""

KV = "kv"
"""The name of the pool that every model has."""


@dataclass(frozen=True)
class Pool:
    """Everything about a host pool of SGLang that decides the bytes of a page.

    Attributes:
        name: the pool's, such as `kv` or `mamba`.
        kind: its class.
        layout: the layout's name, such as `page_first`.
        page_size: tokens of a page.
        page_nbytes: bytes of a page; 0 for a pool that only indexes pages whose data is in other
            pools.
        dtype: element type.
        parts: whether a page is stored from its buffers, in order, instead of as one flat tensor.
        shape: sizes by name, such as layers and heads.
    """

    name: str
    kind: str
    layout: str
    page_size: int
    page_nbytes: int
    dtype: str
    parts: bool = False
    shape: tuple[tuple[str, Plain], ...] = ()

    @property
    def facts(self) -> Plain:
        """All of it, as plain values."""
        return (
            self.kind,
            self.layout,
            self.page_size,
            self.page_nbytes,
            self.dtype,
            "buffers" if self.parts else "flat",
            self.shape,
        )


@dataclass(frozen=True)
class Engine:
    """Everything about an engine that decides the bytes of a page.

    Attributes:
        version: SGLang's version: layouts change between versions.
        model: its name, and the format of its host pool if SGLang gives one.
        weights: identifies the weights.
        replicated: whether all tensor-parallel ranks hold equal KV data, as in MLA; then one rank
            stores it.
        ranks: rank and size by dimension: `tp`, `pp`, `cp` and `dcp`.
        computes: other settings that change the values: quantization, overrides, kernels.
        salt: see `BackendSettings`.
    """

    version: str
    model: str
    weights: str
    replicated: bool
    ranks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    computes: Plain = None
    salt: str | None = None

    def fingerprint(self, kv: Pool) -> Fingerprint:
        """The fingerprint that the store is used with.

        Args:
            kv: the pool of the KV cache; `namespace` separates the other pools.
        """
        ranks = dict(self.ranks)
        if self.replicated and "tp" in ranks:
            ranks["tp"] = (0, 1)
        return Fingerprint(
            model=self.model,
            weights=self.weights,
            dtype=kv.dtype,
            page_size=kv.page_size,
            geometry={KV: kv.facts},
            sharding=(self.replicated, *((name, *ranks[name]) for name in sorted(ranks))),
            salt=("sglang", self.version, self.computes, self.salt),
        )

    def namespace(self, pool: Pool) -> Plain:
        """The namespace of a pool's data: pools of one name and another form get another one.

        States such as Mamba's differ between ranks that hold equal KV data.
        """
        own = self.replicated and pool.name == "mamba"
        return (pool.facts, self.ranks.get("tp") if own else None)
