"""The words components and core share: tiers, kinds and a component's declaration.

Modules on the hot path read an enum's members through globals (`DEVICE: Final = Tier.DEVICE`):
before Python 3.12 the enum's attribute takes ten times as long.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = [
    "ComponentDeclaration",
    "ComponentMatch",
    "Demand",
    "DemandQuery",
    "Direction",
    "Kind",
    "LockQuery",
    "MatchView",
    "Namespaces",
    "PointKind",
    "Span",
    "Tier",
    "TransferQuery",
]


class Tier(enum.Enum):
    """The memory that holds data. STORAGE is reserved for the storage tier."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class Namespaces(enum.Enum):
    """Means all namespaces where one may be named: None is that of keys without any."""

    ALL = "all"


class Kind(enum.Enum):
    """PAGED components hold slots for every page; STATE components one slot at a boundary."""

    PAGED = "paged"
    STATE = "state"


class Direction(enum.Enum):
    """The direction of a transfer."""

    BACKUP = "backup"
    LOAD_BACK = "load_back"


class PointKind(str, enum.Enum):
    """Why a boundary is a resume point: every component's data there is worth keeping (I10).

    Members are equal to their text and print as it: `cache.points.made["repeat"]`.
    """

    REPEAT = "repeat"
    """The deepest boundary an identical prompt can resume from."""
    PROMPT_END = "prompt end"
    """The last boundary of the prompt."""
    BRANCH = "branch"
    """Where the prompt departs from another request's, and no component's reach was kept."""
    END = "end"
    """Where a request ended, or the engine called for a checkpoint."""
    ASKED = "asked"
    """A component or the engine asked for it."""
    GRID = "grid"
    """Regular, in a long prompt; costs at most an eighth of the base component's bytes (I12)."""

    __str__ = str.__str__
    __repr__ = str.__repr__


class Span(NamedTuple):
    """A half-open range of pages, `[start, end)`, counted from the start of the sequence."""

    start: int
    end: int


new_span: Callable[[tuple[int, int]], Span] = partial(tuple.__new__, Span)
"""The span of a start and an end, made in half the time: for code that runs for every request."""


@dataclass(frozen=True, slots=True)
class ComponentDeclaration:
    """A component package's description of itself, before anything is built.

    Attributes:
        name: how users and other tools name the component; unique among installed packages.
        api_version: the contract version the package was written for, a literal such as `"1.0"`.
        kind: paged or state.
        summary: one line for `kvgraft components`.
        options: pydantic model of its options; unknown fields must be forbidden.
        home: the tier that holds the canonical copy. With HOST, a cell exists only while its host
            slots do, and its device slots are an addition that a hit needs on the device.
        capabilities: `"host_mirror"` (can be backed up and loaded back) and `"copy_on_write"`
            (a state can be copied for a request that will write to it). The core uses no capability
            that is missing (P8).
    """

    name: str
    api_version: str
    kind: Kind
    summary: str
    options: type[BaseModel]
    home: Tier = Tier.DEVICE
    capabilities: frozenset[str] = field(default_factory=frozenset)


class ComponentMatch(NamedTuple):
    """One component's addition to a match.

    Attributes:
        limit_pages: the deepest boundary it accepts, in pages; never above the view's anchor (M5).
        checkpoint_pages: boundaries, in pages, at which the request should capture a state.
    """

    limit_pages: int
    checkpoint_pages: tuple[int, ...] = ()


class MatchView(NamedTuple):
    """A match as `finalize_match_result` sees it; all boundaries in pages.

    Attributes:
        anchor: deepest boundary every component can resume from, on DEVICE or HOST.
        device_anchor: deepest boundary resumable from DEVICE alone.
        base: deepest boundary up to which the base component has data on any tier.
        limit: the caller's limit.
        host_slots: slots of this component a load-back from the anchor would allocate (M4).
    """

    anchor: int
    device_anchor: int
    base: int
    limit: int
    host_slots: int


class LockQuery(NamedTuple):
    """The argument of `acquire_component_lock`: a boundary in pages and the page size."""

    boundary: int
    page_size: int


class TransferQuery(NamedTuple):
    """Slots to copy, in pairs: `device_slots[i]` and `host_slots[i]` hold the same data.

    Both are int32 `[n]` as bytes.
    """

    direction: Direction
    device_slots: bytes
    host_slots: bytes


class DemandQuery(NamedTuple):
    """A request, as `budget_contribution` sees it; token counts unless named otherwise.

    Attributes:
        page_size: tokens per page.
        computed: tokens whose data exists (the anchor at first).
        chunk: tokens the next step computes.
        prompt: prompt length.
        total: prompt plus the decode tokens to reserve for.
        host_slots: this component's own slots a load-back will take (A3).
        checkpoints: boundaries still ahead at which a state is captured.
    """

    page_size: int
    computed: int
    chunk: int
    prompt: int
    total: int
    host_slots: int
    checkpoints: int


class Demand(NamedTuple):
    """Slots a request needs of a component's pools, in each pool's own units (A1).

    Attributes:
        now: device slots the next step takes: chunk, load-back, page rounding, slack.
        later: device slots to keep for the rest of the request.
        private: slots of each of the component's private pools, in their order; held to the end.
    """

    now: int
    later: int
    private: tuple[int, ...] = ()


new_view: Callable[[tuple[int, int, int, int, int]], MatchView] = partial(tuple.__new__, MatchView)
new_demand: Callable[[tuple[int, int, tuple[int, ...]]], Demand] = partial(tuple.__new__, Demand)
new_query: Callable[[tuple[int, int, int, int, int, int, int]], DemandQuery] = partial(
    tuple.__new__, DemandQuery
)
"""As `new_span`."""
