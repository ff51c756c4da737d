"""The fingerprint: everything that decides what a page's bytes mean and its hash does not say.

SGLang's page hash names the tokens, those before them, and the request's extra key and cache salt.
Data is only read by an engine whose fingerprint is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvgraft_storage import Fingerprint

__all__ = ["KV", "Engine", "Plain", "Pool"]

Plain = object
"""None, a bool, an int, a str, bytes, or a tuple of these; no bool in what a pool says."""

KV = "kv"
"""The name of the pool that every model has."""


@dataclass(frozen=True)
class Pool:
    """A host pool of SGLang as far as it decides the bytes of a page.

    Attributes:
        name: the pool's, such as `kv` or `mamba`.
        kind: its class.
        layout: the layout's name, such as `page_first`.
        page_size: tokens of a page.
        page_nbytes: bytes of a page; 0 for a pool that only numbers pages whose data is in others.
        dtype: element type.
        parts: whether a page is stored from its buffers, in their order, not as one flat tensor.
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
    """An engine as far as it decides the bytes of a page.

    Attributes:
        version: SGLang's: layouts change between versions.
        model: its name, with the format of its host pool where SGLang gives one.
        weights: what tells these weights from others.
        replicated: all ranks of tensor parallelism hold equal KV data, however many there are, as
            in MLA; one stores it.
        ranks: rank and size by dimension: `tp`, `pp`, `cp` and `dcp`.
        computes: what else changes the values: quantization, overrides, kernels.
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
            kv: the pool of the KV cache; others are told apart by `namespace`.
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
        """Keeps the data of one form of a pool apart from others under the same name.

        States such as Mamba's differ between ranks that hold equal KV data.
        """
        own = self.replicated and pool.name == "mamba"
        return (pool.facts, self.ranks.get("tp") if own else None)
