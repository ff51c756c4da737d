"""The slots that a request offers to the tree."""

from __future__ import annotations

from typing import NamedTuple

from kvgraft.compiled import mypyc_attr
from kvgraft.requests.parts import Part, StatePart
from kvgraft.requests.request import Request
from kvgraft.requests.runs import NO_PAGE, divided, marked, needed_between
from kvgraft.tree.inserting import NO_STATES, Holding, Run
from kvgraft.tree.tree import Tree
from kvgraft.types import Span

__all__ = ["Going", "Offers"]


class Going(NamedTuple):
    """Pages that a running request keeps private while it publishes others.

    Attributes:
        position: where it goes on; pages that bounded reaches cover there stay private.
        shared: prefix-closed pages stay private up to here: others' data is in the tree there.
    """

    position: int
    shared: int


@mypyc_attr(allow_interpreted_subclasses=True)
class Offers:
    """Takes what is to be shared out of a request's own slots, for the tree's insert."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def take_out(self, request: Request, end: int, going: Going | None = None) -> list[Holding]:
        """The request's offer to the tree up to boundary `end`; the rest stays private.

        Args:
            request: whose pages and states.
            end: a boundary in pages.
            going: the pages it keeps to go on; None if it shares all of them.
        """
        holdings: list[Holding] = []
        for part in request.parts:
            component = part.component
            if isinstance(part, StatePart):
                holdings.append(self._states_out(request, part, end))
                continue
            runs = part.runs
            if len(runs) == 1 and runs[0].end == end and going is None:
                below, part.runs = runs, []
            else:
                private = [Span(end, NO_PAGE)]
                if going is not None and component.is_prefix_closed:
                    private = [Span(0, going.shared), *private]
                elif going is not None:
                    private = sorted([*component.reach_pages.spans(going.position), *private])
                part.runs, below = divided(runs, private)
            if below and not component.is_prefix_closed:
                below = self._classed(request, part, below)
            if below:
                part.released(below)
            renews = going is not None and not component.is_prefix_closed
            holdings.append(Holding(below, NO_STATES, renews=renews))
        return holdings

    def _states_out(self, request: Request, part: StatePart, end: int) -> Holding:
        """The captured states that the request offers up to boundary `end`; the rest stays."""
        offered = part.captured
        part.captured = {}
        # Where a bounded base's page is still the request's own, its state follows it (T4).
        base = () if self.tree.prefix_closed else request.parts[0].runs
        deepest = _deepest(offered)
        if deepest > end or (base and offered):
            part.captured = {
                page: slot
                for page, slot in offered.items()
                if page > end or any(run.first < page <= run.end for run in base)
            }
            offered = {p: s for p, s in offered.items() if p not in part.captured}
            deepest = _deepest(offered)
        if offered:
            part.shared = max(part.shared, deepest)
            part.account.release(len(offered))
        return Holding([], offered, request.left)

    def _classed(self, request: Request, part: Part, runs: list[Run]) -> list[Run]:
        """Pages that leave the request: for resume points, or left behind (I9, I10).

        Where there are states too, only pages before one are of use; the others are given back.
        """
        component = part.component
        first, end = runs[0].first, runs[-1].end
        window = component.window_pages
        if window is not None and end - window <= first and end in request.points:
            return runs
        worth = needed_between(component, request.points, first, end)
        if len(worth) == 1 and worth[0].start <= first and worth[0].end >= end:
            return runs
        if not self.tree.has_state:
            return marked(runs, worth)
        kept, behind = divided(runs, worth)
        behind, useless = divided(behind, needed_between(component, request.left, first, end))
        if useless:
            part.free_pages(useless)
        left = [run.cut(run.first, run.end, is_left=True) for run in behind]
        return sorted([*kept, *left], key=_first_page)


def _deepest(states: dict[int, bytes]) -> int:
    """The last boundary of states; 0 without any. In compiled code a tenth of a call of `max`."""
    deepest = 0
    for page in states:
        deepest = max(deepest, page)
    return deepest


def _first_page(run: Run) -> int:
    return run.first
