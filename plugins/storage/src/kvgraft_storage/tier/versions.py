"""Versions of namespaces: data stored before a clear has other names than data stored after it.

A version is part of the hash before a sequence's first page, so that one value makes all older data
of a namespace, or of all, a miss, without a scan. A store that `keeps_versions` has them for the
next process; without one a version holds for this process.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Collection
from functools import partial

from kvgraft.errors import ConfigError
from kvgraft_storage import (
    Access,
    BreakerState,
    Fingerprint,
    Storage,
    StorageBackend,
    StorageTicket,
)
from kvgraft_storage.canonical import encode
from kvgraft_storage.keys import HASH_NBYTES, namespace_digest, root_hash

__all__ = ["Versions"]

NO_VERSION = bytes(HASH_NBYTES)
"""In hashes, where one of the two versions of a namespace is not set."""


class Versions:
    """The versions of one cache's namespaces, in memory and on their way to its store.

    Args:
        fingerprint: of the model that computes the data; versions are of its data alone.
        client: the supervised store.

    Attributes:
        number: grows with each change; hashes computed under another one are not used any more.
        new: makes a version that no process had before, 32 bytes.
    """

    def __init__(self, fingerprint: Fingerprint, client: Storage) -> None:
        self.number = 0
        self.new: Callable[[], bytes] = partial(secrets.token_bytes, HASH_NBYTES)
        self._fingerprint = fingerprint
        self._client = client
        self._keeps = False
        self._set: dict[bytes, bytes] = {}
        self._own: dict[bytes, bytes] = {}
        """Those that were not found in a store."""
        self._unwritten: dict[bytes, bytes] = {}
        self._writing: tuple[bytes, bytes, StorageTicket] | None = None

    @property
    def n_unwritten(self) -> int:
        """Versions that an attached store has not acknowledged."""
        return len(self._unwritten) if self._keeps and self._client.attached else 0

    @property
    def n_writing(self) -> int:
        """Versions on their way, while the store takes writes."""
        takes = self._client.state_of(Access.WRITE) is BreakerState.CLOSED
        return self.n_unwritten if takes else 0

    def root(self, namespace: object) -> bytes:
        """The hash before the first page of a namespace.

        Raises:
            ConfigError: the namespace has no canonical bytes.
        """
        digest = namespace_digest(namespace)
        plain = root_hash(self._fingerprint, digest)
        if not self._set:
            return plain
        versions = [self._set.get(self._name(each)) for each in (b"", digest)]
        if versions == [None, None]:
            return plain
        parts = [each or NO_VERSION for each in versions]
        return hashlib.sha256(b"kvgraft root 2\0" + plain + b"".join(parts)).digest()

    def change(self, namespaces: Collection[object] | None, version: object) -> bool:
        """Give some namespaces, or all with None, another version.

        Args:
            namespaces: those without canonical bytes are left out: nothing of them is stored.
            version: None for a new one, else the one with this name, for every process.

        Returns:
            Whether the store keeps it.

        Raises:
            ConfigError: `version` has no canonical bytes; nothing has changed.
        """
        value = self.new() if version is None else _named(version)
        for name in [self._name(b"")] if namespaces is None else self._names(namespaces):
            self._set[name] = self._own[name] = self._unwritten[name] = value
        self.number += 1
        self.poll()
        return self._keeps

    def attached(self, store: StorageBackend) -> None:
        """Take the versions that a store has, and write this process's own to it.

        A version that another process wrote since this one's was acknowledged stays.
        """
        self._keeps, self._writing = store.capabilities.keeps_versions, None
        found = dict(store.versions()) if self._keeps else {}
        self._unwritten = {
            name: value
            for name, value in self._own.items()
            if name not in found or (name in self._unwritten and found[name] != value)
        }
        self._set = found | self._set
        self.number += 1

    def write_again(self) -> None:
        """Write all of this process's own, whichever the store has: ranks' stores may differ."""
        self._unwritten = dict(self._own)

    def poll(self) -> None:
        """Write the next version, one at a time; failed writes are repeated."""
        if self._writing is not None:
            name, value, ticket = self._writing
            if not ticket.done:
                return
            self._writing = None
            if ticket.value is True and self._unwritten.get(name) == value:
                del self._unwritten[name]
        if self._unwritten and self.n_unwritten:
            name, value = next(iter(self._unwritten.items()))
            ticket = self._client.ask(
                "set_version",
                lambda store: store.set_version(name, value),
                access=Access.WRITE,
            )
            self._writing = name, value, ticket

    def _names(self, namespaces: Collection[object]) -> list[bytes]:
        names = []
        for namespace in namespaces:
            try:
                names.append(self._name(namespace_digest(namespace)))
            except ConfigError:
                continue
        return names

    def _name(self, digest: bytes) -> bytes:
        """The name of a namespace's version in a store; of no digest, the one of all."""
        named = self._fingerprint.digest + digest
        return hashlib.sha256(b"kvgraft version name 1\0" + named).digest()


def _named(version: object) -> bytes:
    return hashlib.sha256(b"kvgraft version 1\0" + encode(version, "clear: version")).digest()
