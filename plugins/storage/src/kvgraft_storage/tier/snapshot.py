"""The tree's index as a file: the nodes known to be in the store, most recently used first.

    "KVGRSNAP", version (u32), length of the rest (u64), its XXH3-128, the rest

The rest is one canonical value (see `kvgraft_storage.canonical`). The content itself is in the
store, and data lost meanwhile is a miss.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from kvgraft.errors import SnapshotError
from kvgraft.policies.policy import is_left_behind
from kvgraft.tree.keys import NAMESPACE_DEPTH, TOKEN_BYTES, TokenKey
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree
from kvgraft_storage.canonical import decode, encode
from kvgraft_storage.files import replace_file

__all__ = ["Boundary", "read_snapshot", "write_snapshot"]

MAGIC = b"KVGRSNAP"
VERSION = 1
HEAD = struct.Struct("<8sIQ16s")
MAX_NBYTES = 4 << 30
"""The longest rest: a thousand million tokens."""

CHUNK_NBYTES = 1 << 20
DEPTH = NAMESPACE_DEPTH + 3
"""Tuples inside tuples: those around a namespace, and its own."""


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
        """The sequence; built on demand, since sequences share most of it."""
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
    """Write the nodes known to be in a store; replaces `path` at once or not at all.

    Args:
        path: the file.
        tree: the tree.
        fingerprint: digest of the model that computed the data.
        store: number of the store.

    Returns:
        The nodes written.

    Raises:
        SnapshotError: the file cannot be written, or would be longer than a snapshot may be.
    """
    namespaces = tuple(
        (tree.namespace(root), tuple(_records(root, store))) for root in tree.roots.values()
    )
    body = encode((fingerprint, tree.page_size, namespaces), "snapshot", DEPTH)
    if len(body) > MAX_NBYTES:
        raise SnapshotError(f"snapshot {path}: {len(body)} bytes > {MAX_NBYTES}; go without it")
    head = HEAD.pack(MAGIC, VERSION, len(body), xxhash.xxh3_128_digest(body))
    try:
        replace_file(path, head + body)
    except OSError as error:
        raise SnapshotError(f"snapshot {path}: cannot be written: {error.strerror}") from error
    return sum(len(records) for _, records in namespaces)


def _records(root: Node, store: int) -> Iterator[tuple[int, bytes, int]]:
    """Nodes in the store and those on the way: number of the parent, tokens, recency.

    A node only on the way has no data of its own, such as before a window, and recency -1.
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


def read_snapshot(path: Path, page_size: int, fingerprint: bytes) -> list[Boundary]:
    """The boundaries in a snapshot, most recently used first.

    Raises:
        SnapshotError: it is missing, damaged, no snapshot, or of another model or layout.
    """
    try:
        body = _body(path)
        found, its_page_size, namespaces = _contents(decode(body, DEPTH))
        if found != fingerprint or its_page_size != page_size:
            raise _RefusedError(
                f"is of another model, weights or layout ({found.hex()[:12]}, this cache is "
                f"{fingerprint.hex()[:12]})"
            )
        return _boundaries(namespaces, page_size)
    except OSError as error:
        raise SnapshotError(f"snapshot {path}: cannot be read: {error.strerror}") from error
    except (ValueError, MemoryError) as error:
        reason = error if isinstance(error, _RefusedError) else f"is damaged ({error})"
        raise SnapshotError(f"snapshot {path}: {reason}; start without it") from error


class _RefusedError(ValueError):
    """The file's content is impossible."""


def _body(path: Path) -> bytes:
    """The part behind the head, checked; reads only the length that the head announces."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait
    with os.fdopen(descriptor, "rb") as file:
        told = os.fstat(descriptor)
        if not stat.S_ISREG(told.st_mode):
            raise _RefusedError("is no regular file")
        head = file.read(HEAD.size)
        if len(head) < HEAD.size or not head.startswith(MAGIC):
            raise _RefusedError("is no snapshot of kvgraft")
        _, version, length, checksum = HEAD.unpack(head)
        if version != VERSION:
            raise _RefusedError(f"has format {version}, this is for {VERSION}")
        found = told.st_size - HEAD.size
        if found != length:
            raise _RefusedError(f"is damaged ({found} of {length} bytes)")
        if length > MAX_NBYTES:
            raise _RefusedError(f"is damaged ({length} bytes, {MAX_NBYTES} at most)")
        digest = xxhash.xxh3_128()
        while chunk := file.read(CHUNK_NBYTES):  # before so many bytes are held
            digest.update(chunk)
        file.seek(HEAD.size)
        body = file.read(length) if digest.digest() == checksum else b""
        if xxhash.xxh3_128_digest(body) != checksum:
            raise _RefusedError(f"is damaged ({found} of {length} bytes)")
        return body


def _contents(value: object) -> tuple[bytes, int, list[_Namespace]]:
    """Fingerprint, page size and namespaces, if a value is made of them."""
    if not isinstance(value, tuple) or len(value) != 3:
        raise _RefusedError("is damaged (not three fields)")
    fingerprint, page_size, namespaces = value
    if not (_is(fingerprint, bytes) and _is(page_size, int) and _is(namespaces, tuple)):
        raise _RefusedError("is damaged (no fingerprint, page size and namespaces)")
    seen = set()
    for each in namespaces:
        if not _is(each, tuple) or len(each) != 2 or not _is(each[1], tuple):
            raise _RefusedError("is damaged (no namespace with its nodes)")
        if each[0] in seen:
            raise _RefusedError("is damaged (a namespace stands there twice)")
        seen.add(each[0])
    return fingerprint, page_size, list(namespaces)


def _is(value: object, kind: type) -> bool:
    return type(value) is kind


def _boundaries(namespaces: Sequence[_Namespace], page_size: int) -> list[Boundary]:
    found: list[tuple[int, Boundary]] = []
    page_nbytes = page_size * TOKEN_BYTES
    for space in namespaces:
        lengths = [0]
        siblings = set()
        for number, record in enumerate(space[1], start=1):
            parent, tokens, stamp = _node(record, number, page_nbytes)
            if (parent, tokens[:page_nbytes]) in siblings:
                raise _RefusedError(f"is damaged (node {number} stands there twice)")
            siblings.add((parent, tokens[:page_nbytes]))
            lengths.append(lengths[parent] + len(tokens) // page_nbytes)
            if not is_left_behind(stamp):
                found.append((stamp, Boundary(space, number, lengths[-1])))
    # of one age the longest first: nodes above come with it
    found.sort(key=lambda each: (-each[0], -each[1].pages))
    return [boundary for _, boundary in found]


def _node(record: object, number: int, page_nbytes: int) -> tuple[int, bytes, int]:
    """A node that comes after its parent and has whole pages."""
    if not isinstance(record, tuple) or list(map(type, record)) != [int, bytes, int]:
        raise _RefusedError(f"is damaged (node {number} is none)")
    parent, tokens, stamp = record
    if not 0 <= parent < number:
        raise _RefusedError(f"is damaged (the parent of node {number} does not come before it)")
    if not tokens or len(tokens) % page_nbytes:
        raise _RefusedError(f"is damaged (node {number}: {len(tokens)} bytes are no whole pages)")
    return parent, tokens, stamp
