"""An eviction policy of one's own: data of batch jobs leaves before all other.

kvgraft-testing. A package publishes the policy as an entry point of the group `kvgraft.policies`;
then `Cache.open(..., policy="batch-first")` takes it. `kvgraft new-policy NAME` writes one.
"""

from collections.abc import Iterator
from typing import Any

from kvgraft.policies import Hint, Pool, Use
from kvgraft.policies.policy import class_of
from kvgraft.policies.recency import LeastRecentlyUsed, RecencyQueue
from kvgraft_testing.policies import check_policy

BATCH = 1


class BatchFirst(LeastRecentlyUsed):
    name = "batch-first"
    classifies = True

    def order(self, pool: Pool) -> Any:
        return BatchFirstOrder()

    def classify(self, use: Use) -> tuple[int, Any]:
        return (BATCH if use.namespace == "batch" else 0), None

    def finished(self, use: Use, stamp: int, hint: Hint | None) -> int:
        return self.classify(use)[0]  # the stamp of the request's data carries it


class BatchFirstOrder:
    def __init__(self) -> None:
        self.batch, self.others = RecencyQueue(), RecencyQueue()

    def queue(self, stamp: int) -> RecencyQueue:
        return self.batch if class_of(stamp) == BATCH else self.others

    def push(self, stamp: int, node: Any) -> None:
        self.queue(stamp).push(stamp, node)

    def withdraw(self, stamp: int, node: Any) -> None:
        self.queue(stamp).withdraw(stamp, node)

    def pop(self) -> tuple[int, Any] | None:
        return self.batch.pop() or self.others.pop()

    def score(self, stamp: int) -> float:
        return 0 if class_of(stamp) == BATCH else 1

    def __len__(self) -> int:
        return len(self.batch) + len(self.others)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        yield from self.batch
        yield from self.others


check_policy(BatchFirst)  # raises where it loses a candidate, or gives one twice
print("batch-first keeps every rule")
