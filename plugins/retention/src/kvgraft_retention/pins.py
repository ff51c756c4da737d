"""Pinned prefixes: they stay, for an owner, within a share of every pool (K6)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from kvgraft.errors import BudgetError, LeaseError
from kvgraft.requests.leases import Leases
from kvgraft.tree import pinning
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.ledger import PoolBooks
from kvgraft.tree.node import Node
from kvgraft.tree.operations import segment_nodes
from kvgraft.tree.pinning import Receipt
from kvgraft.tree.tree import Tree, TreeObserver
from kvgraft_retention.stats import PinStats

__all__ = ["Pin", "Pins"]


class Pin:
    """A prefix that stays until it is unpinned; made by `Cache.pin`.

    Attributes:
        owner: whose it is.
        namespace: the key's.
        asked_tokens: the requested prefix, in whole pages.
        tokens: its cached part, which stays.
        device_tokens: how much of that DEVICE had then; the rest stays on HOST, and on DEVICE once
            a request has loaded it.
        cleared: whether its namespace was cleared: then it holds nothing any more.
        receipt: its hold on the tree.
        root: its namespace's root.
        slots: the slots it needs, by pool.
    """

    __slots__ = (
        "asked_tokens",
        "cleared",
        "device_tokens",
        "namespace",
        "owner",
        "receipt",
        "root",
        "slots",
        "tokens",
    )

    def __init__(self, owner: str, namespace: object, asked_tokens: int) -> None:
        self.owner = owner
        self.namespace = namespace
        self.asked_tokens = asked_tokens
        self.tokens = self.device_tokens = 0
        self.cleared = False
        self.receipt: Receipt
        self.root: Node
        self.slots: dict[PoolBooks, int] = {}

    def __repr__(self) -> str:
        return f"<Pin of {self.owner!r:.60}: {self.tokens} of {self.asked_tokens} tokens>"


class Pins:
    """The pins of one cache.

    A pin holds the pages that every component needs to resume at its end, as a request's lease
    does, and through the same receipts. Pages that are not cached count as well: they are pinned
    when they arrive (L4). Pages that several pins hold count once.

    Args:
        tree: the tree.
        leases: match and pin.
        share: the part of every pool's slots that pins may hold together.
    """

    def __init__(self, tree: Tree, leases: Leases, share: float) -> None:
        self.tree = tree
        self.share = share
        self._leases = leases
        self._pins: dict[int, Pin] = {}
        self._holders = _Holders(tree)

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def held(self, ledger: PoolBooks) -> int:
        """Slots of a pool that pins hold together."""
        return self._holders.slots.get(ledger, 0)

    def bound(self, ledger: PoolBooks) -> int:
        """Slots of a pool that they may hold; a shrinking pool takes none back."""
        return int(ledger.capacity * self.share)

    def pin(self, key: TokenKey, owner: str, limit: int) -> Pin:
        """Pin the cached part of the first `limit` pages of a key.

        Raises:
            BudgetError: it would take slots promised to requests, or more than the bound.
        """
        pin = Pin(owner, key.namespace, limit * self.tree.page_size)
        self.tree.use_class, self.tree.use_retention = 0, None
        pin.root = self.tree.hold_root(key.namespace)
        try:
            found, receipt = self._leases.keep(key, limit)
            if receipt is None:
                raise BudgetError(
                    f"pin of {owner!r:.60}: {found.anchor * self.tree.page_size} tokens are "
                    "promised in part to admitted requests; pin them when fewer run"
                )
            pin.receipt = receipt
            nodes = list(self._nodes(receipt))
            for component, ledger, its in nodes:
                pin.slots[ledger] = sum(map(component.n_slots, its))
            try:
                self._expect_within_bounds(pin, nodes)
            except BudgetError:
                pinning.release(self.tree, receipt)
                raise
        except BaseException:
            self.tree.release_root(pin.root)
            raise
        pin.tokens = found.anchor * self.tree.page_size
        pin.device_tokens = found.device_anchor * self.tree.page_size
        if not self._pins:
            self.tree.add_observer(self._holders)
        self._pins[id(pin)] = pin
        for component, ledger, its in nodes:
            self._holders.add(component, ledger, its)
        return pin

    def unpin(self, pin: object) -> None:
        """Release a pin; nothing happens if its namespace was cleared.

        Raises:
            LeaseError: it was unpinned before, or belongs to another cache.
        """
        held = self._pins.get(id(pin))
        if held is None or held is not pin:
            if isinstance(pin, Pin) and pin.cleared:
                return
            raise LeaseError(
                f"unpin: {pin!r:.120} is no pin of this cache, or was unpinned before; unpin what "
                "`Cache.pin` returned, once"
            )
        self._end(held)

    def unpin_all(self, owner: str) -> int:
        """Release all pins of an owner; returns how many there were."""
        mine = [pin for pin in self if pin.owner == owner]
        for pin in mine:
            self._end(pin)
        return len(mine)

    def cleared(self, namespaces: Collection[object]) -> int:
        """Namespaces are cleared: end their pins; returns how many there were."""
        ended = [pin for pin in self if pin.namespace in namespaces]
        for pin in ended:
            pin.cleared = True
            self._end(pin)
        return len(ended)

    def stats(self) -> dict[str, PinStats]:
        """Counts by owner; another thread may call it, so pins are copied first."""
        by_owner: dict[Any, list[Pin]] = {}
        for pin in self._pins.copy().values():
            by_owner.setdefault(pin.owner, []).append(pin)
        return {owner: self._stats(pins) for owner, pins in by_owner.items()}

    # -- inside

    def _stats(self, pins: list[Pin]) -> PinStats:
        names = [component.name for component in self.tree.components]
        device, host = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
        for pin in pins:
            for component in self.tree.components:
                device[component.name] += pin.slots.get(component.device, 0)
                if component.host is not None:
                    host[component.name] += pin.slots.get(component.host, 0)
        return PinStats(len(pins), sum(pin.tokens for pin in pins), device, host)

    def _end(self, pin: Pin) -> None:
        for component, ledger, nodes in self._nodes(pin.receipt):
            self._holders.remove(component, ledger, nodes)
        del self._pins[id(pin)]
        if not self._pins:
            self.tree.remove_observer(self._holders)
        pinning.release(self.tree, pin.receipt)
        self.tree.release_root(pin.root)

    def _nodes(self, receipt: Receipt) -> Iterator[_Pages]:
        """The nodes that a receipt holds in each pool, whether their data is cached or not."""
        start = receipt.host_from
        for component in self.tree.components:
            nodes = segment_nodes(component, receipt)
            yield component, component.device, nodes
            if component.host is not None and start is not None:
                yield component, component.host, [node for node in nodes if node.end > start]

    def _expect_within_bounds(self, pin: Pin, nodes: list[_Pages]) -> None:
        """Refuse a pin with which pins would hold more than their share of a pool."""
        for component, ledger, its in nodes:
            held, bound = self.held(ledger), self.bound(ledger)
            added = self._holders.added(component, ledger, its)
            if added and held + added > bound:
                raise BudgetError(
                    f"pin of {pin.owner!r:.60}: component {ledger.component!r} "
                    f"{ledger.tier.value} pool: held({held}) + needed({added}) > bound({bound}), "
                    f"{self.share:g} of {ledger.capacity} slots; unpin others, pin fewer tokens, "
                    "or open the cache with a larger pin_share"
                )


_Pages = tuple[TreeComponent, PoolBooks, list[Node]]
"""Nodes on which a pin holds a component's data in one pool."""


