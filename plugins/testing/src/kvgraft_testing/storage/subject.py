"""The backend under test: how to open it, and payloads to put into it."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvgraft.errors import ContractViolation
from kvgraft_storage import (
    Address,
    Capabilities,
    Fingerprint,
    PageChain,
    Status,
    Storage,
    StorageBackend,
    SupervisionLimits,
    open_storage,
)

__all__ = ["Opener", "StorageSubject", "opener_of"]

Opener = Callable[[Path], StorageBackend]
"""Opens the store that belongs to a directory; the same store for the same directory."""

PAGE_SIZE = 4
N_PAGES = 256


def opener_of(url: str) -> Opener:
    """An opener of a URL in which `{directory}` stands for an empty directory."""
    return lambda directory: open_storage(url.replace("{directory}", str(directory)))


class StorageSubject:
    """One backend, as clauses see it.

    Args:
        name: for reports.
        opener: opens a store; its content is cleared.
        deadline_s: longest time for a call.
    """

    def __init__(self, name: str, opener: Opener, deadline_s: float) -> None:
        self.name = name
        self.opener = opener
        self.deadline_s = deadline_s
        self.fingerprint = Fingerprint("contract", "1", "bf16", PAGE_SIZE, {"a": 1, "b": 2})
        self._chain = PageChain(self.fingerprint, "tenant")
        tokens = random.Random(7).randbytes(PAGE_SIZE * 4 * N_PAGES)
        self._chain.grow(tokens)
        with self.store() as store:
            self.capabilities: Capabilities = store.capabilities

    @contextmanager
    def store(self) -> Iterator[StorageBackend]:
        """An empty store, closed afterwards."""
        with self.place() as directory:
            store = self.opener(directory)
            try:
                store.clear()
                yield store
            finally:
                store.close()

    @contextmanager
    def place(self) -> Iterator[Path]:
        """A directory that is removed afterwards."""
        with tempfile.TemporaryDirectory(prefix="kvgraft-storage-") as made:
            yield Path(made)

    @contextmanager
    def supervised(self, store: StorageBackend) -> Iterator[Storage]:
        """A supervised store whose breaker never opens; closed afterwards."""
        limits = SupervisionLimits(deadline_s=self.deadline_s, failure_limit=1 << 30)
        storage = Storage(self.fingerprint, store, limits)
        try:
            yield storage
        finally:
            storage.close(self.deadline_s)

    def addresses(self, n: int, component: str = "a", first: int = 0) -> list[Address]:
        """Addresses of pages."""
        return [self._chain.address(first + page, component) for page in range(n)]

    def payloads(self, sizes: Sequence[int], seed: int = 1) -> list[bytes]:
        """Random payloads."""
        source = random.Random(seed)
        return [source.randbytes(size) for size in sizes]

    def set(
        self, storage: Storage, addresses: Sequence[Address], payloads: Sequence[bytes]
    ) -> list[Status]:
        """Store and wait.

        Raises:
            ContractViolation: S10, not decided in time.
        """
        ticket = storage.set(addresses, payloads)
        self.expect(ticket.wait(self.deadline_s + 1), "S10", "set did not end by its deadline")
        return [status for status in ticket.statuses if status is not None]

    def get(
        self, storage: Storage, addresses: Sequence[Address], sizes: Sequence[int]
    ) -> tuple[list[Status], list[bytes]]:
        """Fetch and wait.

        Raises:
            ContractViolation: S10, not decided in time.
        """
        buffers = [bytearray(size) for size in sizes]
        ticket = storage.get(addresses, buffers)
        self.expect(ticket.wait(self.deadline_s + 1), "S10", "get did not end by its deadline")
        told = [status for status in ticket.statuses if status is not None]
        return told, [bytes(buffer) for buffer in buffers]

    def expect(self, condition: object, rule: str, evidence: str) -> None:
        """Raise `ContractViolation` unless the condition holds."""
        if not condition:
            raise ContractViolation(rule, self.name, evidence)

    def expect_statuses(
        self, rule: str, what: str, told: Sequence[Status], wanted: Sequence[Status]
    ) -> None:
        """Statuses are these, one by one.

        Raises:
            ContractViolation: they are not.
        """
        for number, (status, right) in enumerate(zip(told, wanted)):
            self.expect(
                status is right,
                rule,
                f"{what}: key {number} of {len(wanted)} is {status.value}, must be {right.value}",
            )
        self.expect(len(told) == len(wanted), rule, f"{what}: {len(told)} of {len(wanted)} keys")
