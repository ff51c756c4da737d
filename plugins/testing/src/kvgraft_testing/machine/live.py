"""A request as the model follows it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvgraft.requests.request import Request
from kvgraft.types import MatchView, PointKind
from kvgraft_testing.machine.brute_force import Gone, Prefix
from kvgraft_testing.machine.recency import Retention
from kvgraft_testing.machine.resuming import Progress

__all__ = ["Live", "Using"]


class Using(NamedTuple):
    """The namespace of data that a call uses, and the retention of each of its requests."""

    namespace: object = None
    retentions: tuple[Retention | None, ...] = ()


Points = set[tuple[int, PointKind]]
"""Resume points, as boundary and kind."""


@dataclass
class Live:
    """One running request; token counts unless named otherwise.

    Attributes:
        name: in traces.
        request: the cache's own.
        namespace, tuple: its tokens so far.
        prompt, reserve, chunk: as given to `begin`.
        mark: position the engine named as a resume point; 0 for none.
        deferrals_left: calls of `admit` that may still defer it for pages that another computes.
        waits: whether the last one did.
        steps: whether it decodes in steps, as all running requests of an engine do together.
        adopts: whether the engine takes slots itself, where there is room, and it adopts them.
        anchor: page it is anchored at.
        cached: deepest boundary, in pages, at which it left all components' data.
        computed: tokens whose data exists.
        admitted, loaded, started: how far it got; started means it allocated.
        due: boundaries (pages) ahead at which states are captured.
        kinds: the kinds of the points that were ahead when it was leased, by boundary.
        counted: its points that were counted as skipped, as boundary and kind.
        own: its resume points, and its own data.
        standing: boundary its live states stand at, to be kept before it goes on; 0 for none.
        standing_as: why: `point`, `grid` or `left`.
        tracked: last boundary passed while decoding that keeps a state, or 0.
        deferred: whether admission last answered so.
        n_deferred: how often it did.
        locked: per component that asked for it, pages pinned besides its reach that a load-back
            brings as well.
        views: the views of its match given to components' hooks.
        retention: how long its data is kept.
    """

    name: str
    request: Request
    namespace: object
    tuple: tuple[int, ...]
    prompt: int
    reserve: int
    chunk: int
    mark: int = 0
    deferrals_left: int = 0
    waits: bool = False
    steps: bool = False
    adopts: bool = False
    anchor: int = 0
    cached: int = 0
    computed: int = 0
    admitted: bool = False
    loaded: bool = False
    started: bool = False
    deferred: bool = False
    n_deferred: int = 0
    due: set[int] = field(default_factory=set)
    kinds: dict[int, PointKind] = field(default_factory=dict)
    counted: Points = field(default_factory=set)
    own: Progress = field(default_factory=Progress)
    standing: int = 0
    standing_as: str = ""
    tracked: int = 0
    locked: dict[str, set[int]] = field(default_factory=dict)
    views: list[MatchView] = field(default_factory=list)
    retention: Retention | None = None

    @property
    def cleared(self) -> bool:
        """Whether its namespace was cleared since it was matched."""
        return isinstance(self.namespace, Gone)

    def found_again(self) -> None:
        """It is matched again, in its current namespace."""
        if isinstance(self.namespace, Gone):
            self.namespace = self.namespace.namespace

    @property
    def using(self) -> Using:
        """The namespace and the retention of what its calls use."""
        return Using(self.namespace, (self.retention,))

    @property
    def sequence(self) -> Prefix:
        """Namespace and tokens so far."""
        return (self.namespace, self.tuple)

    def leased(self, page_size: int) -> None:
        """Take over the values of a new lease."""
        self.anchor = self.request.anchor_tokens // page_size
        self.computed = self.request.anchor_tokens
        self.admitted = self.loaded = self.started = self.deferred = self.waits = False
        self.due = set(self.request.checkpoints)
        self.kinds = dict(self.request.points)
        self.own = Progress(
            points=set(self.request.points),
            last_point=self.anchor,
            last_left=self.anchor,
            private=defaultdict(set),
            based=self.anchor,
        )
        self.cached = self.anchor
        self.standing = self.tracked = 0
        self.locked = {}
        self.views = []

    def count_skipped(self, pages: Iterable[int]) -> Counter[PointKind]:
        """Its points at these boundaries are skipped; returns those not counted before, by kind."""
        skipped = {(page, self.kinds.get(page, PointKind.GRID)) for page in pages} - self.counted
        self.counted |= skipped
        return Counter([kind for _, kind in skipped])

    @property
    def waiting(self) -> bool:
        """Whether its load-back has not ended."""
        return not self.request.ready or self.request.load_failed
