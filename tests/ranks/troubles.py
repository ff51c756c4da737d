"""Copies and stores that are slow, fail or lie on one rank, at times of their own."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Mapping, Sequence

from kvgraft.errors import TransferError
from kvgraft.pools.component import PlaneCopy
from kvgraft.transfers import Fence, Ticket
from kvgraft.transfers.engine import run_layers
from kvgraft_storage import Capabilities, Status, StorageBackend, StoreStats
from kvgraft_storage.backend import Value, VerifyReport

__all__ = ["DelayedEngine", "TroubledStore"]


class DelayedEngine:
    """Copies in order, each after a random delay; a share of them fails."""

    def __init__(self, seed: int, delay_s: float, failing: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._delay_s, self._failing = delay_s, failing
        self.n_troubles = 0
        self._queue: queue.SimpleQueue[tuple[Ticket, Fence | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, copies: Sequence[PlaneCopy], fence: Fence | None = None) -> Ticket:
        ticket = Ticket(copies)
        self._queue.put((ticket, fence))
        return ticket

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            ticket, _ = item
            if self._delay_s:
                time.sleep(self._random.random() * self._delay_s)
            if self._random.random() < self._failing:
                self.n_troubles += 1
                ticket.finish(TransferError("the copy was made to fail"))
                continue
            run_layers(ticket)
            ticket.finish()


class TroubledStore(StorageBackend):
    """A store in front of another, with delays and one kind of trouble.

    Args:
        inner: the store.
        trouble: "io", "damage", "full", "slow", or nothing.
        share: of the calls that meet it; the first one always does.
    """

    def __init__(
        self,
        inner: StorageBackend,
        seed: int,
        delay_s: float,
        trouble: str = "",
        share: float = 0.3,
    ) -> None:
        self.inner = inner
        self.trouble = trouble
        self.n_troubles = 0
        self._share = share
        self._delay_s = delay_s
        self._random = random.Random(seed)

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        self._dawdle()
        return self.inner.exists(keys)

    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        self._dawdle()
        statuses = self.inner.get_into(keys, values, deadline_s)
        if self._happens("damage"):
            for value in values[:2]:
                value.payload[:1] = bytes([value.payload[0] ^ 1])
        return statuses

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        self._dawdle()
        if self._happens("full"):
            return [Status.FULL] * len(keys)
        return self.inner.set_from(keys, values, deadline_s)

    def touch(self, keys: Sequence[bytes]) -> None:
        self.inner.touch(keys)

    def remove(self, keys: Sequence[bytes]) -> Sequence[Status]:
        return self.inner.remove(keys)

    def clear(self) -> None:
        self.inner.clear()

    def flush(self) -> None:
        self.inner.flush()

    def stats(self) -> StoreStats:
        return self.inner.stats()

    def verify(self) -> VerifyReport:
        return self.inner.verify()

    def versions(self) -> Mapping[bytes, bytes]:
        return self.inner.versions()

    def set_version(self, name: bytes, version: bytes) -> None:
        self._dawdle()
        self.inner.set_version(name, version)

    def healthy(self) -> bool:
        return True

    def close(self) -> None:
        self.inner.close()

    def _dawdle(self) -> None:
        if self._delay_s:
            time.sleep(self._random.random() * self._delay_s)
        if self._happens("slow"):
            time.sleep(0.2)
        if self._happens("io"):
            raise OSError("this disk fails")

    def _happens(self, trouble: str) -> bool:
        if self.trouble != trouble:
            return False
        happens = not self.n_troubles or self._random.random() < self._share
        self.n_troubles += happens
        return happens
