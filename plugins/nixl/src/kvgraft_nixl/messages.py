"""Messages of the hand-over, as bytes: plain JSON behind a checksum.

    offer      sender to receiver, by any way the engine has: what there is, and where
    ask        receiver to sender: is there something for these tokens? The answer is an offer
    pull       receiver to sender: from which page on it reads an offer's data
    sources    sender to receiver: slots and planes of an offer that was made before its data exists
    digests    sender to receiver: a digest of each payload
    release    receiver to sender: the offer is no longer needed
    withdrawn  sender to receiver: the offer holds no longer, and why

A message is refused as a whole: a damaged one, one of another version, one with wrong fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from kvgraft import ConfigError, Tier, TransferError
from kvgraft_nixl.memory import Payload, Plane, Slots

__all__ = [
    "Ask",
    "Digests",
    "Offer",
    "Pull",
    "Release",
    "Sources",
    "Withdrawn",
    "decode",
    "encode",
]

MAGIC = b"kvgraft hand-over 1\n"
SEAL_NBYTES = 8
MOST = 1 << 63
"""Above all numbers: transports take addresses and lengths as words of 64 bits."""


@dataclass(frozen=True)
class Offer:
    """Cached data of one sequence that another cache may fetch, and where it is.

    `bytes(offer)` goes to the other process, beside the request; `Offer.read` is the inverse.

    Attributes:
        number: names it among all offers of all senders; nobody can guess it.
        n_tokens: length of the prefix, a multiple of the page size; 0 if there is nothing.
        name: hash of these tokens, their namespace and the fingerprint.
        fingerprint: digest of model and layout.
        address: of the sender's transport.
        slots: by component and tier, the slots of the pages that its end needs; empty where they
            cannot be read yet.
        planes: by component and tier, the planes that these slots index.
        reply_to: number of the question that it answers; empty for none.
    """

    number: str
    n_tokens: int
    name: bytes
    fingerprint: bytes
    address: bytes
    slots: Mapping[str, Mapping[Tier, Slots]] = field(default_factory=dict, compare=False)
    planes: Mapping[str, Mapping[Tier, Sequence[Plane]]] = field(default_factory=dict)
    reply_to: str = ""

    def __bytes__(self) -> bytes:
        return encode(self)

    @classmethod
    def read(cls, payload: bytes) -> Offer:
        """The offer in a message.

        Raises:
            TransferError: it is damaged, of another version, or no offer.
        """
        found = decode(payload)
        if not isinstance(found, cls):
            raise TransferError(f"an offer is expected, and this is a {type(found).__name__}")
        return found


@dataclass(frozen=True)
class Ask:
    """Asks for an offer of a prefix's data.

    Attributes:
        number: names the question.
        tokens: int32 little-endian.
        namespace: the key's, in plain values.
        address: of the receiver's transport.
    """

    number: str
    tokens: bytes
    namespace: Any
    address: bytes


@dataclass(frozen=True)
class Pull:
    """Asks for the digests of an offer's data from page `first` on."""

    number: str
    first: int
    address: bytes


@dataclass(frozen=True)
class Sources:
    """Where an offer's data is, for one that could not say so itself."""

    number: str
    slots: Mapping[str, Mapping[Tier, Slots]]
    planes: Mapping[str, Mapping[Tier, Sequence[Plane]]]


@dataclass(frozen=True)
class Digests:
    """XXH3-128 of every payload of an offer's asked pages."""

    number: str
    digests: Mapping[Payload, bytes]


@dataclass(frozen=True)
class Release:
    """The receiver does not need an offer any more: it has its data, or gave up."""

    number: str


@dataclass(frozen=True)
class Withdrawn:
    """An offer holds no longer."""

    number: str
    reason: str


KINDS = {
    kind.__name__.lower(): kind for kind in (Offer, Ask, Pull, Sources, Digests, Release, Withdrawn)
}


def encode(message: Any) -> bytes:
    """A message as bytes."""
    fields = {name: _plain(value) for name, value in vars(message).items()}
    kind = type(message).__name__.lower()
    body = MAGIC + json.dumps([kind, fields], separators=(",", ":")).encode()
    return xxhash.xxh3_64_digest(body) + body


