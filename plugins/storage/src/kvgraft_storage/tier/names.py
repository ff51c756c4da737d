"""Names of pages in STORAGE, kept by nodes of the tree and by keys (S8)."""

from __future__ import annotations

from typing import NamedTuple

from kvgraft.policies.recency import untrack
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.node import Node
from kvgraft_storage.keys import HASH_NBYTES
from kvgraft_storage.tier.versions import Versions

__all__ = ["PageHashes", "PageNames", "is_named", "known_hashes", "take_names"]


class PageNames:
    """Names of a node's pages in STORAGE, and which of them are known to be there (S8).

    Attributes:
        hashes: the hashes of its first pages, joined; others are not known yet. For a root, the
            hash before its first pages.
        wanted: number of the store they should go to, now or once they are on HOST; 0 for none. If
            a node is wanted, so are its ancestors.
        offered: components whose data of all these pages was to go to `store` before, as bits.
        sent: components whose data of all these pages is on its way to a store, as bits.
        stored: components whose data of all these pages a store has acknowledged, as bits.
        store: number of that store; another one does not have them.
    """

    __slots__ = ("hashes", "offered", "sent", "store", "stored", "wanted")

    def __init__(self, hashes: bytearray) -> None:
        self.hashes = hashes
        self.wanted = 0
        self.offered = 0
        self.sent = 0
        self.stored = 0
        self.store = 0
        untrack((self,))

    def cut(self, pages: int, states: int) -> PageNames:
        """Give the first pages' hashes to an upper part; states (bits) stay with the lower."""
        nbytes = pages * HASH_NBYTES
        upper = PageNames(self.hashes[:nbytes])
        upper.wanted, upper.store = self.wanted, self.store
        upper.offered = self.offered & ~states
        upper.sent, upper.stored = self.sent & ~states, self.stored & ~states
        self.hashes = self.hashes[nbytes:]
        return upper


class PageHashes(NamedTuple):
    """Names of a key's pages, computed for a lookup in a store: `TokenKey.hashed`.

    Attributes:
        owner: the tree whose names they are.
        namespace: the key's, when they were computed.
        first: the first page.
        hashes: 32 bytes a page, from `first` on; a prefetch or write may still be adding some.
        versions: those of the tree's namespaces.
        number: of the versions that the names belong to.
    """

    owner: object
    namespace: object
    first: int
    hashes: bytes | bytearray
    versions: Versions
    number: int

    def of(self, tree: object, namespace: object, start: int, end: int) -> bytes | bytearray:
        """The known hashes of pages `[start, end)` in a tree.

        32 bytes a page; empty if that of page `start` is unknown.
        """
        if self.owner is not tree or self.namespace != namespace or start < self.first:
            return b""
        if self.number != self.versions.number:  # a namespace was cleared since
            return b""
        first = self.first
        return self.hashes[(start - first) * HASH_NBYTES : (end - first) * HASH_NBYTES]

    def name(self, tree: object, node: Node, namespace: object) -> None:
        """Give a node, and those before it, the key's names, without a gap."""
        path: list[Node] = []
        above: Node | None = node
        while above is not None and above.parent is not None and not is_named(above):
            path.append(above)
            above = above.parent
        for each in reversed(path):
            if not take_names(each, self.of(tree, namespace, each.start, each.end)):
                break


def known_hashes(key: TokenKey, tree: object, start: int, end: int) -> bytes | bytearray:
    """The hashes that a key has of its pages from `start` on, see `PageHashes.of`."""
    known: PageHashes | None = key.hashed
    return b"" if known is None else known.of(tree, key.namespace, start, end)


def is_named(node: Node) -> bool:
    """Whether the hashes of all of its pages are known, and so those of all pages before."""
    names: PageNames | None = node.names
    return names is not None and len(names.hashes) >= (node.end - node.start) * HASH_NBYTES


def take_names(node: Node, hashes: bytes | bytearray) -> bool:
    """Note the hashes of a node's first pages, where those of the pages before are known.

    Returns:
        Whether all of its pages have one now.
    """
    above = node.parent
    follows = above is None or above.parent is None or is_named(above)
    if not hashes or not follows:
        return False
    names: PageNames | None = node.names
    if names is None:
        node.names = PageNames(bytearray(hashes))
    elif len(hashes) > len(names.hashes):
        names.hashes[:] = hashes
    return is_named(node)
