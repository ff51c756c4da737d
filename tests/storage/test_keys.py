"""Names of stored data: the same everywhere and always, and never shared (S8, T11)."""

from __future__ import annotations

import enum
import hashlib
import sys
from array import array
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft.errors import ConfigError
from kvgraft_storage import Fingerprint, PageChain
from kvgraft_storage.canonical import decode, encode, encode_exact
from kvgraft_storage.keys import page_hash

from ..commands import run

TOKENS = array("i", range(1, 13)).tobytes()
SHAPE = {"full": ("k", (4, 2, 8), "bf16"), "window@4": None}


def fingerprint(**changes: object) -> Fingerprint:
    fields: dict[str, object] = {
        "model": "example/model",
        "weights": "rev1",
        "dtype": "bf16",
        "page_size": 4,
        "geometry": SHAPE,
        "sharding": ("tp", 0, 2),
        "salt": None,
    }
    return Fingerprint(**{**fields, **changes})  # type: ignore[arg-type]


def chain(namespace: object = ("tenant", 7), **changes: object) -> PageChain:
    made = PageChain(fingerprint(**changes), namespace)
    made.grow(TOKENS)
    return made


KNOWN = """\
fingerprint a5ad6b5a2c7361e7997c63c9a4fbb64d68927995cf8d8da7e4ab96db27bfbc21
namespace e7687080095c83b9c18a41d70dc6ce298b1707a382ded15ba64ab640e4e92eaf
root c075be08982aac75e0f0b05c8fe64b039da79ea001fe060d180f1329c917d615
page 0 f316f282592bc3605d96d579735c09c777363646325e71832fa2bb268eeb8a3f
page 2 b5e2f558cc8f9a9f33154538c74e7c3ecf73fb530d722b2ca5b8f87ee16f9a54
key full 49be46076226794dfb2ccfe192ec57c80568138796cdb4c86cbf201932c5a7d7
key window@4 f3b730c051c57dad54f8d250fb5afff18166370a0b7b36dfa6a3fe6cb2f07792
"""
CODE = "from tests.storage.test_keys import vectors; print(vectors(), end='')"


def vectors() -> str:
    """Every kind of name, by an example."""
    made = chain()
    names = {
        "fingerprint": made.fingerprint.digest,
        "namespace": made.namespace,
        "root": made.page(-1),
        "page 0": made.page(0),
        "page 2": made.page(2),
        "key full": made.address(2, "full").key,
        "key window@4": made.address(2, "window@4").key,
    }
    return "".join(f"{name} {digest.hex()}\n" for name, digest in names.items())


def test_names_are_the_same_as_when_this_test_was_written() -> None:
    assert vectors() == KNOWN


@pytest.mark.parametrize("seed", ["1", "random"])
def test_names_are_the_same_in_another_process(seed: str) -> None:
    done = run(sys.executable, "-c", CODE, PYTHONHASHSEED=seed)
    assert done.stdout == KNOWN, done.stderr


def test_a_page_is_hashed_once_however_its_sequence_grows() -> None:
    slow = PageChain(fingerprint(), ("tenant", 7))
    hashed = [slow.grow(TOKENS[:end]) for end in range(0, len(TOKENS) + 1, 4)]
    assert sum(hashed) == slow.n_pages == 3
    assert hashed.count(1) == 3
    assert [slow.page(number) for number in range(3)] == [chain().page(n) for n in range(3)]


def test_a_page_hash_is_sha256_over_parent_and_tokens() -> None:
    made = chain()
    assert made.page(1) == hashlib.sha256(made.page(0) + TOKENS[16:32]).digest()
    assert made.page(1) == page_hash(made.page(0), TOKENS[16:32])


def test_a_sequence_that_is_cut_is_hashed_anew_from_there() -> None:
    made = chain()
    kept = made.page(0)
    made.cut(1)
    other = TOKENS[:16] + bytes(32)
    assert made.grow(other) == 2
    assert made.page(0) == kept
    assert made.page(1) != chain().page(1)
    with pytest.raises(IndexError, match="page 3 of 3 hashed"):
        made.page(3)


CHANGES = [
    {"model": "example/mode"},
    {"weights": "rev2"},
    {"dtype": "fp8"},
    {"geometry": {**SHAPE, "window@4": 1}},
    {"geometry": {"full": SHAPE["full"]}},
    {"sharding": ("tp", 1, 2)},
    {"salt": "s"},
    {"namespace": ("tenant", 8)},
    {"namespace": ("tenant", "7")},
    {"namespace": None},
]


def test_every_difference_of_data_makes_every_name_differ() -> None:
    keys = {chain().address(page, "full").key for page in range(3)}
    for change in CHANGES:
        made = chain(**change)  # type: ignore[arg-type]
        keys |= {made.address(page, "full").key for page in range(3)}
    assert len(keys) == 3 * (1 + len(CHANGES))
    assert fingerprint(page_size=2).digest != fingerprint().digest


def test_the_order_in_which_components_are_named_does_not_matter() -> None:
    assert fingerprint(geometry=dict(reversed(SHAPE.items()))).digest == fingerprint().digest


PLAIN = st.recursive(
    st.none() | st.integers() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4).map(tuple),
    max_leaves=8,
)


def test_a_bool_in_a_fingerprint_is_neither_0_nor_1_and_no_namespace() -> None:
    salts: list[object] = [True, False, 1, 0, None, (True,), (1,), (True, False), b"T"]
    assert len({fingerprint(salt=salt).digest for salt in salts}) == len(salts)
    assert len({fingerprint(geometry={"full": (salt,)}).digest for salt in salts}) == len(salts)
    assert decode(encode_exact((1, 0))) == (1, 0)
    for salt in True, False, (True,):
        with pytest.raises(ValueError, match="is a bool"):
            decode(encode_exact(salt))
    assert encode_exact((1, "a", None)) == encode((1, "a", None))
    with pytest.raises(ConfigError, match="use None, bool, int, str, bytes or tuples"):
        fingerprint(salt=1.5)


@given(PLAIN, PLAIN)
def test_two_values_have_one_encoding_only_if_they_are_equal(one: object, other: object) -> None:
    assert (encode(one) == encode(other)) == (one == other)


class Adapter(NamedTuple):
    tenant: str
    number: int


class Color(str, enum.Enum):
    RED = "red"


def test_equal_namespaces_have_one_encoding() -> None:
    assert encode(Adapter("a", 1)) == encode(("a", 1))
    assert encode(Color.RED) == encode("red")
    with pytest.raises(ConfigError, match=r"character 1 of 'a.ud800' is half a surrogate pair"):
        encode("a\ud800")


@pytest.mark.parametrize("value", [1.0, True, [1], {"a": 1}, object(), ("a", (1.5,))])
def test_a_namespace_without_canonical_bytes_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"namespace: .* has no canonical bytes; use None, int"):
        PageChain(fingerprint(), value)


def test_a_namespace_without_an_encoding_is_refused_in_one_line() -> None:
    deep: object = 1
    for _ in range(20):
        deep = (deep,)
    with pytest.raises(ConfigError, match="nest deeper than 16"):
        encode(deep)
    with pytest.raises(ConfigError, match="page_size 0 is below 1"):
        fingerprint(page_size=0)
    with pytest.raises(ConfigError, match="65 bytes in storage, 1 to 64"):
        fingerprint(geometry={"x" * 65: 1})
    with pytest.raises(ConfigError, match=r"fingerprint salt: 1\.5 is a float"):
        fingerprint(salt=1.5)
