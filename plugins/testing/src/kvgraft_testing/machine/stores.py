"""A store as hostile as its interface allows: every call's outcome is the caller's choice.

A call stays pending until the test runs it, fails it or gives it up. A fetch that was given up
still writes to its memory later, like one of a synchronous store.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvgraft.assembly import PartsFactory
from kvgraft.errors import ContractViolation
from kvgraft.packages.dispatch import Mounted
from kvgraft.requests.eviction import Evictor
from kvgraft.requests.request import Request
from kvgraft.tree.tree import Tree
from kvgraft_storage import Access, Address, BreakerState, Status, Storage, StorageTicket
from kvgraft_storage.memory import Buffers, Memory, address_of, copy, parts_of
from kvgraft_storage.ticket import Job, Phase
from kvgraft_storage.tier import StorageTier
from kvgraft_storage.tier.slicing import Pace

__all__ = ["Answer", "PartsWithStore", "PromptedStore"]

STEPS = 3
"""Steps of the tier in a call of the cache; a prefetch is some ten."""


class Answer(enum.Enum):
    """The outcome of a call of the store."""

    RUNS = "runs"
    FAILS = "fails"
    IN_PART = "serves the first half of its keys and fails"
    GIVEN_UP = "is given up, and ends later"


class _Call(NamedTuple):
    """A call under way, what it does, and the memory that is the store's until it returns."""

    job: Job
    run: Callable[[int], list[Status]]
    lent: Sequence[Memory]

    def __str__(self) -> str:
        late = ", which was given up," if self.job.settled else ""
        return f"{self.job.verb} of {self.job.n_keys} keys{late}"


class PromptedStore(Storage):
    """A store in memory whose calls run when the test says so.

    Attributes:
        pending: calls that have not returned, oldest first.
        at_once: whether calls run as soon as they are made.
        found: payloads that changed before the store read them.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.pending: list[_Call] = []
        self.at_once = False
        self.found: list[ContractViolation] = []
        self._stored: dict[bytes, list[bytes]] = {}
        self.forget_store()

    @property
    def attached(self) -> bool:
        """Always."""
        return True

    def state_of(self, access: Access) -> BreakerState | None:
        """Calls always pass."""
        del access
        return BreakerState.CLOSED

    def exists(
        self, addresses: Sequence[Address], deadline_s: float | None = None
    ) -> StorageTicket:
        """Ask for keys; see `Storage.exists`."""
        del deadline_s
        keys = [each.key for each in addresses[:]]
        return self._make("exists", len(keys), lambda n: [self._has(key) for key in keys[:n]])

    def get(
        self,
        addresses: Sequence[Address],
        buffers: Sequence[object] | Buffers,
        deadline_s: float | None = None,
    ) -> StorageTicket:
        """Fetch into the buffers, which are the store's until the call returns."""
        del deadline_s
        keys, memory = [each.key for each in addresses[:]], _memory(buffers)

        def run(n_served: int) -> list[Status]:
            for key, target in zip(keys[:n_served], memory):
                for part, data in zip(parts_of(target), self._stored.get(key, ())):
                    copy(part, memoryview(data))
            return [self._has(key) for key in keys[:n_served]]

        return self._make("get", len(keys), run, memory)

    def set(
        self,
        addresses: Sequence[Address],
        buffers: Sequence[object] | Buffers,
        deadline_s: float | None = None,
        *,
        only_missing: bool = False,
    ) -> StorageTicket:
        """Store the buffers' content at the time the call runs; it must not change until then."""
        del deadline_s, only_missing
        keys, memory = [each.key for each in addresses[:]], _memory(buffers)
        were = [_bytes(each) for each in memory]

        def run(n_served: int) -> list[Status]:
            if were != [_bytes(each) for each in memory]:
                said = f"payloads changed before the store had read them, of {len(keys)} keys"
                self.found.append(ContractViolation("S9", None, said))
            self._stored.update(zip(keys[:n_served], were))
            return [Status.OK] * n_served

        return self._make("set", len(keys), run)

    def end(self, index: int, answer: Answer) -> None:
        """Let a pending call run or fail, or give it up; one that was given up writes now."""
        call = self.pending[index]
        job = call.job
        if answer is Answer.GIVEN_UP and not job.settled:
            job.settle([Status.TIMEOUT] * job.n_keys)
            return
        del self.pending[index]
        if job.settled and not job.lent:
            return
        n_served = {Answer.FAILS: 0, Answer.IN_PART: job.n_keys // 2}.get(answer, job.n_keys)
        statuses = call.run(n_served) + [Status.DOWN] * (job.n_keys - n_served)
        job.settle(statuses)
        job.enter(Phase.RETURNED)

    def close(self, timeout_s: float = 10.0) -> bool:
        """All calls end."""
        del timeout_s
        while self.pending:
            self.end(0, Answer.RUNS)
        return True

    def _has(self, key: bytes) -> Status:
        return Status.OK if key in self._stored else Status.MISS

    def lacking(self, keys: Sequence[bytes]) -> int:
        """How many of some keys are not stored."""
        return sum(key not in self._stored for key in keys)

    def lent(self) -> Iterator[int]:
        """Addresses of memory that calls under way may write to, abandoned ones included."""
        for call in self.pending:
            for memory in call.lent:
                yield from map(address_of, parts_of(memory))

    def _make(
        self,
        verb: str,
        n_keys: int,
        run: Callable[[int], list[Status]],
        lent: Sequence[Memory] = (),
    ) -> StorageTicket:
        ticket = StorageTicket(n_keys, self.poll, self.counters.add_statuses)
        access = Access.WRITE if verb == "set" else Access.READ
        job = Job(ticket, verb, (0, n_keys), access=access)
        if lent:
            job.lend(0.0)
        self.pending.append(_Call(job, run, lent))
        if self.at_once:
            self.end(len(self.pending) - 1, Answer.RUNS)
        return ticket


def _memory(buffers: Sequence[object] | Buffers) -> list[Memory]:
    return list(buffers[:])  # type: ignore[arg-type]


def _bytes(memory: Memory) -> list[bytes]:
    return [bytes(part) for part in parts_of(memory)]


class _Tier(StorageTier):
    new_client = PromptedStore


class PartsWithStore(PartsFactory):
    """The parts of a cache in front of such a store."""

    def storage(
        self,
        tree: Tree,
        mounted: Sequence[Mounted],
        evictor: Evictor,
        requests: Mapping[int, Request],
    ) -> StorageTier:
        """A tier whose calls make one step each, so that all interleavings occur."""
        settings = self.config.storage
        assert settings is not None
        pace = Pace(itertools.count().__next__, seconds=STEPS)
        return _Tier(tree, mounted, evictor, settings, self.clock, pace, requests)
