"""What the tree's pages are called in STORAGE: hashes on nodes, each computed once (S8, T11)."""

from __future__ import annotations

from collections.abc import Sequence

from kvgraft.errors import ConfigError, IntegrityError
from kvgraft.storage import Address, Fingerprint
from kvgraft.storage.keys import (
    HASH_NBYTES,
    namespace_digest,
    page_hash,
    root_hash,
    storage_keys,
)
from kvgraft.tree.keys import PageHashes, TokenKey
from kvgraft.tree.node import Node, PageNames
from kvgraft.tree.track import Track
from kvgraft.tree.tree import Tree

__all__ = ["Naming", "labels"]


def labels(track: Track) -> list[str]:
    """A component's names in storage, one for each slot of a page.

    A payload is one HOST slot. A component with several to a page has an address for each.
    """
    if track.is_state or track.slots_per_page == 1:
        return [track.name]
    return [f"{track.name}:{number}" for number in range(track.slots_per_page)]


class Naming:
    """Page hashes and addresses for one tree.

    Args:
        tree: whose nodes.
        fingerprint: what computes their data.
    """

    def __init__(self, tree: Tree, fingerprint: Fingerprint) -> None:
        self.tree = tree
        self.fingerprint = fingerprint
        self._labels = [labels(track) for track in tree.tracks]

    def of(self, node: Node) -> PageNames:
        """A node's names; hashes what has none yet on the way from its root, 0.5 µs a page.

        Raises:
            ConfigError: its namespace has no canonical bytes.
        """
        unnamed: list[Node] = []
        while node.names is None and node.parent is not None:
            unnamed.append(node)
            node = node.parent
        if node.names is None:
            node.names = PageNames(self._root_hash(node))
        names = node.names
        for below in reversed(unnamed):
            hashes = self.hashes(names.hashes[-HASH_NBYTES:], below.key)
            names = below.names = PageNames(b"".join(hashes))
        return names

    def hashes(self, parent: bytes, tokens: bytes | bytearray) -> list[bytes]:
        """The hashes of the whole pages in `tokens`, which follow the page called `parent`."""
        size, found = self.tree.page_bytes, []
        for start in range(0, len(tokens) // size * size, size):
            parent = page_hash(parent, tokens[start : start + size])
            found.append(parent)
        return found

    def of_key(self, key: TokenKey, node: Node, end: int) -> list[bytes]:
        """The hashes of a key's pages below a node, up to page `end`.

        The key keeps them, and hands them to the nodes that are made of it.
        """
        known = key.page_hashes(self.tree, node.end, end)
        if known is None:
            size = self.tree.page_bytes
            behind = key.data[node.end * size : end * size]
            known = self.hashes(self.last_hash(node), behind)
            key.hashed = PageHashes(self.tree, key.namespace, node.end, known)
        return known

    def extend(self, key: TokenKey, end: int) -> None:
        """Let a key that has hashes have those of all pages up to page `end`."""
        known = key.hashed
        if known is None or not known.hashes:
            return
        if key.page_hashes(self.tree, known.first, known.first) is None:
            return
        size, last = self.tree.page_bytes, known.first + len(known.hashes)
        more = self.hashes(known.hashes[-1], key.data[last * size : end * size])
        if more:
            key.hashed = known._replace(hashes=known.hashes + more)

    def last_hash(self, node: Node) -> bytes:
        """The hash that the pages below a node follow."""
        return self.of(node).hashes[-HASH_NBYTES:]

    def page_hashes(self, node: Node) -> list[bytes]:
        """The hashes of a node's pages, one by one."""
        hashes = self.of(node).hashes
        return [hashes[at : at + HASH_NBYTES] for at in range(0, len(hashes), HASH_NBYTES)]

    def addresses(
        self, pages: Sequence[bytes], track: Track, namespace: bytes
    ) -> list[list[Address]]:
        """Where a component's data of some pages is: per slot of a page, an address for each page.

        `namespace` is a digest.
        """
        return [
            [Address(key, label, namespace) for key in storage_keys(pages, label)]
            for label in self._labels[track.index]
        ]

    def namespace(self, namespace: object) -> bytes:
        """The digest of a namespace.

        Raises:
            ConfigError: it has no canonical bytes.
        """
        return namespace_digest(namespace)

    def check(self) -> None:
        """Recompute the hashes of every node that has some; O(pages).

        Raises:
            IntegrityError: a node has others than its tokens and namespace give (S8, T10).
        """
        for root in self.tree.roots.values():
            try:
                last = {id(root): self._root_hash(root)}
            except ConfigError:
                continue  # a namespace without a name: nothing in it has one
            stack = [(root, child) for child in root.each_child()]
            while stack:
                parent, node = stack.pop()
                hashes = self.hashes(last[id(parent)], node.key)
                last[id(node)] = hashes[-1]
                if node.names is not None and node.names.hashes != b"".join(hashes):
                    held = len(node.names.hashes) // HASH_NBYTES
                    raise IntegrityError(
                        "T10", None, f"{node!r} has {held} page hashes that are not its tokens'"
                    )
                stack.extend((node, child) for child in node.each_child())

    def _root_hash(self, root: Node) -> bytes:
        return root_hash(self.fingerprint, namespace_digest(self.tree.namespace(root)))
