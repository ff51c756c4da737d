"""A request, with its lease and its part of every component."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Final, NamedTuple, NoReturn

from kvgraft.errors import ConfigError, LeaseError
from kvgraft.policies.policy import Hint, Use
from kvgraft.refusals import of_type
from kvgraft.requests.components import RequestComponent, RequestState
from kvgraft.transfers.journal import Transfer
from kvgraft.tree.keys import TokenKey, expect_namespace
from kvgraft.tree.node import Node
from kvgraft.tree.pinning import Receipt
from kvgraft.types import PointKind, Span

NO_PAGES: frozenset[int] = frozenset()
NO_POINTS: frozenset[tuple[int, PointKind]] = frozenset()
NOTHING_FETCHED = Span(0, 0)


class Stage(enum.Enum):
    """A request's stage."""

    LEASED = "leased"
    """Matched and pinned; owns nothing else."""
    ADMITTED = "admitted"
    """Its slots are promised; it may load back, allocate and run."""
    CLOSED = "closed"
    """Finished, aborted or retracted; it owns nothing."""


LEASED: Final = Stage.LEASED
ADMITTED: Final = Stage.ADMITTED
CLOSED: Final = Stage.CLOSED

NEXT_CALL = {
    LEASED: "call admit first",
    ADMITTED: "it is admitted already: go on with it, or restart it",
    CLOSED: "begin a new one",
}
"""The call to make after one out of order, by the request's stage."""


class Limited(str, enum.Enum):
    """Why a lease is shorter than the tree's data."""

    CROWDED = "pinning it would take slots promised to admitted requests (A12)"
    RECOMPUTE = "computing it again is estimated faster than loading it (R8)"
    NO_COPY = "a component cannot copy its state for a request that writes to it (M8)"


class LeftOut(NamedTuple):
    """The pool of states that is too small for the points that a request leaves out.

    Attributes:
        component: whose states.
        needed: states that it would take with one more point.
        capacity: states of the pool.
    """

    component: str
    needed: int
    capacity: int

    def __str__(self) -> str:
        return (
            f"it could never fit: component {self.component!r} needs {self.needed} states with it, "
            f"its pool has {self.capacity}"
        )


