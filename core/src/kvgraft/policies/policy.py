"""The protocol that an eviction policy implements, and the types of its arguments."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import xxhash

from kvgraft.types import Tier

CLASS_BITS: Final = 8
"""Low bits of a stamp that hold the class of the use; the bits above count uses."""

MAX_CLASSES: Final = 1 << CLASS_BITS

FIRST_USE: Final = 0
LEFT_BEHIND: Final = 1 << 62
"""Subtracted from the stamp of evict-first data until it is used again (I9)."""

#   used          number of the use │ class                    >= 0, a later use is larger
#   left behind   the same - LEFT_BEHIND                       < 0: before all others, oldest first

PIECE_TOKENS: Final = 1024
"""Prefixes that are multiples of so many tokens have checksums, see `prefix_sums`."""


def class_of(stamp: int) -> int:
    """The class of the use with this stamp."""
    return stamp & MAX_CLASSES - 1


def use_of(stamp: int) -> int:
    """The number of the use with this stamp; each is larger than those before."""
    return stamp >> CLASS_BITS


def is_left_behind(stamp: int) -> bool:
    """Whether a stamp is of evict-first data, left behind and not used since."""
    return stamp < FIRST_USE


class Hint(str, enum.Enum):
    """An engine's knowledge of a sequence's future when a request ends."""

    CONTINUES = "continues"
    """A tool was called: the sequence comes back with its result."""
    TURN_ENDED = "turn-ended"
    """The model answered: the sequence comes back if its user writes again."""
    OVER = "over"
    """The session ended: the sequence does not come back."""


class Pool(Protocol):
    """A pool, as an order of its candidates sees it.

    Attributes:
        component: name of the component.
        tier: DEVICE or HOST.
        capacity: slots in all.
        cost: the cost of losing a candidate (a node): pages that a hit there would compute again,
            in 1/1024 of a page for each page of it. None where every page is needed: there all cost
            the same. It rises as data before the candidate leaves. It falls as data behind arrives;
            the candidate is withdrawn then, and entered again.
    """

    @property
    def component(self) -> str: ...

    @property
    def tier(self) -> Tier: ...

    @property
    def capacity(self) -> int: ...

    @property
    def cost(self) -> Callable[[Any], int] | None: ...


class Use:
    """A request's use of the cache; the same object from its start to its end.

    Args:
        namespace: of its key.
        tokens: its tokens so far, int32 bytes; the policy may read them during the call only.
        prompt_tokens: length of the prompt.
        allocated: slots that the base component's DEVICE pool has allocated so far: the policy's
            clock, the same on every rank. It grows between the calls.
        sums: checksums of the sequence's prefixes as far as they are known; they stay with its
            key. Ask `prefix_sums` for them.

    Attributes:
        memo: what the policy's `classify` returned for this request, for its own use.
    """

    __slots__ = ("allocated", "memo", "namespace", "prompt_tokens", "sums", "tokens")

    def __init__(
        self,
        namespace: object,
        tokens: bytearray,
        prompt_tokens: int,
        allocated: int,
        sums: list[int],
    ) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.prompt_tokens = prompt_tokens
        self.allocated = allocated
        self.sums = sums
        self.memo: Any = None


class Order(Protocol):
    """The candidates of one pool on one tier, in the order in which they are to leave.

    A candidate is entered once and stays until it is taken or withdrawn (K2). Equal calls give
    equal victims: an order reads no clock and uses no randomness (K3).
    """

    def push(self, stamp: int, node: Any) -> None:
        """Enter a candidate; a larger stamp was used later, see also `class_of`."""

    def pop(self) -> tuple[int, Any] | None:
        """Take the next victim with the stamp it was entered with; None if there is none.

        Where the order has scores it is the candidate of the lowest one, and of equal ones that of
        the smallest stamp.
        """

    def withdraw(self, stamp: int, node: Any) -> None:
        """Drop the candidate with this stamp: it was used, or may not leave any more."""

    def score(self, stamp: int) -> float | None:
        """The score of data with a stamp; None if it has none.

        It does not change during an eviction.
        """

    def __len__(self) -> int:
        """Candidates."""

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Every candidate with its stamp, in no order."""


class EvictionPolicy(Protocol):
    """Orders the victims in the pools of one cache.

    Attributes:
        name: as in settings.
        classifies: whether `classify`, `admitted` and `finished` are called at all.
    """

    name: str
    classifies: bool

    def order(self, pool: Pool) -> Order:
        """A new order for one pool; called once per pool when the cache is opened.

        It is called again later for each further priority in use, whose data has an order of its
        own.

        Pools come component by component, DEVICE before HOST; the base component's are the first.
        """

    def opened(self, base_tokens: int) -> None:
        """The cache is open; tokens of the base component that its largest tier holds."""

    def classify(self, use: Use) -> tuple[int, Any]:
        """The class of the data that a request reuses and computes, and a memo; changes nothing.

        A class is a number below `MAX_CLASSES`, which stamps carry.
        """

    def admitted(self, use: Use, stamp: int) -> None:
        """The request runs, for the first time: note its use of its prompt.

        `stamp` is the latest there is.
        """

    def finished(self, use: Use, stamp: int, hint: Hint | None) -> int:
        """The request ends; the class of its data from now on. `stamp` is the latest there is."""

    def describe(self, use_class: int) -> str:
        """A class in words, for reports; empty if there is only one."""


# Checksums name prefixes, for policies that remember sequences. A piece's checksum is seeded with
# the one before, so that it names the whole prefix. A collision only makes a count wrong. Hashes
# of stores and events are SHA-256, because there a collision would return other data.

PIECE_BYTES: Final = PIECE_TOKENS * 4

digest: Final[Any] = xxhash.xxh3_64_intdigest


def prefix_sums(use: Use, n_tokens: int) -> list[int]:
    """The checksums of the prefixes of 1,024 tokens, 2,048 and so on, up to `n_tokens`.

    Namespaces share none; all that are no int, text or bytes, nor a tuple of these, count as one.
    Only prefixes whose sums the key does not know yet are read. 64 bits each, the same on every
    rank.
    """
    sums = use.sums
    n_pieces = n_tokens // PIECE_TOKENS
    if len(sums) < n_pieces:
        last = sums[-1] if sums else 0
        with memoryview(use.tokens) as tokens:  # its slices copy nothing
            for at in range(len(sums) * PIECE_BYTES, n_pieces * PIECE_BYTES, PIECE_BYTES):
                last = digest(tokens[at : at + PIECE_BYTES], last)
                sums.append(last)
    if use.namespace is None:
        return sums[:n_pieces]
    salt = digest(_named(use.namespace).encode())
    return [each ^ salt for each in sums[:n_pieces]]


def _named(namespace: object) -> str:
    """A namespace's text, the same on every rank; of objects that have none it is empty."""
    if isinstance(namespace, tuple):
        return f"({','.join(map(_named, namespace))})"
    return repr(namespace) if isinstance(namespace, (str, int, bytes)) else ""
