"""The header in front of every payload, and the check of one that is read back (S9).

    offset  bytes
         0      8  magic
         8      2  format version
        10      2  header bytes, 256
        12      4  zero
        16      8  payload bytes
        24     32  storage key
        56     32  namespace digest
        88     32  fingerprint digest
       120     64  component, UTF-8, NUL padded
       184     16  XXH3-128 of the payload
       200     48  zero
       248      8  XXH3-64 of the 248 bytes above

All numbers are little-endian. XXH3 finds damage, not forgery: a writer of the store can forge data,
and must be trusted.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from kvgraft_storage.keys import Address, component_bytes
from kvgraft_storage.status import Status

__all__ = [
    "FORMAT_VERSION",
    "HEADER_NBYTES",
    "MAGIC",
    "Header",
    "check",
    "damage",
    "decode_header",
    "encode_header",
]

MAGIC = b"\x93KVGRAFT"
FORMAT_VERSION = 1
HEADER_NBYTES = 256
_FIELDS = struct.Struct("<8sHHIQ32s32s32s64s16s48s")
_SEAL = struct.Struct("<Q")
_ZERO = bytes(48)

Buffer = bytes | bytearray | memoryview
Payload = Buffer | tuple[memoryview, ...]
"""A payload, whole or in parts; its checksum is that of the parts one behind the other."""


class Header(NamedTuple):
    """A header whose own checksum was right.

    Attributes:
        key, namespace, fingerprint: 32 bytes each.
        component: whose data it is.
        nbytes: payload length.
        checksum: XXH3-128 of the payload, 16 bytes.
    """

    key: bytes
    namespace: bytes
    fingerprint: bytes
    component: str
    nbytes: int
    checksum: bytes


def encode_header(address: Address, fingerprint: bytes, payload: Payload) -> bytes:
    """The 256 bytes that go in front of a payload; reads all of it (0.1 ms per MiB)."""
    return _header(address, fingerprint, _nbytes(payload), _checksum(payload))


def _header(address: Address, fingerprint: bytes, nbytes: int, checksum: bytes) -> bytes:
    fields = _FIELDS.pack(
        MAGIC,
        FORMAT_VERSION,
        HEADER_NBYTES,
        0,
        nbytes,
        address.key,
        address.namespace,
        fingerprint,
        component_bytes(address.component),
        checksum,
        _ZERO,
    )
    return fields + _SEAL.pack(xxhash.xxh3_64_intdigest(fields))


def decode_header(header: Buffer) -> Header | Status:
    """A header's fields, or the status of an invalid one: CORRUPT, or STALE for another version."""
    if len(header) != HEADER_NBYTES:
        return Status.CORRUPT
    fields = bytes(header[: _FIELDS.size])
    (seal,) = _SEAL.unpack_from(header, _FIELDS.size)
    if xxhash.xxh3_64_intdigest(fields) != seal:
        return Status.CORRUPT
    magic, version, nbytes_header, zero, *rest = _FIELDS.unpack(fields)
    if magic != MAGIC:
        return Status.CORRUPT
    if (version, nbytes_header, zero, rest[-1]) != (FORMAT_VERSION, HEADER_NBYTES, 0, _ZERO):
        return Status.STALE
    nbytes, key, namespace, fingerprint, component, checksum, _ = rest
    name = component.rstrip(b"\0").decode("utf-8", "replace")
    return Header(key, namespace, fingerprint, name, nbytes, checksum)


def check(header: Buffer, payload: Payload, address: Address, fingerprint: bytes) -> Status:
    """Whether a payload that was read back is the one asked for, to the last bit.

    Returns:
        OK; CORRUPT if header or payload is damaged; STALE if it has another key, namespace,
        component, fingerprint or format version; TOO_LARGE if it is longer than the buffer.
    """
    nbytes = _nbytes(payload)
    if header == _header(address, fingerprint, nbytes, _checksum(payload)):
        return Status.OK
    found = decode_header(header)
    if isinstance(found, Status):
        return found
    mine = (address.key, address.namespace, fingerprint, address.component)
    if (found.key, found.namespace, found.fingerprint, found.component) != mine:
        return Status.STALE
    return Status.TOO_LARGE if found.nbytes > nbytes else Status.CORRUPT


def damage(key: bytes, header: Buffer, payload: Buffer) -> str | None:
    """The fault of a stored value, whoever wrote it; None if it has none."""
    found = decode_header(header)
    if isinstance(found, Status):
        return f"header is {found.value}"
    if found.key != key:
        return f"is stored under another key than its header's {found.key.hex()[:16]}"
    if found.nbytes != len(payload):
        return f"payload has {len(payload)} bytes, its header says {found.nbytes}"
    if xxhash.xxh3_128_digest(payload) != found.checksum:
        return f"payload of {len(payload)} bytes does not match its checksum"
    return None


def _nbytes(payload: Payload) -> int:
    return sum(map(len, payload)) if isinstance(payload, tuple) else len(payload)


def _checksum(payload: Payload) -> bytes:
    if not isinstance(payload, tuple):
        return xxhash.xxh3_128_digest(payload)
    digest = xxhash.xxh3_128()
    for part in payload:
        digest.update(part)
    return digest.digest()
