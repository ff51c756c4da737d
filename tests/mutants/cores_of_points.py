"""More cores with one defect each: resume points, and data that running requests leave behind."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kvgraft.admission import promises
from kvgraft.admission.decision import default_demand
from kvgraft.requests.components import Account, RequestComponent
from kvgraft.requests.publishing import Offers, Publisher
from kvgraft.requests.request import Request
from kvgraft.requests.resume_points import ResumePoints
from kvgraft.tree import inserting, pinning
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree
from kvgraft.types import Demand

from .cores import Patch, mutant
from .cores_held_out import edited

__all__: list[str] = []

# -- where the points are


@mutant("everything+window", "I10", "M5")
def a_point_lies_a_page_early(patch: Patch) -> None:
    ahead = ResumePoints.ahead

    def early(self: ResumePoints, request: Request, found: Any, asked: Collection[int]) -> Any:
        points, captured = ahead(self, request, found, asked)
        return {max(found.anchor + 1, page - 1): kind for page, kind in points.items()}, captured

    patch.setattr(ResumePoints, "ahead", early)


@mutant("everything+window+state", "I10", "I9", "I1")
def a_point_is_kept_for_states_only(patch: Patch) -> None:
    def useless(self: Any, request: Request, part: RequestComponent, runs: list[Any]) -> list[Any]:
        part.free_pages(runs)
        return []

    patch.setattr(Offers, "_classed", useless)


@mutant("everything+window", "I12")
def a_grid_is_never_thinned(patch: Patch) -> None:
    init = ResumePoints.__init__

    def dense(self: ResumePoints, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        self.spacing = self.state_spacing = 1

    patch.setattr(ResumePoints, "__init__", dense)


@mutant("everything+window", "I10", "I9", "T7")
def a_point_of_the_grid_is_seen_once_its_pages_have_left(patch: Patch) -> None:
    edited(Publisher._insert, "max(end, request.computed // self.tree.page_size)", "end")(patch)


@mutant("everything+state", "I10", "I11")
def a_skipped_point_is_not_counted(patch: Patch) -> None:
    edited(ResumePoints.skip, "self.skipped[kind] += 1", "pass")(patch)


# -- left-behind data


@mutant("everything+window", "I1", "I9", "I10", "T9")
def pages_are_published_after_they_went(patch: Patch) -> None:
    publish = Publisher.publish

    def late(self: Publisher, request: Request, end: int, position: int) -> None:
        self.pages.give_back_behind(request, position)
        publish(self, request, end, position)

    patch.setattr(Publisher, "publish", late)


@mutant("everything+window", "I9", "I10", "I1")
def a_decode_gives_back_pages_that_points_need(patch: Patch) -> None:
    edited(
        Publisher.leave_behind,
        "if not self.pages.is_worth_keeping(request, page):",
        "if True:",
    )(patch)


@mutant("window", "I9", "T7")
def left_behind_data_goes_last(patch: Patch) -> None:
    patch.setattr(inserting, "LEFT_BEHIND", -(1 << 40))


@mutant("window", "I9", "T7")
def left_behind_data_counts_as_used(patch: Patch) -> None:
    patch.setattr(inserting, "LEFT_BEHIND", 0)


@mutant("window", "I9", "T7")
def data_left_behind_last_goes_first(patch: Patch) -> None:
    edited(inserting._take, "tree.clock - LEFT_BEHIND", "-tree.clock")(patch)


@mutant("everything+window", "I12", "L1", "T6", "T8")
def left_behind_data_stays_pinned(patch: Patch) -> None:
    advance = pinning.advance

    def greedy(tree: Tree, receipt: Any, anchor: Node, boundary: int) -> None:
        node = anchor
        while node is not receipt.anchor and node.parent is not None:
            for component in tree.components:
                cell = node.cells[component.index]
                if (
                    not component.is_prefix_closed
                    and cell.device is not None
                    and not cell.device_pins
                ):
                    cell.device_pins += 1
                    n_slots = len(cell.device) // 4
                    component.devices[node.tenant].pinned += n_slots
                    component.devices[node.tenant].evictable -= n_slots
            node = node.parent
        advance(tree, receipt, anchor, boundary)

    patch.setattr(pinning, "advance", greedy)


@mutant("everything+window", "I12", "A11", "A12", "A7")
def left_behind_data_is_promised_again(patch: Patch) -> None:
    patch.setattr(Account, "renewal", lambda self, n: n)


@mutant("window", "T8", "T9", "I1")
def duplicates_of_bounded_reaches_leak(patch: Patch) -> None:
    edited(
        inserting._adopt,
        "        if not run.is_left:\n            tree.touch(node, component)\n"
        "        component.devices[node.tenant].give_private(slots)\n",
        "        if not component.is_prefix_closed:\n            continue\n"
        "        tree.touch(node, component)\n"
        "        component.devices[node.tenant].give_private(slots)\n",
    )(patch)


# -- the points' cost


@mutant("everything+state", "I12")
def points_are_counted_twice_in_the_demand(patch: Patch) -> None:
    def twice(component: Any, query: Any) -> Demand:
        found = default_demand(component, query)
        return found._replace(later=found.later + query.checkpoints * component.is_state)

    patch.setattr(promises, "default_demand", twice)


@mutant("everything+state", "A10", "I12", "A7", "I10")
def points_are_left_out_of_the_demand(patch: Patch) -> None:
    patch.setattr(
        promises,
        "default_demand",
        lambda component, query: default_demand(component, query._replace(checkpoints=0)),
    )
