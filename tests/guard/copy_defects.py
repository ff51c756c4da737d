"""A core that copies, keeps or stores other data than it should, or takes copies in wrongly."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Event
from typing import Any

from kvgraft import StorePolicy, Tier, WritePolicy
from kvgraft.policies.recency import RecencyQueue
from kvgraft.requests.eviction import Evictor
from kvgraft.transfers import Journal
from kvgraft.tree import eviction, operations
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.eviction import Victim
from kvgraft.tree.operations import Operation
from kvgraft.tree.tree import Tree
from kvgraft.types import Direction
from kvgraft_storage.tier import storing

from .defect import breaks
from .scene import PAGE, PROMPT, Patch, Scene
from .storage_defects import empty, stored

__all__: list[str] = []

FEW = 4 * PAGE
"""Tokens of a quarter of a pool."""


@breaks("B1")
def backups_that_are_taken_in_as_they_end(put: Patch) -> None:
    def as_they_end(self: Journal) -> int:
        queue = self.queues[Direction.BACKUP]
        ended = [each for each in queue if each.ticket.done]
        for each in ended:
            queue.remove(each)
            self.acknowledge(each)
        return len(ended)

    scene = Scene(host_tokens=64)
    for first in (100, 200):
        scene.cache.finish(scene.computed(range(first, first + FEW)))
    put.into(scene.cache.journal, poll=as_they_end)
    scene.engine.step(1)
    scene.cache.poll()
    scene.settle()


@breaks("R2", "base")
def a_copy_that_failed_and_is_published(put: Patch) -> None:
    def published(tree: Tree, operation: Operation) -> None:
        operations.commit(tree, operation)

    scene = Scene(host_tokens=64)
    scene.cache.finish(scene.computed(PROMPT))
    scene.engine.fail()
    put.setattr(operations, "abort", published)
    scene.cache.poll()


@breaks("B4")
def a_backup_before_the_computation(put: Patch) -> None:
    scene = Scene(host_tokens=64)
    put.into(scene.cache.journal, follow=lambda self, fence: None)
    scene.cache.finish(scene.computed(PROMPT), fence=Event())
    scene.close()


@breaks("S8", "base")
def payloads_of_the_store_that_are_others(put: Patch) -> None:
    def ones(target: Any, source: Any) -> None:
        target[:] = b"\1" * len(target)

    scene, _ = stored(store=StorePolicy.HOST_EVICTION)
    scene.cached(range(500, 500 + FEW))
    put.setattr(storing, "copy", ones)
    empty(scene, Tier.DEVICE)
    empty(scene, Tier.HOST)


@breaks("E4", "base")
def a_victim_that_is_dropped_where_host_has_room(put: Patch) -> None:
    def none(self: Evictor, victim: Victim) -> list[TreeComponent]:
        return []

    scene = Scene(plain=True, host_tokens=64, policy=WritePolicy.WRITE_BACK)
    scene.cached(PROMPT)
    put.into(scene.cache.evictor, _unbacked=none)
    scene.cache.evict("base", 16)


@breaks("E4", "base")
def room_on_host_for_data_of_a_lower_priority(put: Patch) -> None:
    scene = Scene(plain=True, host_tokens=64, policy=WritePolicy.WRITE_BACK)

    def demoted(tokens: Iterable[int], priority: int) -> None:
        scene.cache.finish(scene.computed(list(tokens), priority=priority))
        scene.cache.evict("base", 16)
        scene.settle()

    for first in range(100, 600, 100):
        demoted(range(first, first + FEW), 5)
    put.setattr(eviction, "is_admitted", lambda *given: True)
    demoted(range(FEW), 0)


@breaks("T7", "base")
def the_youngest_of_a_priority_that_goes_first(put: Patch) -> None:
    def youngest(self: RecencyQueue) -> tuple[int, Any] | None:
        found = max(self, key=lambda entry: entry[0], default=None)
        if found is not None:
            self.keep(lambda node: node is not found[1])
        return found

    scene = Scene(plain=True, eviction="lru")
    for first in (100, 200):
        scene.cache.finish(scene.computed(range(first, first + FEW), priority=1))
    put.setattr(RecencyQueue, "pop", youngest)
    scene.cache.evict("base", 1)