class Request:
    """One sequence on its way through the cache; made by `Cache.begin`.

    Token counts unless named otherwise.

    Attributes:
        key: its tokens; the engine appends decoded ones.
        prompt: prompt length.
        total: prompt plus reserved decode tokens.
        chunk: largest prefill step.
        draft_pages: pages for drafts that it is promised; 0 where they could never fit.
        computed: tokens whose data exists.
        allocated: pages with slots.
        anchor_tokens: length of the prefix it resumes from.
        device_tokens: how much of that can be resumed from DEVICE alone.
        storage_tokens: how much of it STORAGE brought back for this request and only HOST has.
        fetched: the pages that its prefetch made resumable.
        fits: whether it was deferred, and its pins stay as they are: others must end (N4).
        components: its part of every component, in the tree's order; a lease makes them anew.
        state_components: those of state components.
        bounded_components: those of paged components that do not need every page.
        checkpoints: boundaries (in pages) ahead at which states are captured.
        points: the resume points decided so far, by boundary in pages.
        resume_at: boundaries in pages that the engine named as resume points.
        points_left_out: why points ahead that are not among `checkpoints` are skipped at its
            admission; None if all stay.
        keeps_decoded: whether a state of its decode stays at its end; not if the pool could never
            hold that beside its live one.
        skipped: the skipped points, as boundary in pages and kind: each is counted once, even after
            `restart`. A restart with another key forgets them.
        left: boundaries in pages whose states it left behind, where no resume point is.
        last_point: the deepest of `points` it has passed.
        last_left: the deepest of `left` it has passed.
        continues: whether it was admitted before, and was retracted or restarted.
        cache_mark: a weak reference of its cache, the same for all of its requests; a request kept
            after its end keeps no cache.
        root: its namespace's root, kept while it runs.
        cached: the deepest boundary, in pages, at which all components' data can be cached so far.
        published: whether the tree got pages of it that no backup was started for.
        row: its row of the page tables; -1 before its first `Cache.step`.
        stage: leased, admitted or closed.
        key_edits: the key's edits when the request began, and later ones that only cut drafts.
        cuts: `Rows.cuts` of the tables that it has a row of.
        namespace: the key's namespace then; the request works there until it ends.
        load_started: whether `load_back` was called since it was admitted.
        limited: why the match is shorter than the tree's data; None if it is not, and after a
            failed load-back.
        requested_retention: the requested priority and time to live of its data; None without.
        hint: whether its sequence comes back, as the engine knew when it began.
        use: its view for the eviction policy; None for a policy without classes.
        use_class: class of its data, for the eviction policy.
        use_retention: how long its data is kept; None for the default.
        use_counted: whether the policy knows that it runs.
        deferrals_left: how many more calls of `admit` may defer it while another request computes
            pages that it could resume from.
        deferred: whether the last one did: the next one matches again.
    """

    __slots__ = (
        *("allocated", "anchor_tokens", "bounded_components", "cache_mark", "cached"),
        *("checkpoints", "chunk", "components", "computed", "continues", "cuts", "deferrals_left"),
        *("deferred", "device_tokens", "draft_pages", "fetched", "fits", "hint", "keeps_decoded"),
        *("key", "key_edits", "last_left", "last_point", "left", "limited", "load_started"),
        *("namespace", "points", "points_left_out", "prompt", "published", "receipt"),
        *("requested_retention", "resume_at", "root", "row", "skipped", "stage"),
        *("state_components", "storage_tokens", "total", "use", "use_class", "use_counted"),
        *("use_retention", "waits"),
    )

    def __init__(self, key: TokenKey, prompt: int, total: int, chunk: int, cache_mark: Any) -> None:
        self.cache_mark = cache_mark
        self.key = key
        self.key_edits = key.edits
        self.cuts: dict[int, int] = {}
        self.namespace = key.namespace
        self.load_started = False
        self.continues = False
        self.row = -1
        self.prompt = prompt
        self.total = total
        self.chunk = chunk
        self.draft_pages = 0
        self.fetched = NOTHING_FETCHED
        self.resume_at: tuple[int, ...] = ()
        self.skipped = NO_POINTS
        self.keeps_decoded = True
        self.stage = LEASED
        self.hint: Hint | None = None
        self.requested_retention: Any = None
        self.use: Use | None = None
        self.use_class = 0
        self.use_retention: Any = None
        self.use_counted = False
        self.deferrals_left = 0
        self.deferred = False
        # The lease fills these in, and so does each later one.
        self.receipt: Receipt
        self.root: Node
        self.limited: Limited | None
        self.anchor_tokens: int
        self.device_tokens: int
        self.storage_tokens: int
        self.computed: int
        self.allocated: int
        self.components: Sequence[RequestComponent]
        self.state_components: Sequence[RequestState]
        self.bounded_components: Sequence[RequestComponent]
        self.waits: list[Transfer]
        self.fits: bool
        self.checkpoints: list[int]
        self.points: dict[int, PointKind]
        self.points_left_out: LeftOut | None
        self.left: frozenset[int]
        self.last_point: int
        self.last_left: int
        self.cached: int
        self.published: bool

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: its slots have one owner (T9)."""
        raise LeaseError(
            "a request cannot be copied or pickled; begin another with a copy of its key"
        )

    def __repr__(self) -> str:
        return (
            f"<Request {self.stage.value}: {self.computed} of {self.prompt} prompt tokens computed "
            f"or reused, resumed at {self.anchor_tokens}, up to {self.total} tokens>"
        )

    def has_same_key(self) -> bool:
        """Whether its key still has all of its tokens and its namespace."""
        return self.key.edits == self.key_edits and self.key.namespace == self.namespace

    def expect_namespace(self) -> None:
        """Refuse to go on in another namespace than it began in (T11)."""
        if self.key.namespace != self.namespace:
            raise LeaseError(
                f"the request began in namespace {self.namespace!r:.60} and its key is in "
                f"{self.key.namespace!r:.60} now; abort it and begin another"
            )

    def pages_short(self, n_tokens: object, page_size: int) -> int:
        """Pages the next `n_tokens` tokens need beyond those with slots; 0 or less for none.

        Raises:
            LeaseError: not a whole number of tokens, or a negative one.
        """
        if type(n_tokens) is not int or n_tokens < 0:
            n_tokens = whole(n_tokens, "allocate")
        return -(-(self.computed + n_tokens) // page_size) - self.allocated

    def position_after(self, n_tokens: object, page_size: int) -> int:
        """Where the next `n_tokens` tokens end.

        Raises:
            LeaseError: not a whole number of tokens, or more than slots are allocated for.
        """
        if type(n_tokens) is not int or n_tokens < 0:
            n_tokens = whole(n_tokens, "computed")
        room = self.allocated * page_size - self.computed
        if n_tokens > room:
            raise LeaseError(
                f"computed: n_tokens={n_tokens}, slots for {room} allocated; allocate first"
            )
        return self.computed + n_tokens

    def was_cut(self, end: int) -> None:
        """Its key was cut: tokens of its last step behind the cut do not count."""
        if self.row >= 0:
            self.cuts[self.row] = min(end, self.cuts.get(self.row, end))

    def expect_loaded(self) -> None:
        """Refuse to run before the data that it resumes from has arrived (R7).

        Raises:
            LeaseError: its load-back has not started, has not ended or has failed.
        """
        if not self.load_started and self.needs_load_back:
            raise LeaseError("allocate before load_back: part of the prefix is on HOST only")
        if self.load_failed:
            raise LeaseError("the load-back failed; restart the request, then admit it")
        if not self.ready:
            raise LeaseError("allocate before the load-back has ended; poll until it is ready")

    def state_component(self, index: int) -> RequestState | None:
        """Its part of a state component, by that one's index; None of a paged component."""
        part = self.components[index]
        return part if isinstance(part, RequestState) else None

    @property
    def pending(self) -> Pending | None:
        """A longer prefix that a running request is about to share; None if there is none.

        Only for a request that is not admitted yet. Each use searches, in O(running requests + its
        length).
        """
        cache = self.cache_mark()
        found: Pending | None = None if cache is None else cache.pending.find(self)
        return found

    @property
    def fresh(self) -> bool:
        """Whether its states are uninitialized: none of its tokens is computed or reused.

        Their slots still have another request's data. Write the initial state, or make kernels read
        none (`has_initial_state`).
        """
        return not self.computed

    @property
    def needs_load_back(self) -> bool:
        """Whether any component must fetch data from HOST before the request can run."""
        return any(part.host_slots for part in self.components)

    @property
    def ready(self) -> bool:
        """Whether all copies that `load_back` waits for have ended or failed; true before it."""
        return all(transfer.ended for transfer in self.waits)

    @property
    def load_failed(self) -> bool:
        """Whether a transfer that it waited for failed; restart it (R5)."""
        return any(transfer.failed for transfer in self.waits)


