"""A core that clears wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvgraft.cache import Cache
from kvgraft.requests.publishing import Publisher
from kvgraft.requests.request import Request
from kvgraft.tree import clearing, eviction
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree

from .defect import breaks
from .scene import PROMPT, Patch, Scene

__all__: list[str] = []


@breaks("M1")
def clearing_that_leaves_data_to_be_hit(put: Patch) -> None:
    def keep(self: Tree, namespaces: Sequence[object]) -> list[Node]:
        return []

    scene = Scene()
    scene.cached(PROMPT)
    put.into(scene.cache.tree, set_aside=keep)
    scene.cache.clear()


@breaks("T3", "base")
def clearing_that_keeps_data_nobody_holds(put: Patch) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    scene.settle()
    put.setattr(clearing, "_drop", _nothing)
    scene.cache.clear()


@breaks("E2", "base")
def an_eviction_that_counts_as_clearing(put: Patch) -> None:
    def clear(tree: Tree, component: TreeComponent, n_slots: int) -> int:
        node = max(tree.nodes(), key=lambda each: each.end)
        tree.drop_device(node, component, "cleared")
        return n_slots

    scene = Scene()
    scene.cached(PROMPT)
    scene.settle()
    put.setattr(eviction, "evict_device", clear)
    scene.cache.evict("base", 1)


@breaks("I6")
def a_cleared_request_that_shares_its_data(put: Patch) -> None:
    def share(self: Publisher, request: Request, fence: Any) -> int:
        return 8

    scene = Scene()
    request = scene.computed(PROMPT)
    scene.cache.clear()
    put.into(scene.cache.publisher, finish=share)
    put.setattr(Cache, "_may_share", _always)
    scene.cache.finish(request)


def _nothing(tree: Tree, node: Node) -> None:
    pass


def _always(cache: Cache, request: Request) -> bool:
    return True
