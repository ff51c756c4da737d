"""A storage tier that starts, counts, publishes and frees wrongly."""

from __future__ import annotations

from kvgraft import StorageSettings, StorePolicy, Tier, TokenKey
from kvgraft.slots import SLOT_BYTES
from kvgraft.storage_tier import fetching
from kvgraft.storage_tier.fetching import Fetch
from kvgraft.storage_tier.inventory import Inventory
from kvgraft.storage_tier.prefetching import Prefetching
from kvgraft.storage_tier.tier import StorageTier
from kvgraft.testing.storage import MemoryBackend
from kvgraft.tree.node import Node
from kvgraft.tree.pinning import Receipt
from kvgraft.tree.track import Track
from kvgraft.tree.tree import Tree
from kvgraft.types import Span

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
    assert tier is not None
    tier.attach(MemoryBackend())
    scene.cached(LONGER)
    assert tier.drain(10)
    empty(scene, Tier.DEVICE)
    empty(scene, Tier.HOST)
    return scene, tier


def empty(scene: Scene, tier: Tier) -> None:
    for track in scene.cache.tree.tracks:
        scene.cache.evict(track.name, track.device.capacity, tier)


def come(scene: Scene) -> None:
    """What was asked for has come."""
    tier = scene.cache.storage
    assert tier is not None
    assert tier.drain(10)
    scene.cache.poll()


@breaks("S1")
def a_prefetch_that_pins_nothing(put: Patch) -> None:
    def hold(tree: Tree, node: Node, boundary: int | None = None) -> Receipt:
        node.receipts += 1
        return Receipt(node, [() for _ in tree.tracks], 0)

    scene, tier = stored()
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

    def without_windows(self: Inventory, track: Track, boundary: int) -> list[Span]:
        return spans(self, track, boundary) if track.is_everything else []

    scene, tier = stored()
    put.setattr(Inventory, "_spans", without_windows)
    tier.prefetch(TokenKey([*LONGER, 1]))
    come(scene)


@breaks("S5", "base")
def slots_of_a_prefetch_given_up_that_nobody_frees(put: Patch) -> None:
    def keep(self: Fetch, track: Track, slots: bytes) -> None:
        self.nbytes -= self.scene.slabs.nbytes[track.index] * len(slots) // SLOT_BYTES

    scene, tier = stored()
    prefetch = tier.prefetch(TokenKey([*LONGER, 1]))
    while not tier.prefetching.nbytes_in_flight and not prefetch.ended:
        scene.cache.poll()
    put.setattr(Fetch, "_free", keep)
    tier.cancel(prefetch)
    come(scene)