class _Holders(TreeObserver):
    """How many pins hold each node, by pool; observes the tree for splits while there are pins.

    Attributes:
        slots: the slots of these nodes, by pool.
    """

    def __init__(self, tree: Tree) -> None:
        self.slots: dict[PoolBooks, int] = {}
        self._pins: dict[PoolBooks, dict[Node, int]] = {}
        self._paged = [component for component in tree.components if not component.is_state]

    def added(self, component: TreeComponent, ledger: PoolBooks, nodes: list[Node]) -> int:
        """Slots of those of some nodes that no pin holds."""
        pins = self._pins.get(ledger, {})
        return sum(component.n_slots(node) for node in nodes if node not in pins)

    def add(self, component: TreeComponent, ledger: PoolBooks, nodes: list[Node]) -> None:
        """Another pin holds some nodes."""
        added = self.added(component, ledger, nodes)
        self.slots[ledger] = self.slots.get(ledger, 0) + added
        pins = self._pins.setdefault(ledger, {})
        for node in nodes:
            pins[node] = pins.get(node, 0) + 1

    def remove(self, component: TreeComponent, ledger: PoolBooks, nodes: list[Node]) -> None:
        """A pin that held some nodes ends."""
        pins = self._pins[ledger]
        for node in nodes:
            pins[node] -= 1
            if not pins[node]:
                del pins[node]
                self.slots[ledger] -= component.n_slots(node)

    def split(self, upper: Node, node: Node) -> None:
        """Both parts are held like the whole was; a state stays with the lower one."""
        for component in self._paged:
            for ledger in (component.device, component.host):
                pins = self._pins.get(ledger) if ledger is not None else None
                if pins is not None and node in pins:
                    pins[upper] = pins[node]
