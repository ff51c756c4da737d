"""Snapshots edited at random: refused in a line, or loaded like any other."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import cbor2
import pytest
import xxhash

from kvgraft import SnapshotError
from kvgraft.cache import Cache
from kvgraft_storage.canonical import decode
from kvgraft_storage.files import unfinished_path
from kvgraft_storage.tier.snapshot import HEAD, MAX_NBYTES, Boundary, read_snapshot

from ..serving.setups import installed
from .shelf import Shelf, open_cache, tier_of
from .test_snapshot import apart, served

SETUP = installed("full")
EXTREMES = (-(2**200), -(2**63), -2, -1, 0, 1, 2, 3, 15, 16, 17, 2**31, 2**32, 2**63, 2**64, 2**200)
KINDS: tuple[object, ...] = (
    None,
    "",
    "x" * 70,
    b"",
    b"x",
    b"\0" * 64,
    (),
    (1,),
    (None,) * 3,
    1.5,
    {1: 2},
    [{}],
)

Node = tuple[object, ...]
Value = object


class Raw(bytes):
    """An encoding, right or not, that stands where a value would."""


def encoded(value: Value) -> bytes:
    """As `canonical.encode`, but of anything, in any way."""
    if isinstance(value, Raw):
        return bytes(value)
    if isinstance(value, tuple):
        head = cbor2.dumps([None] * len(value))[: -len(value) or None]
        return head + b"".join(encoded(each) for each in value)
    return cbor2.dumps(value)


def sealed(body: bytes) -> bytes:
    return HEAD.pack(b"KVGRSNAP", 1, len(body), xxhash.xxh3_128_digest(body)) + body


Edit = Callable[[bytes, random.Random], bytes]


def flipped_bits(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 3, 30))):
        if changed:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content) + 1)]


def splice(content: bytes, chance: random.Random) -> bytes:
    at, source = (chance.randrange(len(content) + 1) for _ in range(2))
    nbytes = chance.choice((1, 4, 9, 40, 200))
    behind = at + nbytes if chance.random() < 0.5 else at
    return content[:at] + content[source : source + nbytes] + content[behind:]


def length_field(content: bytes, chance: random.Random) -> bytes:
    """Eight bytes somewhere, as a length."""
    at = chance.randrange(len(content) + 1)
    number = chance.choice((0, 1, 8, len(content), 2**31, 2**63, 2**64 - 1, chance.getrandbits(64)))
    return content[:at] + struct.pack("<Q", number) + content[at + 8 :]


def random_bytes(content: bytes, chance: random.Random) -> bytes:
    return chance.randbytes(chance.choice((0, 1, 9, 40, 500)))


BYTES: tuple[Edit, ...] = (flipped_bits, cut, splice, length_field, random_bytes)


def paths(value: Value, where: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Where every value inside of one is."""
    yield where
    if isinstance(value, tuple):
        for number, each in enumerate(value):
            yield from paths(each, (*where, number))


def replaced(value: Value, where: tuple[int, ...], change: Callable[[Value], Value]) -> Value:
    if not where:
        return change(value)
    assert isinstance(value, tuple)
    first, *rest = where
    return (*value[:first], replaced(value[first], tuple(rest), change), *value[first + 1 :])


def changed(value: Value, chance: random.Random) -> Value:
    """Something else in place of a value, often of its own type."""
    kind = chance.randrange(10)
    if kind == 0:
        return chance.choice(EXTREMES)
    if kind == 1:
        return chance.choice(KINDS)
    if kind == 2:
        deep: Value = value
        for _ in range(chance.choice((1, 2, 14, 17, 5000))):
            deep = Raw(b"\x81" + encoded(deep))
        return deep
    if kind == 3:
        return Raw(
            chance.choice(
                (
                    b"",
                    b"\xff",  # the end of what is of no known length
                    b"\x9f\x01\xff",  # and such an array
                    b"\x5b" + b"\xff" * 8,  # 16 million TB
                    b"\x9b\x7f" + b"\xff" * 7,
                    b"\x62\xff\xff",  # no UTF-8
                    b"\x18\x01",  # 1, in more bytes than it needs
                    b"\xc4\x82\x1b\x7f" + b"\xff" * 7 + b"\x01",  # a decimal fraction
                )
            )
        )
    if isinstance(value, int):
        return chance.choice((value + 1, value - 1, -value, value * 2, *EXTREMES))
    if isinstance(value, bytes):
        return chance.choice((value[:-1], value + b"\0", value * 2, value[::-1], value[:64], b""))
    if isinstance(value, tuple) and value:
        items = list(value)
        some = chance.randrange(len(items))
        match chance.randrange(4):
            case 0:
                del items[some]
            case 1:
                items.insert(chance.randrange(len(items) + 1), items[some])
            case 2:
                chance.shuffle(items)
            case 3:
                items[some] = items[chance.randrange(len(items))]
        return tuple(items)
    return chance.choice(KINDS)


