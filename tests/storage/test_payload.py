"""A header says what it stands in front of, and nothing damaged or foreign passes (S9)."""

from __future__ import annotations

import random

import pytest

from kvgraft_storage import Status
from kvgraft_storage.payload import (
    FORMAT_VERSION,
    HEADER_NBYTES,
    check,
    damage,
    decode_header,
    encode_header,
)
from kvgraft_testing.storage.traffic import FINGERPRINT, addresses

(PLACE, OTHER) = addresses(2)
PAYLOAD = random.Random(1).randbytes(1000)
HEADER = encode_header(PLACE, FINGERPRINT.digest, PAYLOAD)
KNOWN = "ac89c3b4cc5f28b6aebcd874be97b127"


def status(header: bytes = HEADER, payload: bytes = PAYLOAD) -> Status:
    return check(header, payload, PLACE, FINGERPRINT.digest)


def test_a_header_is_256_bytes_and_always_the_same() -> None:
    assert len(HEADER) == HEADER_NBYTES == 256
    assert HEADER[:12].hex() == "934b564752414654" + "0100" + "0001"
    assert HEADER[184:200].hex() == KNOWN
    assert status() is Status.OK


def test_every_flipped_bit_of_a_header_is_found() -> None:
    for bit in range(8 * HEADER_NBYTES):
        flipped = bytearray(HEADER)
        flipped[bit // 8] ^= 1 << bit % 8
        assert status(bytes(flipped)) is Status.CORRUPT


def test_every_flipped_byte_of_a_payload_is_found() -> None:
    for position in range(len(PAYLOAD)):
        flipped = bytearray(PAYLOAD)
        flipped[position] ^= 1 << position % 8
        assert status(payload=bytes(flipped)) is Status.CORRUPT


def test_other_lengths_are_found() -> None:
    assert status(payload=PAYLOAD[:-1]) is Status.TOO_LARGE
    assert status(payload=PAYLOAD + b"\0") is Status.CORRUPT
    assert status(HEADER[:-1]) is Status.CORRUPT
    assert status(bytes(256)) is Status.CORRUPT


@pytest.mark.parametrize(
    "header",
    [
        encode_header(OTHER, FINGERPRINT.digest, PAYLOAD),
        encode_header(PLACE, bytes(32), PAYLOAD),
        encode_header(PLACE._replace(component="b"), FINGERPRINT.digest, PAYLOAD),
        encode_header(PLACE._replace(namespace=bytes(32)), FINGERPRINT.digest, PAYLOAD),
    ],
    ids=["key", "fingerprint", "component", "namespace"],
)
def test_a_whole_payload_of_another_key_is_stale(header: bytes) -> None:
    assert status(header) is Status.STALE


def test_another_format_version_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvgraft_storage.payload.FORMAT_VERSION", FORMAT_VERSION + 1)
    newer = encode_header(PLACE, FINGERPRINT.digest, PAYLOAD)
    monkeypatch.undo()
    assert status(newer) is Status.STALE


def test_a_scan_needs_no_fingerprint_to_find_damage() -> None:
    assert damage(PLACE.key, HEADER, PAYLOAD) is None
    assert "another key" in (damage(OTHER.key, HEADER, PAYLOAD) or "")
    assert "does not match" in (damage(PLACE.key, HEADER, PAYLOAD[:-1] + b"\0") or "")
    assert "has 999 bytes" in (damage(PLACE.key, HEADER, PAYLOAD[:-1]) or "")
    assert damage(PLACE.key, HEADER[:-1] + b"\0", PAYLOAD) == "header is corrupt"
    found = decode_header(HEADER)
    assert not isinstance(found, Status)
    assert found.component == "a"
