"""Names of data in storage: a chain of page hashes, and a key per page and component (S8).

A page's hash covers everything that its content depends on: the namespace, the fingerprint of the
model, all tokens before it and its own. The hash is SHA-256, because a user who finds two prompts
with one hash could read another tenant's cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from kvgraft.errors import ConfigError
from kvgraft_storage.canonical import Plain, encode, encode_exact

__all__ = [
    "COMPONENT_NBYTES",
    "HASH_NBYTES",
    "TOKEN_NBYTES",
    "Address",
    "Fingerprint",
    "PageChain",
    "component_bytes",
    "namespace_digest",
    "page_hash",
    "root_hash",
    "storage_key",
    "storage_keys",
]

HASH_NBYTES = 32
"""Bytes of a page hash, a storage key and a digest."""

TOKEN_NBYTES = 4
"""Bytes of one token: int32, little-endian."""

MIN_DIGEST_NBYTES, MAX_DIGEST_NBYTES = 8, 256
"""Shortest and longest hash of a block that an engine may give."""

COMPONENT_NBYTES = 64
"""Longest name of a component in storage, in UTF-8."""


@dataclass(frozen=True)
class Fingerprint:
    """Identifies the model and memory layout of stored data; data of another is never read.

    Attributes:
        model: the model's name.
        weights: the revision of its weights, such as a commit or a digest.
        dtype: element type of the cache.
        page_size: tokens per page.
        geometry: per component, the layout of one slot: planes, shapes, element types.
        sharding: which part of the model's cache this rank holds, such as `("tp", 0, 8)`; ranks
            whose data is equal use one value and share it.
        salt: anything else that must tell data apart.

    Raises:
        ConfigError: a page size below 1, a component's name that is empty or longer than
            `COMPONENT_NBYTES` bytes, or a value without canonical bytes.
    """

    model: str
    weights: str
    dtype: str
    page_size: int
    geometry: Mapping[str, Plain]
    sharding: Plain = None
    salt: Plain = None
    digest: bytes = field(init=False, repr=False)
    """SHA-256 over `canonical()`."""

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ConfigError(f"fingerprint: page_size {self.page_size} is below 1; use e.g. 64")
        for component in self.geometry:
            component_bytes(component)
        object.__setattr__(self, "digest", hashlib.sha256(self.canonical()).digest())

    def canonical(self) -> bytes:
        """Everything above as bytes; the order of components does not matter."""
        geometry = tuple((name, self.geometry[name]) for name in sorted(self.geometry))
        fields = {
            "model": self.model,
            "weights": self.weights,
            "dtype": self.dtype,
            "page_size": self.page_size,
            "geometry": geometry,
            "sharding": self.sharding,
            "salt": self.salt,
        }
        return b"kvgraft fingerprint 1\0" + b"".join(
            encode_exact((name, value), f"fingerprint {name}") for name, value in fields.items()
        )


class Address(NamedTuple):
    """Where one component's data of one page is stored, and the values its header must have.

    Attributes:
        key: the storage key, 32 bytes.
        component: whose data it is.
        namespace: digest of the namespace, 32 bytes.
    """

    key: bytes
    component: str
    namespace: bytes

    @classmethod
    def foreign(
        cls, fingerprint: Fingerprint, digest: bytes, group: str = "kv", namespace: Plain = None
    ) -> Address:
        """The address of data that an engine names by a hash of its own; 3 µs.

        `Storage.address` does it with the storage's own fingerprint. An engine's hash identifies
        tokens, tenant and adapter; the rest (model, weights, element type, layout, parallelism)
        belongs in the fingerprint. Otherwise one model reads another's data.

        Args:
            fingerprint: of the model that computes the data; the one that the `Storage` was made
                with.
            digest: the engine's hash of the block and of all blocks before it, 8 to 256 bytes.
            group: the part of the model whose data it is, such as a KV cache group; 1 to 64 bytes.
            namespace: keeps tenants apart whom the digest does not distinguish.

        Raises:
            ConfigError: no fingerprint, a digest of another type or length, or a group or
                namespace that has no encoding.
        """
        given: object = fingerprint
        if not isinstance(given, Fingerprint):
            raise ConfigError(
                f"foreign address: {given!r:.40} is a {type(given).__name__}, not a "
                "Fingerprint; make one of everything that the engine's hash does not say"
            )
        given = digest
        if not isinstance(given, bytes):
            raise ConfigError(
                f"foreign address: digest {given!r:.40} is a {type(given).__name__}, not bytes; "
                "give the engine's block hash"
            )
        if not MIN_DIGEST_NBYTES <= len(digest) <= MAX_DIGEST_NBYTES:
            raise ConfigError(
                f"foreign address: digest has {len(digest)} bytes, not {MIN_DIGEST_NBYTES} to "
                f"{MAX_DIGEST_NBYTES}; give the engine's block hash"
            )
        name, tenant = component_bytes(group), namespace_digest(namespace)
        named = fingerprint.digest + tenant + len(digest).to_bytes(2, "little") + digest + name
        return cls(hashlib.sha256(b"kvgraft foreign key 1\0" + named).digest(), group, tenant)


@lru_cache(maxsize=256)
def component_bytes(component: str) -> bytes:
    """A component's name as a header holds it.

    Raises:
        ConfigError: an empty name, one longer than `COMPONENT_NBYTES`, or one with a NUL.
    """
    name = component.encode()
    if not 0 < len(name) <= COMPONENT_NBYTES or b"\0" in name:
        raise ConfigError(
            f"component {component!r:.80}: its name has {len(name)} bytes in storage, 1 to "
            f"{COMPONENT_NBYTES} without NUL can be kept; rename the instance"
        )
    return name


def namespace_digest(namespace: Plain) -> bytes:
    """A namespace as 32 bytes.

    Raises:
        ConfigError: a namespace without canonical bytes.
    """
    return hashlib.sha256(b"kvgraft namespace 1\0" + encode(namespace, "namespace")).digest()


def root_hash(fingerprint: Fingerprint, namespace: bytes) -> bytes:
    """The parent of a sequence's first page; `namespace` is a digest."""
    return hashlib.sha256(b"kvgraft root 1\0" + fingerprint.digest + namespace).digest()


