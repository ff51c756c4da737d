"""Names of the tree's pages in STORAGE: hashes on nodes, each computed once (S8, T11)."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvgraft.errors import ConfigError, IntegrityError
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree
from kvgraft_storage import Address
from kvgraft_storage.keys import (
    HASH_NBYTES,
    namespace_digest,
    page_hash,
    storage_keys,
)
from kvgraft_storage.tier.names import PageNames, is_named
from kvgraft_storage.tier.versions import Versions

__all__ = ["BLOCK_PAGES", "KNOWN_NBYTES", "Asked", "Naming", "Together", "block_end", "labels"]

BLOCK_PAGES = 64
"""Pages that are hashed at once; blocks begin at multiples of it."""

KNOWN_NBYTES = 32 << 20
"""Bytes of blocks whose hashes are remembered, for sequences that share them."""


def labels(component: TreeComponent) -> list[str]:
    """A component's names in storage, one for each slot of a page.

    A payload is one HOST slot; each slot of a page has its own address.
    """
    if component.is_state or component.slots_per_page == 1:
        return [component.name]
    return [f"{component.name}:{number}" for number in range(component.slots_per_page)]


class Asked(Sequence[Address]):
    """Addresses of some pages, made lazily, on any thread.

    Args:
        hashes: 32 bytes a page, from page `first` on.
        first: see `hashes`.
        parts: per component, its labels and the pages, int `[n]`: for each page all labels.
        namespace: a digest.
    """

    def __init__(
        self,
        hashes: bytes | bytearray,
        first: int,
        parts: Sequence[tuple[Sequence[str], npt.NDArray[np.int64]]],
        namespace: bytes,
    ) -> None:
        self._hashes = hashes
        self._first = first
        self._parts = parts
        self._namespace = namespace
        self._n = sum(len(names) * len(pages) for names, pages in parts)

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, part: slice) -> list[Address]:  # type: ignore[override]
        """The addresses of a part, 1 µs each."""
        low, high, _ = part.indices(self._n)
        found: list[Address] = []
        for names, pages in self._parts:
            n_labels, n_keys = len(names), len(names) * len(pages)
            if low < n_keys and high > 0:
                mine = slice(max(low, 0), min(high, n_keys))
                found += self._of(names, pages, n_labels, mine)
            low, high = low - n_keys, high - n_keys
        return found

    def _of(
        self, names: Sequence[str], pages: npt.NDArray[np.int64], n_labels: int, part: slice
    ) -> list[Address]:
        some = pages[part.start // n_labels : -(-part.stop // n_labels)].tolist()
        places = [(page - self._first) * HASH_NBYTES for page in some]
        hashes = [bytes(self._hashes[place : place + HASH_NBYTES]) for place in places]
        keys = [storage_keys(hashes, name) for name in names]
        flat = [
            Address(key, name, self._namespace)
            for of_a_page in zip(*keys)
            for key, name in zip(of_a_page, names)
        ]
        skipped = part.start // n_labels * n_labels
        return flat[part.start - skipped : part.stop - skipped]


class Together(Sequence[Address]):
    """Several runs of addresses as one."""

    def __init__(self, pieces: Sequence[Asked]) -> None:
        self._pieces = pieces
        self._ends = np.cumsum([len(piece) for piece in pieces]).tolist()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, part: slice) -> list[Address]:  # type: ignore[override]
        low, high, _ = part.indices(len(self))
        found: list[Address] = []
        number = bisect_right(self._ends, low)
        while low < high:
            first = self._ends[number] - len(self._pieces[number])
            end = min(high, self._ends[number])
            found += self._pieces[number][low - first : end - first]
            low, number = end, number + 1
        return found


class Naming:
    """Page hashes and addresses for one tree.

    Nodes share the hashes of pages they have in common with a key. Sequences in no tree share
    blocks of `BLOCK_PAGES`, found by the hash before and all of their tokens.

    Args:
        tree: the tree of the nodes.
        versions: of its namespaces; they name the roots.
    """

    def __init__(self, tree: Tree, versions: Versions) -> None:
        self.tree = tree
        self.versions = versions
        self._labels = [labels(component) for component in tree.components]
        self._known: OrderedDict[tuple[bytes, bytes], bytes] = OrderedDict()
        block_nbytes = BLOCK_PAGES * (tree.page_bytes + HASH_NBYTES)
        self._most_known = max(1, KNOWN_NBYTES // block_nbytes)

    def of(self, node: Node) -> PageNames:
        """A node's names, some of which may still be unknown.

        Raises:
            ConfigError: its namespace has no canonical bytes.
        """
        if node.names is None:
            node.names = PageNames(bytearray(b"" if node.end else self._root_hash(node)))
        names: PageNames = node.names
        return names

    def rename(self) -> None:
        """Drop the names of namespaces that have got other versions; O(their nodes).

        Keys give names to nodes below a root that has none itself.
        """
        for root in self.tree.roots.values():
            if root.names is not None and bytes(root.names.hashes) == self._root_hash(root):
                continue
            nodes = [root]
            while nodes:
                node = nodes.pop()
                if node.names is not None or node is root:
                    node.names = None
                    nodes.extend(node.each_child())

    def name(self, node: Node) -> Iterator[None]:
        """Hash the pages without a hash on the path from a node's root to it, a block at a time.

        Nodes may be split and leave the tree between two blocks. After the last one the node and
        all parts that it was split into have names, or it has left the tree.

        Raises:
            ConfigError: its namespace has no canonical bytes.
        """
        stack = [node]
        while stack:
            top = stack[-1]
            if is_named(top):
                stack.pop()
            elif top.parent is None:
                if top.end:
                    return  # it left the tree
                self.of(top)
            elif not is_named(top.parent):
                stack.append(top.parent)
            else:
                names = self.of(top)
                last = names.hashes[-HASH_NBYTES:] or self.of(top.parent).hashes[-HASH_NBYTES:]
                page = top.start + len(names.hashes) // HASH_NBYTES
                end = min(top.end, block_end(page))
                names.hashes += self.block(bytes(last), top.key, page - top.start, page, end)
                yield

    def block(
        self, parent: bytes, tokens: bytes | bytearray, at: int, page: int, end: int
    ) -> bytes:
        """The hashes of pages `[page, end)` of one block, after the page with the hash `parent`.

        `tokens` has them from its page `at` on. At most 50 µs for pages of 64 tokens.
        """
        size = self.tree.page_bytes
        mine = bytes(tokens[at * size : (at + end - page) * size])
        if end - page < BLOCK_PAGES:
            return self.hashes(parent, mine)
        known = self._known.get((parent, mine))
        if known is None:
            known = self._known[parent, mine] = self.hashes(parent, mine)
            if len(self._known) > self._most_known:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end((parent, mine))
        return known

    def hashes(self, parent: bytes, tokens: bytes | bytearray) -> bytes:
        """The hashes of the whole pages in `tokens`, after the page with the hash `parent`."""
        size, found = self.tree.page_bytes, []
        for start in range(0, len(tokens) // size * size, size):
            parent = page_hash(parent, tokens[start : start + size])
            found.append(parent)
        return b"".join(found)

    def asked(
        self,
        hashes: bytes | bytearray,
        first: int,
        parts: Sequence[tuple[TreeComponent, npt.NDArray[np.int64]]],
        namespace: bytes,
    ) -> Asked:
        """Addresses of the data of some components' pages.

        Args:
            hashes: 32 bytes a page, from page `first` on.
            first: see `hashes`.
            parts: components, and the pages of each.
            namespace: a digest.
        """
        labelled = [(self._labels[component.index], pages) for component, pages in parts]
        return Asked(hashes, first, labelled, namespace)

    def namespace(self, namespace: object) -> bytes:
        """The digest of a namespace.

        Raises:
            ConfigError: it has no canonical bytes.
        """
        return namespace_digest(namespace)

    def check(self) -> None:
        """Recompute the hashes of every node that has some; O(pages).

        Raises:
            IntegrityError: a node has wrong hashes for its tokens and namespace (S8, T10), or some
                behind pages without any (T10), or two pages of one name have different prefixes
                (S8, T11).
        """
        size = self.tree.page_bytes
        first_of: dict[bytes, Node] = {}
        for root in self.tree.roots.values():
            try:
                last = {id(root): self._root_hash(root)}
            except ConfigError:
                continue  # a namespace without a name: nothing in it has one
            stack = [(root, child) for child in root.each_child()]
            while stack:
                parent, node = stack.pop()
                hashes, above = [], last[id(parent)]
                for start in range(0, len(node.key), size):
                    above = page_hash(above, node.key[start : start + size])
                    hashes.append(above)
                last[id(node)] = above
                if first_of.setdefault(above, node) is not node:
                    raise IntegrityError(
                        "S8", None, f"{node!r} and {first_of[above]!r} end in one page hash"
                    )
                if node.names is not None and not b"".join(hashes).startswith(node.names.hashes):
                    held = len(node.names.hashes) // HASH_NBYTES
                    raise IntegrityError(
                        "S8", None, f"{node!r} has {held} page hashes that are not its tokens'"
                    )
                named = node.names is not None and node.names.hashes
                if named and parent.parent is not None and not is_named(parent):
                    raise IntegrityError(
                        "T10", None, f"{node!r} has page hashes, and {parent!r} lacks some"
                    )
                stack.extend((node, child) for child in node.each_child())

    def _root_hash(self, root: Node) -> bytes:
        return self.versions.root(self.tree.namespace(root))


def block_end(page: int) -> int:
    """Where the block of a page ends."""
    return (page // BLOCK_PAGES + 1) * BLOCK_PAGES