def structure(content: bytes, chance: random.Random) -> bytes:
    """Values inside a snapshot become others, with the right checksum."""
    value: Value = decode(content[HEAD.size :])
    for _ in range(chance.choice((1, 1, 2, 3))):
        where = chance.choice([*paths(value)])
        value = replaced(value, where, lambda old: changed(old, chance))
    return sealed(encoded(value))


class Fuzzed:
    """A snapshot, and a cache that loads edited copies of it."""

    def __init__(self, path: Path) -> None:
        self.shelf = served(SETUP, path, [[*range(17), *range(100, 116)], *apart(2)])
        self.path = path
        self.content = path.read_bytes()
        self.cache: Cache = open_cache(SETUP, self.shelf, device_tokens=256, host_tokens=512)
        self.tier = tier_of(self.cache)
        self.right = self.told()
        assert len(self.right) >= 4

    def told(self) -> list[tuple[object, int, bytes]]:
        """The file's content."""
        found = read_snapshot(self.path, self.cache.tree.page_size, self.tier.fingerprint.digest)
        return [_told(each) for each in found]

    def expect_sound(self, content: bytes) -> bool:
        """It is refused in a line, or can be loaded; whether it was."""
        self.path.write_bytes(content)
        try:
            told = self.told()
        except SnapshotError as error:
            said = str(error)
            assert "\n" not in said
            assert said.endswith("; start without it")
            return False
        for _, pages, tokens in told:
            assert len(tokens) == 4 * self.cache.tree.page_size * pages > 0
        restoring = self.tier.load(self.path)
        assert self.cache.drain()
        assert restoring.ended
        return True


def _told(boundary: Boundary) -> tuple[object, int, bytes]:
    key = boundary.key()
    return key.namespace, boundary.pages, bytes(key.data)


def fuzz(path: Path, seed: int, n: int) -> None:
    fuzzed, chance = Fuzzed(path), random.Random(seed)
    n_loaded = 0
    for case in range(n):
        try:
            content = fuzzed.content
            kind = chance.choice(("bytes", "sealed", "structure", "structure"))
            if kind == "structure":
                content = structure(content, chance)
            elif kind == "sealed":
                body = content[HEAD.size :]
                for edit in chance.choices(BYTES, k=chance.choice((1, 2))):
                    body = edit(body, chance)
                content = sealed(body)
            else:
                content = chance.choice(BYTES)(content, chance)
            loaded = fuzzed.expect_sound(content)
            assert kind != "bytes" or not loaded or fuzzed.told() == fuzzed.right
            n_loaded += loaded
        except BaseException as error:
            raise AssertionError(f"seed {seed}, case {case}") from error
    assert 0.02 * n < n_loaded < 0.9 * n, "some get as far as the tree"
    fuzzed.cache.check_integrity()
    fuzzed.cache.close()


def test_300_edits_of_a_snapshot_are_refused_or_loaded(tmp_path: Path) -> None:
    fuzz(tmp_path / "index", 1, 300)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 12))
def test_10_000_edits_of_a_snapshot_are_refused_or_loaded(tmp_path: Path, seed: int) -> None:
    fuzz(tmp_path / "index", seed, 1000)


