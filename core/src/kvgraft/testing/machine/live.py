"""A request as the model follows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvgraft.request import Request
from kvgraft.testing.machine.brute_force import Prefix
from kvgraft.types import MatchView

__all__ = ["Live"]


@dataclass
class Live:
    """One running request; token counts unless named otherwise.

    Attributes:
        name: in traces.
        request: the cache's own.
        namespace, tuple: its tokens so far.
        prompt, reserve, chunk: as asked for.
        anchor: page it is anchored at.
        computed: tokens whose data exists.
        admitted, loaded, started: how far it got; started means it allocated.
        due: boundaries (pages) ahead at which states are captured.
        captured: boundaries whose state is not in the tree yet.
        tracked: last boundary passed while decoding, or 0.
        deferred: whether admission last answered so.
        locked: per component that asked for it, pages pinned besides its reach that a load-back
            brings as well.
        views: what components' hooks were told of its match.
    """

    name: str
    request: Request
    namespace: object
    tuple: tuple[int, ...]
    prompt: int
    reserve: int
    chunk: int
    anchor: int = 0
    computed: int = 0
    admitted: bool = False
    loaded: bool = False
    started: bool = False
    deferred: bool = False
    due: set[int] = field(default_factory=set)
    captured: set[int] = field(default_factory=set)
    tracked: int = 0
    locked: dict[str, set[int]] = field(default_factory=dict)
    views: list[MatchView] = field(default_factory=list)

    @property
    def sequence(self) -> Prefix:
        """Namespace and tokens so far."""
        return (self.namespace, self.tuple)

    def leased(self, page_size: int) -> None:
        """Take over what a new lease says."""
        self.anchor = self.request.anchor_tokens // page_size
        self.computed = self.request.anchor_tokens
        self.admitted = self.loaded = self.started = self.deferred = False
        self.due = set(self.request.checkpoints)
        self.captured = set()
        self.tracked = 0
        self.locked = {}
        self.views = []

    @property
    def waiting(self) -> bool:
        """Whether its load-back has not delivered."""
        return not self.request.ready or self.request.load_failed
