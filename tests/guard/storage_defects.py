"""A storage tier that starts, counts, publishes and frees wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvgraft import Tier, TokenKey
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.node import Node
from kvgraft.tree.pinning import Receipt, hold_host
from kvgraft.tree.tree import Tree
from kvgraft.types import Span
from kvgraft_storage import Status
from kvgraft_storage.settings import StorageSettings, StorePolicy
from kvgraft_storage.tier import fetching
from kvgraft_storage.tier.arriving import Arrival, arrive
from kvgraft_storage.tier.fetching import Fetch
from kvgraft_storage.tier.inventory import Inventory, Mask
from kvgraft_storage.tier.naming import Asked, Naming
from kvgraft_storage.tier.prefetching import Prefetching
from kvgraft_storage.tier.slabs import Rows, Slabs
from kvgraft_storage.tier.storing import Sent, Storing, parts_of
from kvgraft_storage.tier.tier import StorageTier
from kvgraft_testing.storage import MemoryBackend

from ..storage_tier.shelf import step_by_step
from .defect import breaks
from .scene import LONGER, PAGE, PROMPT, Patch, Scene

__all__: list[str] = []


def stored(**given: object) -> tuple[Scene, StorageTier]:
    """A scene whose store has the longer prompt, its tree nothing."""
    settings = {
        "model": "m",
        "weights": "w",
        "threshold_tokens": PAGE,
        "store": StorePolicy.WRITE_THROUGH,
        **given,
    }
    scene = Scene(plain=True, host_tokens=64, storage=StorageSettings.model_validate(settings))
    tier = scene.cache.storage
    assert isinstance(tier, StorageTier)
    tier.attach(MemoryBackend())
    scene.cached(LONGER)
    assert tier.drain(10)
    empty(scene, Tier.DEVICE)
    empty(scene, Tier.HOST)
    return scene, tier


def empty(scene: Scene, tier: Tier) -> None:
    for component in scene.cache.tree.components:
        scene.cache.evict(component.name, component.device.capacity, tier)


def come(scene: Scene) -> None:
    """The requested data has come."""
    tier = scene.cache.storage
    assert tier is not None
    assert tier.drain(10)
    scene.cache.poll()


@breaks("S1")
def a_prefetch_that_pins_nothing(put: Patch) -> None:
    def hold(tree: Tree, node: Node, boundary: int | None = None) -> Receipt:
        node.receipts += 1
        return Receipt(node, [() for _ in tree.components], 0)

    scene, tier = stored()
    scene.on_host_only(PROMPT[: 4 * PAGE])
    come(scene)
    put.setattr(fetching, "hold_host", hold)
    tier.prefetch(TokenKey([*LONGER, 1]))
    come(scene)


@breaks("S1")
def a_prefetch_that_leaves_out_the_nodes_above(put: Patch) -> None:
    def hold(tree: Tree, node: Node, boundary: int | None = None) -> Receipt | None:
        receipt = hold_host(tree, node, boundary)
        above = node.parent
        while receipt is not None and above is not None and above.parent is not None:
            above.cells[0].host_pins -= 1
            above = above.parent
        return receipt

    scene, tier = stored()
    scene.on_host_only(PROMPT[: 2 * PAGE])
    scene.on_host_only(PROMPT[: 4 * PAGE])
    come(scene)
    put.setattr(fetching, "hold_host", hold)
    tier.prefetch(TokenKey([*LONGER, 1]))
    come(scene)


@breaks("S1")
def a_prefetch_that_begins_where_only_the_device_has_data(put: Patch) -> None:
    scene, tier = stored()
    scene.cached(PROMPT[: 4 * PAGE])
    come(scene)
    empty(scene, Tier.HOST)
    put.setattr(fetching, "backed_on_host", lambda tree, node: True)
    tier.prefetch(TokenKey([*LONGER, 1]))
    come(scene)


@breaks("S2")
def prefetches_that_take_more_than_they_may(put: Patch) -> None:
    size = Scene(plain=True, host_tokens=64).mounted("base").component.host.slab_nbytes
    scene, tier = stored(prefetch_nbytes=4 * size)
    put.setattr(Prefetching, "_budget", lambda self: 1 << 40)
    put.setattr(Prefetching, "_most_pages", lambda self: 1 << 20)
    tier.prefetch(TokenKey([*LONGER, 1]))
    come(scene)


@breaks("S4")
def a_boundary_published_without_its_window(put: Patch) -> None:
    spans = Inventory._spans

    def without_windows(self: Inventory, component: TreeComponent, boundary: int) -> list[Span]:
        return spans(self, component, boundary) if component.is_prefix_closed else []

    counts = Inventory._counts

    def none_of_windows(self: Inventory, component: TreeComponent, *given: Any) -> object:
        found = counts(self, component, *given)
        return found if component.is_prefix_closed or found is None else found * 0

    scene, tier = stored()
    put.setattr(Inventory, "_spans", without_windows)
    put.setattr(Inventory, "_counts", none_of_windows)
    put.setattr(Fetch, "_accepted", lambda self, boundary: True)
    tier.prefetch(TokenKey([*LONGER, 1]))
    come(scene)


@breaks("S5", "base")
def slots_of_a_prefetch_given_up_that_nobody_frees(put: Patch) -> None:
    def keep(self: Fetch, component: TreeComponent, pages: Mask) -> None:
        n_slots = self.slots[component.index][pages].size
        self.nbytes -= self.context.slabs.nbytes[component.index] * n_slots
        others = ~pages
        self._wanted[component.index] &= others
        self.arrived[component.index] &= others

    scene, tier = stored()
    tier.pace = step_by_step()
    prefetch = tier.prefetch(TokenKey([*LONGER, 1]))
    while not tier.prefetching.nbytes_in_flight and not prefetch.ended:
        scene.cache.poll()
    put.setattr(Fetch, "_free", keep)
    tier.cancel(prefetch)
    come(scene)


@breaks("S2")
def a_prefetch_that_is_not_worth_it(put: Patch) -> None:
    scene, tier = stored(threshold_tokens=2 * len(LONGER))
    put.setattr(tier.prefetching, "_threshold", 1)
    tier.prefetch(TokenKey([*LONGER, 1]))
    come(scene)


@breaks("S5", "base")
def pages_that_are_published_in_others_places(put: Patch) -> None:
    def turned(tree: Tree, start: Node, end: int, arrival: Arrival, n_pages: int) -> Node:
        slots = [mine[::-1] for mine in arrival.slots]
        return arrive(tree, start, end, arrival._replace(slots=slots), n_pages)

    scene, tier = stored()
    put.setattr(fetching, "arrive", turned)
    tier.prefetch(TokenKey([*LONGER, 1]))
    come(scene)


@breaks("S5", "base")
def pages_that_are_fetched_into_others_places(put: Patch) -> None:
    of = Slabs.of

    def turned(self: Slabs, parts: Any) -> Rows:
        return of(self, [(component, slots[::-1]) for component, slots in parts])

    scene, tier = stored()
    put.setattr(Slabs, "of", turned)
    tier.prefetch(TokenKey([*LONGER, 1]))
    come(scene)


def turned_names() -> Callable[..., Asked]:
    """Names pages in another order."""
    asked = Naming.asked

    def turned(self: Naming, hashes: bytes, first: int, parts: Any, namespace: bytes) -> Asked:
        others = [(component, pages[::-1]) for component, pages in parts]
        return asked(self, hashes, first, others, namespace)

    return turned


@breaks("S8", "base")
def data_that_is_stored_under_the_names_of_other_pages(put: Patch) -> None:
    scene, _ = stored()
    put.setattr(Naming, "asked", turned_names())
    scene.cached(range(3000, 3032))
    come(scene)


@breaks("S8", "base")
def data_that_is_fetched_under_the_names_of_other_pages(put: Patch) -> None:
    scene, tier = stored()
    put.setattr(Naming, "asked", turned_names())
    tier.prefetch(TokenKey([*LONGER, 1]))
    come(scene)


@breaks("S8", "base")
def data_that_is_fetched_under_another_namespace(put: Patch) -> None:
    scene, tier = stored()
    put.setattr(Naming, "namespace", lambda self, namespace: bytes(32))
    tier.prefetch(TokenKey([*LONGER, 1]))
    come(scene)


@breaks("S7")
def data_that_the_store_refused_counts_as_stored(put: Patch) -> None:
    take_in = Storing._take_in

    def all_of_it(self: Storing, sent: Sent) -> None:
        take_in(self, sent)
        if sent.receipt is not None:
            for node in parts_of(sent.receipt.anchor, sent.first):
                self.context.naming.of(node).stored = 3

    scene, _ = stored()
    full = [Status.FULL]
    put.setattr(MemoryBackend, "set_from", lambda self, keys, *given: full * len(keys))
    put.setattr(Storing, "_take_in", all_of_it)
    scene.cached(range(200, 232))
    come(scene)