class Pending(NamedTuple):
    """A longer prefix to resume from, as soon as another request has computed and shared it.

    Attributes:
        tokens: its length.
        computed: tokens of the other request that exist.
        by: that request. It has been admitted.
    """

    tokens: int
    computed: int
    by: Request

    def __str__(self) -> str:
        return f"{self.tokens} tokens that another request computes, {self.computed} so far"


def whole(n_tokens: object, call: str) -> int:
    """A number of tokens as an int, of any integral type.

    Raises:
        LeaseError: it is no such number.
    """
    if not isinstance(n_tokens, bool) and isinstance(n_tokens, Integral) and int(n_tokens) >= 0:
        return int(n_tokens)
    raise LeaseError(f"{call}: {n_tokens!r} is no number of tokens; give a whole one, 0 or more")


def no_request(given: object) -> LeaseError:
    """The refusal of an object that is no request."""
    return LeaseError(f"{of_type(given)} is no request; give the request that Cache.begin returned")


def expect_key(key: Any) -> TokenKey:
    """Return `key` if it can be matched.

    Raises:
        ConfigError: it is no `TokenKey`, or its namespace is refused as a new key's would be.
    """
    if not isinstance(key, TokenKey):
        raise ConfigError(f"{of_type(key)} is no TokenKey; give TokenKey(token_ids)")
    if key.namespace is not None:
        expect_namespace(key.namespace)
    return key
