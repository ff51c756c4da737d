"""A request and what it owns: its lease, its private slots, its promises."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from numbers import Integral
from typing import Any

from kvgraft.errors import ConfigError, LeaseError
from kvgraft.requests.account import Account
from kvgraft.transfers.journal import Transfer
from kvgraft.tree.inserting import Run
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.pinning import Receipt
from kvgraft.types import Demand, PointKind

__all__ = [
    "NO_PAGES",
    "Due",
    "Limited",
    "Request",
    "Stage",
    "StateSlots",
    "expect_key",
    "no_request",
    "whole",
]

NO_PAGES: frozenset[int] = frozenset()


class Stage(enum.Enum):
    """Where a request is in its life."""

    LEASED = "leased"
    """Matched and pinned; owns nothing else."""
    ADMITTED = "admitted"
    """Its slots are promised; it may load back, allocate and run."""
    CLOSED = "closed"
    """Finished, aborted or retracted; it owns nothing."""


class Limited(str, enum.Enum):
    """Why a lease is shorter than what the tree holds."""

    CROWDED = "pinning it would take slots promised to admitted requests (A12)"
    RECOMPUTE = "computing it again is estimated faster than loading it (R8)"
    NO_COPY = "a component cannot copy its state for a request that writes to it (M8)"


class Due(enum.Enum):
    """Why the live states at a boundary are kept before the model goes on."""

    POINT = "point"
    """A resume point that was promised its slots."""
    GRID = "grid"
    """A resume point of the grid: kept where every state component has a slot to spare."""
    LEFT = "left"
    """Left behind at the end of a chunk, where there is room among what is left behind."""
    DECODED = "decoded"
    """The last boundary passed while decoding."""


class StateSlots:
    """Slots a request holds of a state component.

    Attributes:
        live: the state the model writes to.
        captured: states at boundaries (in pages) not yet in the tree.
        shared: the deepest boundary whose state the tree was given since admission; 0 for none.
        tracked: the state at the last page boundary passed while decoding, overwritten at the
            next; it is what a finished request leaves behind.
        tracked_page: that boundary.
        due: boundary at which `live` stands and is to be kept before the model goes on; 0 if none.
        due_as: why it is.
    """

    __slots__ = ("captured", "due", "due_as", "live", "shared", "tracked", "tracked_page")

    def __init__(self) -> None:
        self.live: bytes | None = None
        self.captured: dict[int, bytes] = {}
        self.shared = 0
        self.tracked: bytes | None = None
        self.tracked_page = 0
        self.due = 0
        self.due_as = Due.DECODED

    @property
    def due_is_checkpoint(self) -> bool:
        """Whether what is due is kept as a captured state."""
        return self.due_as is not Due.DECODED

    def owned(self) -> list[bytes]:
        """Every slot held."""
        slots = (self.live, self.tracked, *self.captured.values())
        return [slot for slot in slots if slot is not None]


class Request:
    """One sequence on its way through the cache; made by `Cache.begin`.

    Token counts unless named otherwise.

    Attributes:
        key: its tokens; the engine appends what it decodes.
        prompt: prompt length.
        total: prompt plus the decode tokens reserved for.
        chunk: largest prefill step.
        computed: tokens whose data exists.
        allocated: pages with slots.
        anchor_tokens: length of the prefix it resumes from.
        device_tokens: how much of that can be resumed from DEVICE alone.
        storage_tokens: how much of that STORAGE brought back for this request.
        host_slots: per component, DEVICE slots its load-back takes (M4).
        demands: per component, the demand it was last decided on.
        checkpoints: boundaries (in pages) ahead at which states are captured.
        points: the resume points decided so far, by boundary in pages.
        resume_at: boundaries in pages that the engine named as such.
        left: boundaries in pages whose states it left behind, where no resume point is.
        last_point: the deepest of `points` it has passed.
        last_left: the deepest of `left` it has passed.
        cached: the deepest boundary, in pages, that it can leave all components' data at so far.
        published: whether the tree got pages of it that no backup was started for.
        stage: where it is in its life.
        key_edits: the key's edits when the request began.
        load_started: whether `load_back` was called since it was admitted.
        limited: why the match is shorter than what the tree holds; None if it is not.
    """

    __slots__ = (
        "accounts",
        "allocated",
        "anchor_tokens",
        "cached",
        "checkpoints",
        "chunk",
        "computed",
        "demands",
        "device_tokens",
        "host_accounts",
        "host_slots",
        "key",
        "key_edits",
        "last_left",
        "last_point",
        "left",
        "limited",
        "load_started",
        "points",
        "private",
        "prompt",
        "published",
        "receipt",
        "resume_at",
        "runs",
        "stage",
        "states",
        "storage_tokens",
        "total",
        "waits",
    )

    def __init__(self, key: TokenKey, prompt: int, total: int, chunk: int) -> None:
        self.key = key
        self.key_edits = key.edits
        self.load_started = False
        self.prompt = prompt
        self.total = total
        self.chunk = chunk
        self.storage_tokens = 0
        self.demands: list[Demand] = []
        self.resume_at: tuple[int, ...] = ()
        self.stage = Stage.LEASED
        # A lease fills these in, also one that takes another's place.
        self.receipt: Receipt
        self.limited: Limited | None
        self.anchor_tokens: int
        self.device_tokens: int
        self.computed: int
        self.allocated: int
        self.host_slots: tuple[int, ...]
        self.waits: list[Transfer]
        self.checkpoints: list[int]
        self.points: dict[int, PointKind]
        self.left: frozenset[int]
        self.last_point: int
        self.last_left: int
        self.cached: int
        self.published: bool
        # Admission fills these in; empty again when the request gives up what it owns.
        self.runs: list[list[Run]] = []
        self.states: list[StateSlots | None] = []
        self.private: list[tuple[bytes, ...]] = []
        self.accounts: list[Account] = []
        self.host_accounts: list[Account | None] = []

    def __repr__(self) -> str:
        return (
            f"<Request {self.stage.value}: {self.computed} of {self.prompt} prompt tokens computed "
            f"or reused, resumed at {self.anchor_tokens}, up to {self.total} tokens>"
        )

    def pages_short(self, n_tokens: int, page_size: int) -> int:
        """Pages the next `n_tokens` tokens need beyond those with slots; 0 or less for none.

        Raises:
            LeaseError: not a whole number of tokens, or a negative one.
        """
        if type(n_tokens) is not int or n_tokens < 0:
            n_tokens = whole(n_tokens, "allocate")
        return -(-(self.computed + n_tokens) // page_size) - self.allocated

    def advance(self, n_tokens: int, page_size: int) -> int:
        """The next `n_tokens` tokens exist; returns the page it stood on before.

        Raises:
            LeaseError: not a whole number of tokens, or more than slots are allocated for.
        """
        before = self.computed // page_size
        self.computed = self.position_after(n_tokens, page_size)
        return before

    def position_after(self, n_tokens: int, page_size: int) -> int:
        """Where the next `n_tokens` tokens end; raises as `advance` does and changes nothing."""
        if type(n_tokens) is not int or n_tokens < 0:
            n_tokens = whole(n_tokens, "computed")
        room = self.allocated * page_size - self.computed
        if n_tokens > room:
            raise LeaseError(f"{n_tokens} tokens computed, slots for {room} allocated")
        return self.computed + n_tokens

    @property
    def needs_load_back(self) -> bool:
        """Whether any component must fetch data from HOST before the request can run."""
        return any(self.host_slots)

    @property
    def ready(self) -> bool:
        """Whether all the data it resumes from is on DEVICE, or failed to get there."""
        return all(transfer.ended for transfer in self.waits)

    @property
    def load_failed(self) -> bool:
        """Whether a transfer it waited for delivered nothing; restart it (R5)."""
        return any(transfer.failed for transfer in self.waits)


def whole(n_tokens: object, call: str) -> int:
    """A number of tokens as an int, whichever type says it.

    Raises:
        LeaseError: it is none.
    """
    if isinstance(n_tokens, Integral) and int(n_tokens) >= 0:
        return int(n_tokens)
    raise LeaseError(f"{call}: {n_tokens!r} is no number of tokens; give a whole one, 0 or more")


def no_request(given: object) -> LeaseError:
    """The refusal of what is no request."""
    return LeaseError(f"a {type(given).__name__} is no request; give what Cache.begin returned")


def expect_key(key: Any) -> TokenKey:
    """What a request is begun with.

    Raises:
        ConfigError: it is no `TokenKey`, or its namespace cannot be hashed.
    """
    if not isinstance(key, TokenKey):
        raise ConfigError(
            f"a request is begun with a TokenKey, not a {type(key).__name__}; "
            "give TokenKey(token_ids)"
        )
    if not isinstance(key.namespace, Hashable):
        raise ConfigError(
            f"namespace {key.namespace!r:.60} is a {type(key.namespace).__name__}, which cannot be "
            "hashed; use an int, a str or a tuple"
        )
    return key
