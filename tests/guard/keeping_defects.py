"""A core that clears and pins wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kvgraft import BudgetError, TokenKey
from kvgraft.requests.leases import Leases
from kvgraft.requests.publishing import Publisher
from kvgraft.requests.request import Request
from kvgraft.serving import Serving
from kvgraft.tree import eviction, pinning
from kvgraft.tree.component import Candidates, TreeComponent
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree
from kvgraft.types import Tier
from kvgraft_retention import clearing, pins
from kvgraft_retention.announcing import Announced
from kvgraft_retention.lifetimes import Lifetimes, Retention, Retentions
from kvgraft_retention.pins import Pins

from .defect import breaks
from .scene import LONGER, PAGE, PROMPT, Patch, Scene

__all__: list[str] = []


@breaks("M1")
def clearing_that_leaves_data_to_be_hit(put: Patch) -> None:
    def keep(self: Tree, namespaces: Sequence[object]) -> list[Node]:
        return []

    scene = Scene()
    scene.cached(PROMPT)
    put.into(scene.cache.tree, detach_roots=keep)
    scene.cache.clear()


@breaks("M1")
def a_request_admitted_into_a_cleared_namespace(put: Patch) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    request = scene.begin(LONGER)
    scene.cache.clear()
    put.into(scene.cache.tree, is_cleared=lambda self, node: False)
    scene.cache.admit(request)


@breaks("M1")
def a_request_that_the_engine_admits_into_a_cleared_namespace(put: Patch) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    request = scene.begin(LONGER)
    scene.cache.clear()
    put.into(scene.cache.tree, is_cleared=lambda self, node: False)
    scene.cache.engine_slots.admit(request)


@breaks("T7", "base")
def data_that_the_first_in_line_will_use_and_the_last_one_leaves_first(put: Patch) -> None:
    scene = Scene(plain=True)
    for number in range(3):
        scene.cached(range(100 * number, 100 * number + 4 * PAGE))
    put.setattr(Announced, "place", latest_place)
    for number, place in ((0, 1), (1, 5), (0, 9)):
        key = TokenKey(range(100 * number, 100 * number + 4 * PAGE + 1))
        scene.cache.announce(key, place=place)
    scene.cache.evict("base", 16)


def latest_place(self: Announced, index: int, node: Node) -> int | None:
    return max(self._places.get((index, node), {}).values(), default=None)


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
        tree.drop(node, component, Tier.DEVICE, "cleared")
        return n_slots

    scene = Scene()
    scene.cached(PROMPT)
    scene.settle()
    put.setattr(eviction, "evict_device", clear)
    scene.cache.evict("base", 1)


@breaks("I6")
def a_cleared_request_that_shares_its_data(put: Patch) -> None:
    def share(self: Publisher, request: Request, page: int) -> int:
        return 8

    scene = Scene()
    request = scene.computed(PROMPT)
    scene.cache.clear()
    put.into(scene.cache.publisher, finish=share)
    put.into(scene.cache.tree, is_cleared=lambda self, node: False)
    scene.cache.finish(request)


def _nothing(tree: Tree, node: Node) -> None:
    pass


# -- pins


@breaks("K6", "base")
def a_pin_beyond_the_bound(put: Patch) -> None:
    def boundless(self: Pins, ledger: Ledger) -> int:
        return ledger.capacity

    scene = Scene()
    scene.cached(PROMPT)
    put.setattr(Pins, "bound", boundless)
    with suppress(BudgetError):  # 8 pages of 16; a quarter may be pinned
        scene.cache.pin(TokenKey(PROMPT), owner="router")


@breaks("A12", "base")
def a_pin_that_takes_promised_slots(put: Patch) -> None:
    acquire = pinning.acquire

    def forced(*given: Any, **named: Any) -> Any:
        return acquire(*given, **{**named, "enforce": False})

    scene = Scene()
    scene.cached(PROMPT[:16])
    scene.admitted(range(500, 548))
    put.setattr(pinning, "acquire", forced)
    with suppress(BudgetError):
        scene.cache.pin(TokenKey(PROMPT[:16]), owner="router")


@breaks("K6", "base")
def a_pin_that_holds_nothing(put: Patch) -> None:
    def keep(self: Leases, key: TokenKey, limit: int) -> Any:
        found, receipt = kept(self, key, limit)
        assert receipt is not None
        pinning.release(self.tree, receipt)
        receipt.released = False
        return found, receipt

    kept = Leases.keep
    scene = Scene()
    scene.cached(PROMPT[:16])
    put.setattr(Leases, "keep", keep)
    scene.cache.pin(TokenKey(PROMPT[:16]), owner="router")


@breaks("L1", "base")
def an_unpin_that_leaves_its_pins(put: Patch) -> None:
    scene = Scene()
    scene.cached(PROMPT[:16])
    pin = scene.cache.pin(TokenKey(PROMPT[:16]), owner="router")
    put.setattr(pinning, "release", lambda tree, receipt: None)
    scene.cache.unpin(pin)


# -- priorities


@breaks("T7", "base")
def an_order_that_forgets_priorities(put: Patch) -> None:
    scene = Scene()
    put.setattr(Candidates, "_line", lambda self, node, cell: self._lines[node.tenant][0])
    for first, priority in ((0, 1), (500, 0)):
        request = scene.begin(range(first, first + 16), priority=priority)
        assert scene.cache.admit(request).admitted
        scene.cache.load_back(request)
        assert scene.cache.allocate(request, 16)
        scene.cache.computed(request, 16)
        scene.cache.finish(request)
    scene.settle()
    scene.cache.evict("base", 1)


@breaks("T7")
def a_priority_that_lasts_for_the_next_request(put: Patch) -> None:
    used = Retentions.used

    def lasting(self: Retentions, request: Request) -> None:
        used(self, request)
        if request.requested_retention is None:
            request.use_retention = Retention(1)

    scene = Scene()
    scene.begin(PROMPT, priority=1)
    put.setattr(Retentions, "used", lasting)
    scene.begin(LONGER)
    scene.close()


@breaks("K6", "base")
def pins_that_count_after_their_end(put: Patch) -> None:
    scene = Scene(plain=True)
    scene.cached(PROMPT[: 4 * 4])
    pin = scene.cache.pin(TokenKey(PROMPT), owner="me")
    assert pin.tokens
    put.setattr(pins._Holders, "remove", lambda self, *given: None)
    scene.cache.unpin(pin)
    scene.close()


@breaks("T3")
def a_drain_that_leaves_cleared_data_that_nobody_holds(put: Patch) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    request = scene.begin(LONGER)
    scene.cache.clear()
    scene.cache.abort(request)
    put.setattr(clearing.Sweeper, "finish", lambda self: None)
    scene.cache.drain()


@breaks("T7")
def a_time_to_live_by_a_clock_that_is_not_read(put: Patch) -> None:
    scene = Scene()
    scene.cache.finish(scene.computed(PROMPT, ttl_s=60))
    put.setattr(Lifetimes, "read_clock", lambda self: None)
    scene.cache.abort(scene.begin(LONGER))


@breaks("L7", "window")
def pins_that_stay_behind_a_window(put: Patch) -> None:
    scene = Scene(plain=True)
    scene.cached(PROMPT[:8])
    scene.cached(PROMPT[:16])
    put.setattr(pinning, "slide", lambda tree, receipt, position: None)
    scene.computed([*PROMPT[:16], *range(200, 216)])


@breaks("T7")
def a_prefix_used_without_the_time_asked_for_it(put: Patch) -> None:
    used = Retentions.used

    def late(self: Retentions, request: Request) -> None:
        before = self.tree.use_retention
        used(self, request)
        self.tree.use_retention = before

    scene = Scene(plain=True)
    scene.cached(PROMPT)
    put.setattr(Retentions, "used", late)
    scene.begin([*PROMPT, 1], ttl_s=5.0)


@breaks("K6")
def a_pin_that_outlives_its_data(put: Patch) -> None:
    scene = Scene(plain=True)
    scene.cached(PROMPT[:16])
    scene.cache.pin(TokenKey(PROMPT[:16]), owner="me")
    put.setattr(Pins, "cleared", lambda self, namespaces: 0)
    scene.cache.clear()


@breaks("T11")
def a_request_that_is_restarted_and_keeps_its_key(put: Patch) -> None:
    scene = Scene(plain=True)
    request = scene.computed(PROMPT)
    put.setattr(Serving, "_runs_no_more", lambda self, request: None)
    scene.cache.restart(request)
