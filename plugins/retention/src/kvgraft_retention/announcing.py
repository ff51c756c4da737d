"""Announced data: cached prefixes that waiting requests will use leave after other data.

An announcement is an order of victims, not a pin. Data of the same priority leaves before announced
data, and of announced data that of the last in the queue leaves first. So admission never waits for
it, and no promise needs it.

Each order of a policy gets an order in front of it, with the announced candidates alone. Until the
first announcement there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, Final

from kvgraft.cache import Cache
from kvgraft.policies.policy import Order, Pool
from kvgraft.requests.request import expect_key
from kvgraft.tree.component import Candidates, TreeComponent
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.matching import match, needed_nodes
from kvgraft.tree.node import CLEAN, ON_DEVICE, ON_HOST, Node
from kvgraft.tree.tree import Tree, TreeObserver
from kvgraft.types import Tier

__all__ = ["MOST_ANNOUNCED", "Announced", "AnnouncedOrder", "Announcement", "announce"]

MOST_ANNOUNCED: Final = 4096
"""Announcements at a time; further ones announce nothing."""

_Held = tuple[int, Node]
"""Data of a component, by its index, on a node."""


class Announcement:
    """The cached data that one waiting request will use.

    Attributes:
        tokens: tokens of its prefix that were cached when it was announced.
    """

    def __init__(self, announced: Announced, number: int, root: Node, tokens: int) -> None:
        self.tokens = tokens
        self._announced = announced
        self._number = number
        self._root = root

    def withdraw(self) -> None:
        """The request was admitted, or given up; calling it again does nothing."""
        self._announced.withdraw(self._number)

    def __repr__(self) -> str:
        return f"<Announcement of {self.tokens} tokens>"


class Announced(TreeObserver):
    """The announcements of one cache; observes its tree for splits, removals and clears.

    Args:
        tree: the tree.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._last = self._last_place = 0
        self._roots: dict[int, Node] = {}
        self._data: dict[int, dict[_Held, None]] = {}
        """Of each announcement its data, in an order that is the same in every process (D1)."""
        self._places: dict[_Held, dict[int, int]] = {}
        """Of the announcements that data is of: the places by number."""
        for component in tree.components:
            for pool in (component.device, component.host):
                if pool is not None:
                    _use(pool.queue, tree, self, component.index)
        tree.add_observer(self)

    def __len__(self) -> int:
        return len(self._data)

    def add(self, key: TokenKey, place: int | None) -> Announcement:
        """Announce the cached prefix of a key, as `announce` does."""
        tree = self._tree
        self._last += 1
        self._last_place = max(self._last_place + 1, 0) if place is None else place
        root = tree.hold_root(key.namespace)
        try:
            found = match(tree, key, max(0, key.n_tokens - 1) // tree.page_size)
            tokens = found.anchor * tree.page_size
            if found.anchor and len(self._data) < MOST_ANNOUNCED:
                data = self._data[self._last] = {}
                self._roots[self._last] = root
                for component in tree.components:
                    for node in needed_nodes(found, component):
                        data[component.index, node] = None
                        places = {**self.places_of(component, node), self._last: self._last_place}
                        self._change(component, node, places)
        finally:
            tree.release_root(root)
        return Announcement(self, self._last, root, tokens)

    def withdraw(self, number: int) -> None:
        """End an announcement; nothing happens if it has ended."""
        self._roots.pop(number, None)
        for index, node in self._data.pop(number, ()):
            component = self._tree.components[index]
            places = dict(self.places_of(component, node))
            del places[number]
            self._change(component, node, places)

    def place(self, index: int, node: Node) -> int | None:
        """The place of the first request that will use a component's data; None for none."""
        places = self._places.get((index, node))
        return min(places.values()) if places else None

    def places_of(self, component: TreeComponent, node: Node) -> dict[int, int]:
        """The places of all requests that will use a component's data, by announcement."""
        return self._places.get((component.index, node), {})

    # -- the tree's changes

    def split(self, upper: Node, node: Node) -> None:
        """Both parts are announced like the whole was; a state stays with the lower one."""
        for component in self._tree.components:
            places = self.places_of(component, node)
            if places and not component.is_state:
                self._places[component.index, upper] = dict(places)
                for number in places:
                    self._data[number][component.index, upper] = None

    def removed(self, node: Node) -> None:
        """Its data is gone."""
        for component in self._tree.components:
            for number in self._places.pop((component.index, node), ()):
                self._data[number].pop((component.index, node), None)

    def cleared(self, roots: Sequence[Node]) -> None:
        """Nobody uses the data of cleared namespaces."""
        gone = set(roots)
        for number in [each for each, root in self._roots.items() if root in gone]:
            self.withdraw(number)

    # -- inside

    def _change(self, component: TreeComponent, node: Node, places: dict[int, int]) -> None:
        """Give a component's data on a node other announcements; where it waits to leave, anew."""
        cell = node.cells[component.index]
        queues = [component.device.queue] if cell.queued & ON_DEVICE else []
        if component.host is not None and cell.queued & ON_HOST:
            queues.append(component.host.queue)
        for queue in queues:
            queue.withdraw(node)
        clean = cell.queued & CLEAN  # the clean reserve leaves first
        component.clean.withdraw(node)
        if places:
            self._places[component.index, node] = places
        else:
            self._places.pop((component.index, node), None)
        for queue in queues:
            queue.push(node)
        if clean:
            if self._tree.is_candidate(node, component, Tier.DEVICE):
                component.device.queue.push(node)
            component.queue_double(node)


class AnnouncedOrder:
    """The order of a policy, and behind all of it announced candidates, the last place first."""

    __slots__ = ("_announced", "_entries", "_heap", "_index", "_plain")

    def __init__(self, plain: Order, announced: Announced, index: int) -> None:
        self._plain = plain
        self._announced = announced
        self._index = index
        self._heap: list[tuple[int, int, int, Node]] = []
        self._entries: dict[Node, tuple[int, int]] = {}
        """Stamp and place of those in the heap; others there are stale."""

    @property
    def announced(self) -> Announced:
        """The announcements."""
        return self._announced

    def push(self, stamp: int, node: Any) -> None:
        """Enter a candidate."""
        place = self._announced.place(self._index, node)
        if place is None:
            self._plain.push(stamp, node)
            return
        self._entries[node] = stamp, place
        heappush(self._heap, (-place, -node.end, node.ident, node))
        if len(self._heap) > 2 * len(self._entries) + 64:
            live = {id(each[3]): each for each in self._heap if self._is_live(each)}
            self._heap = sorted(live.values(), key=lambda each: each[:3])

    def pop(self) -> tuple[int, Any] | None:
        """Take the next victim."""
        entry = self._plain.pop()
        if entry is not None:
            return entry
        while self._heap:
            first = heappop(self._heap)
            if self._is_live(first):
                return self._entries.pop(first[3])[0], first[3]
        return None

    def withdraw(self, stamp: int, node: Any) -> None:
        """Drop a candidate."""
        if self._entries.pop(node, None) is None:
            self._plain.withdraw(stamp, node)

    def score(self, stamp: int) -> float | None:
        """The policy's."""
        return self._plain.score(stamp)

    def __len__(self) -> int:
        return len(self._plain) + len(self._entries)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Every candidate with its stamp, in no order."""
        yield from self._plain
        for node, (stamp, _) in self._entries.items():
            yield stamp, node

    def _is_live(self, entry: tuple[int, int, int, Node]) -> bool:
        held = self._entries.get(entry[3])
        return held is not None and held[1] == -entry[0]


def announce(cache: Cache, key: TokenKey, *, place: int | None = None) -> Announcement:
    """Announce that a request for `key` waits: its cached prefix leaves after other data.

    For a queue whose requests are begun later. Only data that is cached now counts, on DEVICE and
    on HOST. It is no promise: data of lower priority, expired and evict-first data still leaves
    first, and announced data leaves when nothing else is left, that of the last place first.
    Admission decides as without it. Withdraw the announcement once the request is admitted;
    `Cache.clear` ends those of its namespace.

    Cost: a match, and O(log candidates) for each node of the prefix. The first call of a cache
    enters all candidates anew, O(candidates).

    Args:
        cache: the cache.
        key: of the request; nothing is kept of it.
        place: where it waits: requests of smaller numbers begin before. By default behind the one
            that was announced last.

    Returns:
        The announcement; beyond `MOST_ANNOUNCED` at a time it announces nothing.
    """
    cache.expect_open()
    announced = next((each for each in cache.tree.observers if isinstance(each, Announced)), None)
    if announced is None:
        announced = Announced(cache.tree)
    return announced.add(expect_key(key), place)


def _use(queue: Candidates, tree: Tree, announced: Announced, index: int) -> None:
    """Put the announced candidates behind the orders of one pool."""

    def order(pool: Pool) -> AnnouncedOrder:
        return AnnouncedOrder(tree.policy.order(pool), announced, index)

    waiting = sorted(queue, key=lambda each: each[0])
    for _, node in waiting:
        queue.withdraw(node)
    queue.use(order)
    for _, node in waiting:
        queue.push(node)
