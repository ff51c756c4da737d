"""Unusual components that keep the contract; an alarm about one is a defect of the suite."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from kvgraft import (
    HOST_MIRROR,
    Chunk,
    ChunkedLocal,
    Component,
    ComponentMatch,
    Demand,
    DemandQuery,
    DevicePool,
    Everything,
    Leading,
    LockQuery,
    MatchView,
    PlaneSpec,
    Reach,
    Span,
    Trailing,
    TransferQuery,
)
from kvgraft.pools.allocator import SlotAllocator
from kvgraft.transfers import PlaneCopy, pair_planes

from ..model.patterns import BlockSparse, Strided
from .components import budgeting, demand, hosted
from .packages import Package, paged, state

__all__ = ["LEGAL"]


class Scattered(SlotAllocator):
    """Slots come in an order of their own, never next to one another."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.allocate(capacity)
        self.free(array("i", [*range(0, capacity, 2), *range(1, capacity, 2)]).tobytes())


class ScatteredPool(DevicePool):
    def __init__(self, specs: Sequence[PlaneSpec], n_slots: int, device: Any = "cpu") -> None:
        super().__init__(specs, n_slots, device)
        self.allocator = Scattered(n_slots)


def _cuts(component: Component, view: MatchView) -> ComponentMatch | None:
    """It resumes at every other boundary only."""
    return ComponentMatch(view.anchor // 2 * 2)


def _pins_a_page_more(component: Component, query: LockQuery) -> list[Span]:
    window = -(-5 // query.page_size) + 1
    return [Span(max(0, query.boundary - window), query.boundary)] if query.boundary else []


def _three_times(component: Component, query: DemandQuery) -> Demand:
    """Host hits once all the same (A3)."""
    need = demand(query._replace(host_slots=0))
    return need._replace(now=3 * need.now + query.host_slots)


def _never_resumes(component: Component, view: MatchView) -> ComponentMatch | None:
    return ComponentMatch(0)


def _far_apart(component: Component, view: MatchView) -> ComponentMatch | None:
    """States are asked for at every 64th boundary, which short prompts never reach."""
    marks = range((view.anchor // 64 + 1) * 64, view.limit + 1, 64)
    return ComponentMatch(view.anchor, tuple(marks)) if marks else None


def _row_by_row(component: Component, query: TransferQuery) -> list[PlaneCopy]:
    """The same copies, a row at a time, the last plane first."""
    return [
        copy._replace(
            source_rows=copy.source_rows[at : at + 1], target_rows=copy.target_rows[at : at + 1]
        )
        for copy in reversed(pair_planes(component, query))
        for at in range(len(copy.source_rows))
    ]


def _in_two_spans(component: Component, query: LockQuery) -> list[Span]:
    """The window, page by page, the last one first."""
    first = max(0, query.boundary - -(-5 // query.page_size))
    return [Span(page, page + 1) for page in range(query.boundary - 1, first - 1, -1)]


LEGAL: dict[str, Package] = {
    "a window, and no optional hook": paged(),
    "a window of one token": paged(reach=Reach(Trailing(1))),
    "a state, and no optional hook": state(),
    "a state for every 64th page": state(hooks={"finalize_match_result": _far_apart}),
    "reach is a chunk, a window and the first tokens": paged(
        reach=Reach(Leading(3), Trailing(5), Chunk(8))
    ),
    "it budgets three times its need": budgeting(_three_times),
    "no match is long enough for it": paged(hooks={"finalize_match_result": _never_resumes}),
    "it builds its copies row by row": paged(
        hooks={
            "build_hicache_transfers": _row_by_row,
            "commit_hicache_transfers": lambda component, query: None,
            "abort_hicache_transfers": lambda component, query: None,
        }
    ),
    "a pin is named page by page": paged(
        hooks={
            "acquire_component_lock": _in_two_spans,
            "release_component_lock": lambda component, segment: None,
        }
    ),
    "private slots beside a window": paged(
        private={"rows": 7},
        hooks={
            "budget_contribution": lambda component, query: demand(query)._replace(private=(3,))
        },
    ),
    "reach is a union of ranges": paged(reach=Reach(Leading(3), Trailing(4))),
    "reach is a chunk and the first tokens": paged(reach=Reach(Leading(2), Chunk(6))),
    "reach is a chunk of no whole pages": paged(reach=Reach(Chunk(5))),
    "reach is a chunk that is empty at its end": paged(reach=Reach(ChunkedLocal(6))),
    "reach is the head of a prompt": paged(reach=Reach(Leading(3))),
    "reach is strided": paged(reach=Reach(Strided(6, 2))),
    "reach is block-sparse": paged(reach=Reach(BlockSparse(4, 2))),
    "four slots a page": paged(slots_per_page=4),
    "everything, three slots a page": paged(reach=Reach(Everything()), slots_per_page=3),
    "slots are not contiguous": paged(device=ScatteredPool),
    "no host mirror": paged(capabilities=frozenset(), mirror=False),
    "a state without a host mirror": state(capabilities=frozenset({"copy_on_write"}), mirror=False),
    "a state that cannot be copied": state(capabilities=frozenset({HOST_MIRROR})),
    "a match is cut to every other boundary": paged(hooks={"finalize_match_result": _cuts}),
    "a pin holds a page more than the reach": paged(
        hooks={
            "acquire_component_lock": _pins_a_page_more,
            "release_component_lock": lambda component, segment: None,
        }
    ),
    "it builds its copies itself": paged(
        hooks={
            "build_hicache_transfers": pair_planes,
            "commit_hicache_transfers": lambda component, query: None,
            "abort_hicache_transfers": lambda component, query: None,
        }
    ),
    "it budgets more than it must": budgeting(
        lambda component, query: demand(query)._replace(later=demand(query).later + 2)
    ),
    "it budgets only where something comes from HOST": budgeting(
        lambda component, query: demand(query) if query.host_slots else None
    ),
    "its pages are multiples of 4 tokens": paged(multiple=4),
    "its pages are multiples of 16 tokens": paged(reach=Reach(Everything()), multiple=16),
    "its home is HOST, its pages are multiples of 4 tokens": hosted(multiple=4),
    "its home is HOST, with private slots": hosted(),
}
"""Components by their unusual trait."""