def page_hash(parent: bytes, tokens: bytes | bytearray | memoryview) -> bytes:
    """The hash of a page after `parent`; both lengths are fixed, so inputs cannot be confused."""
    hashed = hashlib.sha256(parent)
    hashed.update(tokens)
    return hashed.digest()


def storage_key(page: bytes, component: str) -> bytes:
    """The key of one component's data of a page."""
    return storage_keys([page], component)[0]


def storage_keys(pages: Iterable[bytes], component: str) -> list[bytes]:
    """The keys of one component's data of some pages; 0.8 µs each."""
    sha256, name = hashlib.sha256, component_bytes(component)
    return [sha256(b"kvgraft key 1\0" + page + name).digest() for page in pages]


class PageChain:
    """The page hashes of one sequence, each computed once, while the sequence grows.

    Args:
        fingerprint: of the model that computes the data.
        namespace: keeps tenants or adapters apart.
        root: the hash before its first page, 32 bytes, where the namespace has a version; by
            default that of fingerprint and namespace.

    Raises:
        ConfigError: a namespace without canonical bytes.
    """

    __slots__ = ("_hashes", "_page_nbytes", "_root", "fingerprint", "namespace")

    def __init__(
        self, fingerprint: Fingerprint, namespace: Plain = None, root: bytes | None = None
    ) -> None:
        self.fingerprint = fingerprint
        self.namespace = namespace_digest(namespace)
        self._root = root_hash(fingerprint, self.namespace) if root is None else root
        self._page_nbytes = fingerprint.page_size * TOKEN_NBYTES
        self._hashes = bytearray()

    @property
    def n_pages(self) -> int:
        """Pages hashed so far."""
        return len(self._hashes) // HASH_NBYTES

    def grow(self, tokens: bytes | bytearray | memoryview) -> int:
        """Hash the whole pages of a sequence that have not been hashed.

        Args:
            tokens: int32 little-endian `[n_tokens]`, the sequence from its start; tokens hashed
                before must be unchanged, or `cut` first.

        Returns:
            Pages hashed now; 0.5 µs each for pages of 64 tokens.
        """
        size, hashes = self._page_nbytes, self._hashes
        first, last = self.n_pages, len(tokens) // size
        parent = self.page(first - 1)
        with memoryview(tokens) as view:
            for start in range(first * size, last * size, size):
                parent = page_hash(parent, view[start : start + size])
                hashes += parent
        return max(0, last - first)

    def cut(self, n_pages: int) -> None:
        """Drop the hashes of all pages but the first `n_pages`."""
        del self._hashes[n_pages * HASH_NBYTES :]

    def page(self, number: int) -> bytes:
        """The hash of a page, counted from 0; of page -1 it is the root's.

        Raises:
            IndexError: a page that has not been hashed.
        """
        if number == -1:
            return self._root
        if not 0 <= number < self.n_pages:
            raise IndexError(f"page {number} of {self.n_pages} hashed ones")
        return bytes(self._hashes[number * HASH_NBYTES : (number + 1) * HASH_NBYTES])

    def address(self, number: int, component: str) -> Address:
        """Where a component's data of a page is stored."""
        key = storage_key(self.page(number), component)
        return Address(key, component, self.namespace)
