"""Bare stores: a `StorageBackend` below kvgraft's own supervision, without an engine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import kvgraft
from kvgraft_storage import (
    Address,
    Fingerprint,
    Status,
    Storage,
    StorageBackend,
    SupervisionLimits,
    open_storage,
)
from kvgraft_testing.tiers.driver import (
    LONGEST_S,
    Key,
    Kind,
    OpenTier,
    Setting,
    Target,
    fail,
)

__all__ = ["StoreKind"]

AFTERWARDS_S = 0.5
"""Seconds for which memory is watched when it must not change any more."""

REUSED = b"\xee"


def _fingerprint(setting: Setting) -> Fingerprint:
    return Fingerprint(
        model=setting.model,
        weights="one",
        dtype=setting.dtype,
        page_size=setting.page_tokens,
        geometry={f"group{group}": setting.layers for group in range(StoreKind.groups)},
        sharding=(setting.rank, setting.n_ranks, setting.stage, setting.n_stages),
        salt=setting.layout,
    )


class StoreTier(OpenTier):
    """A store behind supervision; calls are tickets."""

    def __init__(self, name: str, backend: StorageBackend, setting: Setting) -> None:
        self._name = name
        self._setting = setting
        self._nbytes = setting.page_nbytes
        self._storage = Storage(
            _fingerprint(setting), backend, SupervisionLimits(failure_limit=1 << 30)
        )
        self._left: list[bytearray] = []

    def store(self, *batches: Mapping[Key, bytes]) -> list[bool]:
        jobs = []
        for batch in batches:
            memory = [bytearray(content) for content in batch.values()]
            jobs.append((self._storage.set(self._addresses(list(batch)), memory), memory))
        told = []
        for ticket, memory in jobs:
            told.append(set(self._statuses(ticket, "a store")) == {Status.OK})
            for each in memory:
                each[:] = REUSED * len(each)
        return told

    def load(self, *batches: Sequence[Key]) -> dict[Key, bytes]:
        jobs = []
        for batch in batches:
            memory = [bytearray(self._nbytes) for _ in batch]
            ticket = self._storage.get(self._addresses(batch), memory)
            jobs.append((batch, ticket, memory))
        found = {}
        for batch, ticket, memory in jobs:
            statuses = self._statuses(ticket, "a load")
            for each, status, content in zip(batch, statuses, memory):
                if status is Status.OK:
                    found[each] = bytes(content)
        return found

    def load_beside(self, *batches: Sequence[Key]) -> dict[Key, bytes]:
        return self.load(*batches)

    def begin(self, stored: Mapping[Key, bytes], loaded: Sequence[Key]) -> None:
        self._left = [bytearray(self._nbytes) for _ in loaded]
        for each, memory in zip(loaded, self._left):
            self._storage.get(self._addresses([each]), [memory])
        for each, content in stored.items():
            self._storage.set(self._addresses([each]), [bytearray(content)])

    def close(self) -> None:
        if not self._storage.close(LONGEST_S):
            fail("O11", self._name, f"the store did not close within {LONGEST_S:.0f} s")
        before = [bytes(each) for each in self._left]
        if before:
            time.sleep(AFTERWARDS_S)
        if before != self._left:
            fail("O11", self._name, "memory was written after a shutdown")

    def _addresses(self, names: Sequence[Key]) -> list[Address]:
        return [
            self._storage.address(each.digest, f"group{each.group}", self._setting.tenant)
            for each in names
        ]

    def _statuses(self, ticket: Any, told: str) -> list[Status]:
        if not ticket.wait(LONGEST_S):
            fail("O10", self._name, f"{told} did not end within {LONGEST_S:.0f} s")
        statuses: list[Status] = ticket.statuses
        return statuses


class StoreKind(Kind):
    """`StorageBackend` of kvgraft."""

    name: ClassVar[str] = "kvgraft's StorageBackend"
    groups: ClassVar[int] = 2
    settings: ClassVar[Mapping[str, tuple[Setting, Setting]]] = {
        "dtype": (Setting(), Setting(dtype="bfloat16")),
        "page_tokens": (Setting(), Setting(page_tokens=32)),
        "layers": (Setting(), Setting(layers=("layers.0", "layers.2"))),
        "layout": (Setting(), Setting(layout="layer_first")),
        "model": (Setting(), Setting(model="other")),
        "rank": (Setting(n_ranks=2), Setting(rank=1, n_ranks=2)),
        "n_ranks": (Setting(n_ranks=2), Setting(n_ranks=4)),
        "stage": (Setting(n_stages=2), Setting(stage=1, n_stages=2)),
        "tenant": (Setting(), Setting(tenant="other")),
    }

    def open(self, target: Target, directory: Path, setting: Setting, n_pages: int) -> StoreTier:
        if target.loaded is None:
            backend = open_storage(target.text(directory))
        else:
            backend = target.loaded(**target.filled(directory))
        return StoreTier(target.name, backend, setting)

    def version(self) -> str:
        return f"kvgraft {kvgraft.__version__}"
