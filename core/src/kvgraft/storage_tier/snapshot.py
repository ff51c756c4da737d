"""The tree's index as a file: what was known to be in the store, most recently used first.

    "KVGRSNAP", version (u32), length of the rest (u64), its XXH3-128, the rest

The rest is one canonical value (see `kvgraft.storage.canonical`). Content is not in it: the store
has that, and what it has lost meanwhile is a miss.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from kvgraft.errors import SnapshotError
from kvgraft.storage.canonical import decode, encode
from kvgraft.tree.keys import TOKEN_BYTES, TokenKey
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree

__all__ = ["Boundary", "read_snapshot", "write_snapshot"]

MAGIC = b"KVGRSNAP"
VERSION = 1
HEAD = struct.Struct("<8sIQ16s")


_Namespace = tuple[object, tuple[tuple[int, bytes, int], ...]]
"""A namespace, and its nodes: number of the parent (0 is the root), tokens, recency."""


class Boundary(NamedTuple):
    """The end of a node that was stored, at least in part.

    Attributes:
        space: its namespace with all nodes.
        number: its place among them, from 1; 0 is the root.
        pages: the length of the sequence up to it.
    """

    space: _Namespace
    number: int
    pages: int

    def key(self) -> TokenKey:
        """The sequence; put together when it is asked for, since sequences share most of it."""
        namespace, records = self.space
        parts: list[bytes] = []
        number = self.number
        while number:
            number, tokens, _ = records[number - 1]
            parts.append(tokens)
        key = TokenKey(namespace=namespace)
        key.data += b"".join(reversed(parts))
        return key


def write_snapshot(path: Path, tree: Tree, fingerprint: bytes, store: int) -> int:
    """Write what of the tree is known to be in a store; replaces `path` at once or not at all.

    Args:
        path: the file.
        tree: the tree.
        fingerprint: digest of what computed the data.
        store: number of the store.

    Returns:
        The nodes written.

    Raises:
        SnapshotError: the file cannot be written.
    """
    namespaces = tuple(
        (tree.namespace(root), tuple(_records(root, store))) for root in tree.roots.values()
    )
    body = encode((fingerprint, tree.page_size, namespaces), "snapshot")
    head = HEAD.pack(MAGIC, VERSION, len(body), xxhash.xxh3_128_digest(body))
    try:
        _replace(path, head + body)
    except OSError as error:
        raise SnapshotError(f"snapshot {path}: cannot be written: {error.strerror}") from error
    return sum(len(records) for _, records in namespaces)


def _records(root: Node, store: int) -> Iterator[tuple[int, bytes, int]]:
    """Nodes in the store and those on the way: number of the parent, tokens, recency.

    What is only on the way has no data of its own, such as before a window, and recency -1.
    """
    nodes = [*root.each_child()]
    for node in nodes:
        nodes.extend(node.each_child())
    stored = {
        id(node)
        for node in nodes
        if node.names is not None and node.names.store == store and node.names.stored
    }
    wanted = set(stored)
    for node in reversed(nodes):
        if id(node) in wanted:
            wanted.add(id(node.parent))
    numbers = {id(root): 0}
    for node in nodes:
        if id(node) in wanted:
            numbers[id(node)] = len(numbers)
            stamp = max(cell.stamp for cell in node.cells) if id(node) in stored else -1
            yield numbers[id(node.parent)], node.key, stamp


def _replace(path: Path, content: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise


def read_snapshot(path: Path, page_size: int, fingerprint: bytes) -> list[Boundary]:
    """The boundaries in a snapshot, most recently used first.

    Raises:
        SnapshotError: it is missing, damaged, or of another model or layout.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SnapshotError(f"snapshot {path}: cannot be read: {error.strerror}") from error
    if len(content) < HEAD.size or not content.startswith(MAGIC):
        raise SnapshotError(f"snapshot {path}: is no snapshot of kvgraft; start without it")
    _, version, length, checksum = HEAD.unpack_from(content)
    if version != VERSION:
        raise SnapshotError(
            f"snapshot {path}: has format {version}, this is for {VERSION}; start without it"
        )
    body = content[HEAD.size :]
    if len(body) != length or xxhash.xxh3_128_digest(body) != checksum:
        raise SnapshotError(
            f"snapshot {path}: is damaged ({len(body)} of {length} bytes); start without it"
        )
    found: bytes
    its_page_size: int
    namespaces: tuple[_Namespace, ...]
    found, its_page_size, namespaces = decode(body)  # type: ignore[misc]
    if found != fingerprint or its_page_size != page_size:
        raise SnapshotError(
            f"snapshot {path}: is of another model, weights or layout ({found.hex()[:12]}, this "
            f"cache is {fingerprint.hex()[:12]}); start without it"
        )
    return _boundaries(namespaces, page_size)


def _boundaries(namespaces: Sequence[_Namespace], page_size: int) -> list[Boundary]:
    found: list[tuple[int, Boundary]] = []
    for space in namespaces:
        lengths = [0]
        for number, (parent, tokens, stamp) in enumerate(space[1], start=1):
            lengths.append(lengths[parent] + len(tokens) // (page_size * TOKEN_BYTES))
            if stamp >= 0:
                found.append((stamp, Boundary(space, number, lengths[-1])))
    # of one age the longest first: what is above comes with it
    found.sort(key=lambda each: (-each[0], -each[1].pages))
    return [boundary for _, boundary in found]