def decode(payload: bytes) -> Any:
    """The message in some bytes.

    Raises:
        TransferError: they are damaged, of another version, or no message.
    """
    seal, body = payload[:SEAL_NBYTES], payload[SEAL_NBYTES:]
    if xxhash.xxh3_64_digest(body) != seal or not body.startswith(MAGIC):
        raise TransferError(f"{len(payload)} bytes are no message of this version, or damaged")
    try:
        kind, fields = json.loads(body[len(MAGIC) :])
        found = {name: _READ.get(name, _same)(value) for name, value in fields.items()}
        return KINDS[kind](**found)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TransferError(f"a message has wrong fields: {error}") from error


def plain_namespace(namespace: object) -> Any:
    """A key's namespace in values that JSON has.

    Raises:
        ConfigError: a namespace of other values than text, numbers, bytes and tuples of them.
    """
    if namespace is None or type(namespace) in (str, int):
        return namespace
    if type(namespace) is bytes:
        return {"bytes": namespace.hex()}
    if type(namespace) is tuple:
        return {"tuple": [plain_namespace(each) for each in namespace]}
    raise ConfigError(
        f"hand-over: namespace {namespace!r:.60} cannot be asked for; use text, an int, bytes or a "
        "tuple of them"
    )


def named_namespace(plain: Any) -> object:
    """The inverse of `plain_namespace`.

    Raises:
        ValueError: no namespace in plain values.
    """
    if plain is None or type(plain) in (str, int):
        return plain
    if isinstance(plain, dict) and len(plain) == 1:
        ((kind, value),) = plain.items()
        if kind == "bytes":
            return bytes.fromhex(value)
        if kind == "tuple":
            return tuple([named_namespace(each) for each in value])
    raise ValueError(f"{plain!r:.60} is no namespace")


# -- inside


def _plain(value: Any) -> Any:
    """A field in values that JSON has."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, np.ndarray):
        return value.astype("<i4").tobytes().hex()
    if isinstance(value, Mapping) and value and all(isinstance(key, Payload) for key in value):
        return [
            [key.layer, key.component, key.tier.name, digest.hex()] for key, digest in value.items()
        ]
    if isinstance(value, Mapping):
        return {getattr(key, "name", key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value


def _same(value: Any) -> Any:
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r:.40} is no text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MOST:
        raise ValueError(f"{value!r:.40} is no number from 0 to {MOST - 1}")
    return value


def _tokens(value: str) -> bytes:
    found = bytes.fromhex(value)
    if len(found) % 4:
        raise ValueError(f"{len(found)} bytes are no int32 tokens")
    return found


def _slots(plain: Any) -> dict[str, dict[Tier, Slots]]:
    return {
        component: {
            Tier[tier]: np.frombuffer(bytes.fromhex(numbers), "<i4").astype(np.int32)
            for tier, numbers in tiers.items()
        }
        for component, tiers in plain.items()
    }


def _plane(layer: Any, name: Any, *sizes: Any) -> Plane:
    address, stride, nbytes = map(_count, sizes)
    return Plane(_count(layer), _text(name), address, stride, nbytes)


def _planes(plain: Any) -> dict[str, dict[Tier, list[Plane]]]:
    return {
        component: {Tier[tier]: [_plane(*each) for each in planes] for tier, planes in own.items()}
        for component, own in plain.items()
    }


def _digests(plain: Any) -> dict[Payload, bytes]:
    return {
        Payload(_count(layer), _text(component), Tier[tier]): bytes.fromhex(digest)
        for layer, component, tier, digest in plain
    }


_READ: Mapping[str, Any] = {
    "number": _text,
    "reply_to": _text,
    "reason": _text,
    "n_tokens": _count,
    "first": _count,
    "name": bytes.fromhex,
    "fingerprint": bytes.fromhex,
    "address": bytes.fromhex,
    "tokens": _tokens,
    "namespace": named_namespace,
    "slots": _slots,
    "planes": _planes,
    "digests": _digests,
}