def edited(path: Path, where: tuple[int, ...], value: Value) -> None:
    """One field of a snapshot is another, with the right checksum."""
    body = decode(path.read_bytes()[HEAD.size :])
    path.write_bytes(sealed(encoded(replaced(body, where, lambda _: value))))


FIRST_NODE = (2, 0, 1, 0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        ((*FIRST_NODE, 0), -1, "the parent of node 1 does not come before it"),
        ((*FIRST_NODE, 0), 1, "the parent of node 1 does not come before it"),
        ((*FIRST_NODE, 0), 2**80, "the parent of node 1 does not come before it"),
        ((*FIRST_NODE, 0), None, "node 1 is none"),
        ((*FIRST_NODE, 1), b"", "node 1: 0 bytes are no whole pages"),
        ((*FIRST_NODE, 1), b"\0" * 65, "node 1: 65 bytes are no whole pages"),
        ((*FIRST_NODE, 1), "x" * 64, "node 1 is none"),
        ((*FIRST_NODE, 2), b"1", "node 1 is none"),
        (FIRST_NODE, (0, b"\0" * 64), "node 1 is none"),
        ((2, 0), (None,), "no namespace with its nodes"),
        ((2, 0), 7, "no namespace with its nodes"),
        ((2,), ((None, ()), (None, ())), "a namespace stands there twice"),
        ((2,), 5, "no fingerprint, page size and namespaces"),
        ((1,), "16", "no fingerprint, page size and namespaces"),
        ((0,), None, "no fingerprint, page size and namespaces"),
        ((), (), "not three fields"),
        ((), 3, "not three fields"),
        ((2,), Raw(b"\xfb" + bytes(8)), "is a float"),
        ((2,), Raw(b"\x61\xff"), "decod"),
        ((1,), Raw(b"\x18\x10"), "another encoding than the canonical one"),
        ((1,), Raw(b"\xf5"), "is a bool"),
        ((2,), Raw(b"\x82\xd8\x1c\x80\xd8\x1d\x00"), "semantic tag 28"),
    ],
)
def test_a_snapshot_that_cannot_be_is_refused(
    tmp_path: Path, where: tuple[int, ...], value: Value, said: str
) -> None:
    path = tmp_path / "index"
    shelf = served(SETUP, path)
    edited(path, where, value)
    cache = open_cache(SETUP, shelf, device_tokens=256, host_tokens=512)
    with pytest.raises(SnapshotError, match=said) as refused:
        tier_of(cache).load(path)
    assert str(refused.value).endswith("; start without it")
    cache.close()


@pytest.mark.parametrize("kind", ["directory", "pipe", "device"])
def test_a_snapshot_that_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "index"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    cache = open_cache(SETUP, Shelf())
    with pytest.raises(SnapshotError, match=r"is no regular file|Is a directory"):
        tier_of(cache).load(path)
    cache.close()


@pytest.mark.parametrize("length", [MAX_NBYTES + 1, 1 << 40])
def test_a_snapshot_that_is_longer_than_any_is_not_read(tmp_path: Path, length: int) -> None:
    path = tmp_path / "index"
    path.write_bytes(HEAD.pack(b"KVGRSNAP", 1, length, bytes(16)))
    os.truncate(path, HEAD.size + length)
    cache = open_cache(SETUP, Shelf())
    with pytest.raises(SnapshotError, match=f"{length} bytes, {MAX_NBYTES} at most"):
        tier_of(cache).load(path)
    path.write_bytes(HEAD.pack(b"KVGRSNAP", 1, 100, bytes(16)))
    os.truncate(path, 64 << 30)
    with pytest.raises(SnapshotError, match=rf"is damaged \({(64 << 30) - 36} of 100 bytes\)"):
        tier_of(cache).load(path)
    cache.close()


def test_saving_removes_files_that_an_ended_process_left(tmp_path: Path) -> None:
    mine = unfinished_path(tmp_path, "index")
    others = [tmp_path / ".index.tmp", unfinished_path(tmp_path, "index2"), tmp_path / ".index-1"]
    for path in (mine, *others):
        path.write_bytes(b"x")
    served(SETUP, tmp_path / "index")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "index", *others])
