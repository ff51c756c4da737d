"""Makes events of the tree's changes, and gives them to every stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvgraft.errors import IntegrityError
from kvgraft.optional import load_part
from kvgraft.requests.hits import Loaded
from kvgraft.requests.request import Request
from kvgraft.tree.component import Cause, TreeComponent
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree, TreeObserver
from kvgraft.types import Tier
from kvgraft_observe.events.kinds import Event, Evicted, Hit, Moved, Stored
from kvgraft_observe.events.pages import Pages, Run
from kvgraft_observe.events.stream import EventStream, Observe

__all__ = ["Recorder"]

MOST_KNOWN = 4096
"""Images of requests that are known by their numbers, the latest ones."""

new = tuple.__new__
"""Makes an event from its values in half the time of a call of its class."""


class Recorder(TreeObserver):
    """Makes the events of one tree while a stream is open.

    Nothing is hashed here: an event costs the scheduler's thread about 1 µs for any number of
    pages.

    Args:
        tree: the tree to observe, from the first stream to the last.
        ended: called when the last stream was closed.

    Attributes:
        new_stream: the class of streams.
    """

    new_stream: type[EventStream] = EventStream

    def __init__(self, tree: Tree, ended: Callable[[], object]) -> None:
        self.tree = tree
        self._ended = ended
        self.streams: tuple[EventStream, ...] = ()
        self._tell: Callable[[Event], object] = self._tell_all
        self._pages: dict[Node, Pages] = {}
        self._known: dict[int, Any] = {}
        """Things behind placeholders of requests, by the first of their numbers in a key."""

    def open(self, limit: int, observer: Observe | None) -> EventStream:
        """Open another stream; it begins with a snapshot."""
        if not self.streams:
            for node in self._nodes():
                self.linked(node)
            self.tree.add_observer(self)
        stream = self.new_stream(limit, observer, self.snapshot, self._close)
        self._set_streams((*self.streams, stream))
        return stream

    def _set_streams(self, streams: tuple[EventStream, ...]) -> None:
        self.streams = streams
        self._tell = streams[0].add if len(streams) == 1 else self._tell_all

    def _tell_all(self, event: Event) -> None:
        for stream in self.streams:
            stream.add(event)

    def _close(self, stream: EventStream) -> None:
        self._set_streams(tuple(each for each in self.streams if each is not stream))
        if not self.streams:
            self.tree.remove_observer(self)
            self._pages.clear()
            self._ended()

    def deliver(self) -> None:
        """Give the streams' observers their events."""
        for stream in self.streams:
            stream.deliver()

    def snapshot(self) -> Iterator[Event]:
        """The tree's residency, parents before children; O(tree)."""
        for node in self._nodes():
            for component, tier, pages in self._residency(node):
                yield Stored(component.name, tier, pages)

    def _nodes(self) -> Iterator[Node]:
        """Nodes that a match may find, so none of a cleared namespace."""
        return self.tree.nodes(self.tree.roots.values())

    def _residency(self, node: Node) -> Iterator[tuple[TreeComponent, Tier, Pages]]:
        for component, cell in zip(self.tree.components, node.cells):
            for tier, data in ((Tier.DEVICE, cell.device), (Tier.HOST, cell.host)):
                if data is not None:
                    pages = self._pages[node]
                    if component.is_state:
                        pages = pages.part(node.end - 1, node.end)
                    yield component, tier, pages

    def hit(self, request: Request, loaded: Loaded) -> None:
        """A request was admitted."""
        if request.key.identities is not None:
            for each in request.key.identities.placed:
                self._known.pop(first := int(each.thing.numbers[0]), None)
                self._known[first] = each.thing
            for forgotten in list(self._known)[: len(self._known) - MOST_KNOWN]:
                del self._known[forgotten]
        anchor, device, storage = (
            request.anchor_tokens,
            request.device_tokens,
            request.storage_tokens,
        )
        event = Hit(
            request.key.namespace,
            request.prompt,
            device,
            anchor - device - storage,
            storage,
            anchor // self.tree.page_size,
            loaded,
            self.tree.components,
        )
        self._tell(event)

    def check(self) -> None:
        """Every node's pages are those that events name; O(tree).

        Raises:
            IntegrityError: a node with other pages, or pages of a node that left the tree (V2).
        """
        n_nodes, nodes = len(self._pages), dict.fromkeys(self._nodes())
        if self._pages.keys() != nodes.keys():
            raise IntegrityError(
                "V2", None, f"events know pages of {n_nodes} nodes, the tree has {len(nodes)}"
            )
        namespaces = {root.ident: namespace for namespace, root in self.tree.roots.items()}
        for node in nodes:
            parent, pages = node.parent, self._pages[node]
            assert parent is not None
            above = self._pages.get(parent)
            namespace = namespaces[parent.ident] if above is None else above.namespace
            if (pages.start, pages.end, pages.namespace) != (node.start, node.end, namespace):
                raise IntegrityError("V2", None, f"events name {pages!r} where {node!r} is")
            if pages.run.tokens_of(node.start, node.end) != node.key:
                raise IntegrityError("V2", None, f"events name other tokens than {node!r} has")

    # -- changes of the tree

    def linked(self, node: Node) -> None:
        parent, tree = node.parent, self.tree
        assert parent is not None
        follows = self._pages.get(parent)
        namespace = tree.namespace(parent) if follows is None else follows.namespace
        placed = self._placed(node, follows)
        self._pages[node] = Run(
            namespace, follows, node.key, tree.page_bytes, node.start, placed=placed
        )

    def split(self, upper: Node, node: Node) -> None:
        pages = self._pages.get(node)
        if pages is None:
            return  # it was cleared
        self._pages[upper] = pages.part(upper.start, upper.end)
        self._pages[node] = pages.part(node.start, node.end)

    def grew(self, node: Node) -> None:
        was = self._pages[node]
        known = was.run.known(was.start, was.end)
        size, before = self.tree.page_bytes, was.before
        placed = self._placed(node, before)
        self._pages[node] = Run(was.namespace, before, node.key, size, node.start, known, placed)

    def _placed(self, node: Node, follows: Pages | None) -> Sequence[Any]:
        """Things behind placeholders on a node."""
        if not self._known:
            return ()
        numbers = np.frombuffer(node.key, np.int32)
        if numbers.min() >= 0:
            return ()
        start = node.start * self.tree.page_size
        before = () if follows is None else follows.run.placed
        placed: Sequence[Any] = load_part("identities").found(start, numbers, self._known, before)
        return placed

    def removed(self, node: Node) -> None:
        self._pages.pop(node, None)

    def cleared(self, roots: Sequence[Node]) -> None:
        if not self.tree.roots:
            self._pages.clear()
            for stream in self.streams:
                stream.clear()
            return
        for node in self.tree.nodes(roots):
            for component, tier, pages in self._residency(node):
                self._tell(Evicted(component.name, tier, "cleared", pages))
            del self._pages[node]

    def arrived(
        self,
        node: Node,
        component: TreeComponent,
        tier: Tier,
        start: int,
        source: Tier | None,
    ) -> None:
        pages = self._pages.get(node)
        if pages is None:
            return
        if component.is_state:
            pages = pages.part(node.end - 1, node.end)
        elif start != node.start:
            pages = pages.part(start, node.end)
        if source is None:
            self._tell(new(Stored, (component.name, tier, pages)))
        else:
            self._tell(new(Moved, (component.name, tier, source, pages)))

    def leaving(self, node: Node, component: TreeComponent, tier: Tier, cause: Cause) -> None:
        pages = self._pages.get(node)
        if pages is None:
            return
        if component.is_state:
            pages = pages.part(node.end - 1, node.end)
        self._tell(new(Evicted, (component.name, tier, cause, pages)))
