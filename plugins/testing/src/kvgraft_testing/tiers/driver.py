"""A tier of any kind, as the clauses drive it: the same few calls over an engine's own classes."""

from __future__ import annotations

import abc
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from kvgraft.errors import ContractViolation

__all__ = [
    "LONGEST_S",
    "PAGE_NBYTES",
    "Key",
    "Kind",
    "OpenTier",
    "Setting",
    "Target",
    "fail",
    "key",
    "keys",
    "page",
    "pages",
]

LONGEST_S = 20.0
"""Seconds after which an answer that has not come is a failure."""

PAGE_NBYTES = 64 << 10
"""Bytes of a page where a clause needs no other size."""


class Key(NamedTuple):
    """A page's name.

    Attributes:
        digest: 32 bytes: the engine's hash of the tokens, the tenant and the adapter.
        group: a group of layers whose pages are kept apart from another group's.
    """

    digest: bytes
    group: int = 0


class Setting(NamedTuple):
    """Facts about an engine that decide the meaning of a page's bytes and are not in its key.

    Attributes:
        model: the model's name.
        dtype: element type of the KV cache.
        page_tokens: tokens of a page.
        page_blocks: blocks of a page, where a page's key is the hash of its last block.
        layers: names of the layers.
        layout: the order of a page's bytes.
        rank: this process's rank, of `n_ranks` with tensor parallelism.
        n_ranks: ranks that divide a page's heads.
        stage: pipeline stage, of `n_stages`.
        n_stages: pipeline stages.
        tenant: whose data it is, where the key does not say it.
        page_nbytes: bytes of a page; equal where engines can differ and have pages of one size.
    """

    model: str = "tiny"
    dtype: str = "float16"
    page_tokens: int = 16
    page_blocks: int = 1
    layers: tuple[str, ...] = ("layers.0", "layers.1")
    layout: str = "page_first"
    rank: int = 0
    n_ranks: int = 1
    stage: int = 0
    n_stages: int = 1
    tenant: str = ""
    page_nbytes: int = PAGE_NBYTES


def key(number: int, group: int = 0) -> Key:
    """The key of a page by its number."""
    return Key(hashlib.sha256(number.to_bytes(8, "big")).digest(), group)


def keys(n: int, first: int = 0) -> list[Key]:
    """Keys of `n` pages."""
    return [key(number) for number in range(first, first + n)]


def page(name: Key, setting: Setting) -> bytes:
    """The bytes of a page: random, by its key and the engine's setting."""
    seed = hashlib.sha256(repr((name, setting)).encode()).digest()
    return random.Random(seed).randbytes(setting.page_nbytes)


def pages(names: Sequence[Key], setting: Setting) -> dict[Key, bytes]:
    """The bytes of pages by their keys."""
    return {name: page(name, setting) for name in names}


def fail(rule: str, name: str, evidence: str) -> None:
    """Report a broken rule.

    Raises:
        ContractViolation: always.
    """
    raise ContractViolation(rule, name, evidence)


@dataclass(frozen=True)
class Target:
    """The tier to check, and how to open it.

    Attributes:
        name: for reports: `pkg.mod:Class`, or a store's URL.
        loaded: the class; None for a URL.
        options: its options; `{directory}` and `{capacity}` in them are replaced.
        capacity_nbytes: the value for `{capacity}`.
        is_durable: whether it promises that pages outlive its process.
    """

    name: str
    loaded: type | None
    options: Mapping[str, Any]
    capacity_nbytes: int = 64 << 20
    is_durable: bool = False

    def filled(self, directory: Path) -> dict[str, Any]:
        """The options for one directory."""
        return {name: self._filled(value, directory) for name, value in self.options.items()}

    def text(self, directory: Path) -> str:
        """The name with its placeholders replaced, as a store's URL has them."""
        return str(self._filled(self.name, directory))

    @property
    def is_bounded(self) -> bool:
        """Whether it is told a capacity."""
        return "{capacity}" in repr((self.name, dict(self.options)))

    def _filled(self, value: Any, directory: Path) -> Any:
        if isinstance(value, dict):
            return {name: self._filled(each, directory) for name, each in value.items()}
        if isinstance(value, list):
            return [self._filled(each, directory) for each in value]
        if value == "{capacity}":
            return self.capacity_nbytes
        if not isinstance(value, str):
            return value
        text = value.replace("{capacity}", str(self.capacity_nbytes))
        return text.replace("{directory}", str(directory))


class OpenTier(abc.ABC):
    """An open tier. Calls come from one thread, as a scheduler's do."""

    @abc.abstractmethod
    def store(self, *batches: Mapping[Key, bytes]) -> list[bool]:
        """Store batches, all in flight at once, and wait.

        The memory that a batch came from is overwritten as soon as the tier says that it is done.

        Returns:
            Per batch, whether the tier says that it stored all of it.
        """

    @abc.abstractmethod
    def load(self, *batches: Sequence[Key]) -> dict[Key, bytes]:
        """Look pages up and load those that are found, all batches in flight at once.

        Nothing of them is left in the memory above the tier. The tier may be asked for pages of a
        batch in one job, which may end at the first page that is missing.

        Returns:
            The pages that the tier says it loaded, as they are in memory when it says so.
        """

    @abc.abstractmethod
    def begin(self, stored: Mapping[Key, bytes], loaded: Sequence[Key]) -> None:
        """Begin to store and to load, and leave both in flight."""

    @abc.abstractmethod
    def load_beside(self, *batches: Sequence[Key]) -> dict[Key, bytes]:
        """As `load`, while jobs that `begin` left are in flight."""

    @abc.abstractmethod
    def close(self) -> None:
        """Shut down. Jobs that are in flight may be given up.

        Raises:
            ContractViolation: O11, memory changed afterwards.
        """


class Kind(abc.ABC):
    """A kind of tier: how to open one, and what an engine tells it.

    Attributes:
        name: for reports.
        groups: how many groups of layers its keys can name.
        settings: settings that differ from the first one in one thing, by its name: the first one,
            or that of the engine that stores, and the other one.
        drains: whether the engine has a call that waits for jobs in flight.
        loads_in_parallel: whether the engine loads a second page while the first is on its way.
    """

    name: ClassVar[str]
    groups: ClassVar[int] = 1
    settings: ClassVar[Mapping[str, tuple[Setting, Setting]]]
    drains: ClassVar[bool] = False
    loads_in_parallel: ClassVar[bool] = True

    @abc.abstractmethod
    def open(self, target: Target, directory: Path, setting: Setting, n_pages: int) -> OpenTier:
        """Open the tier with memory for `n_pages` above it."""

    @abc.abstractmethod
    def version(self) -> str:
        """The engine whose classes drive it, with its version."""

    def drain(self, tier: OpenTier) -> None:
        """Wait for jobs in flight, as an engine does before it uses the memory for something else.

        Raises:
            ContractViolation: O11, memory changed afterwards.
        """
        raise NotImplementedError(f"{self.name} has no such call, see `drains`")

    def clean(self, process: int) -> None:  # noqa: B027 - most leave nothing
        """Remove what a killed process left outside of the tier's directory."""
