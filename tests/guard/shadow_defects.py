"""A core that passes the books and is found by a second opinion."""

from __future__ import annotations

from typing import Any

from kvgraft import LoadModel, TokenKey, WritePolicy
from kvgraft import cache as cache_module
from kvgraft.policies.policy import CLASS_BITS, LEFT_BEHIND
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.requests.components import Account, RequestComponent
from kvgraft.requests.leases import Leases
from kvgraft.requests.publishing import Offers, Publisher
from kvgraft.requests.request import Request
from kvgraft.requests.resume_points import ResumePoints
from kvgraft.requests.slots import PageSlots
from kvgraft.serving import Serving
from kvgraft.tree import component as components
from kvgraft.tree import inserting, operations
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree
from kvgraft.types import Tier
from kvgraft_observe import explaining
from kvgraft_scheduling.waiting import WaitingQueue

from .defect import breaks
from .request_defects import after_lease, change_demand
from .scene import LONGER, PROMPT, Patch, Scene

__all__: list[str] = []

OTHER = list(range(700, 708))


@breaks("M9", "base")
def an_explanation_that_accepts_nothing(put: Patch) -> None:
    put.setattr(explaining, "_gap", lambda *given, **named: "nothing is there")
    scene = Scene()
    scene.cached(PROMPT)
    for _ in range(40):
        scene.cache.abort(scene.begin(LONGER))


@breaks("R6")
def a_match_that_does_not_wait_for_others_loads(put: Patch) -> None:
    def alone(self: Serving, request: Request) -> None:
        request.waits = []

    scene = Scene(host_tokens=64)
    scene.on_host_only(PROMPT)
    scene.cache.load_back(scene.admitted(LONGER))
    after_lease(put, scene, alone)
    scene.begin([*PROMPT, *OTHER])


@breaks("R8")
def a_load_that_is_skipped_although_it_is_faster(put: Patch) -> None:
    weigh = Leases._recompute
    scene = Scene(host_tokens=64, load=LoadModel())
    scene.on_host_only(PROMPT)
    put.into(scene.cache.leases, _recompute=lambda self, *found: not weigh(self, *found))
    scene.begin(LONGER)


@breaks("A13")
def a_line_that_lets_small_requests_pass_for_ever(put: Patch) -> None:
    put.setattr(WaitingQueue, "round", lambda self: iter(list(self)))
    scene = Scene()
    scene.computed(range(900, 932))
    line: WaitingQueue[TokenKey] = WaitingQueue()
    line.append(TokenKey(range(2000, 2040)))
    for number in range(40):
        line.append(TokenKey([number] * 4))
        for key in line.round():
            request = scene.cache.begin(key)
            if scene.cache.admit(request).admitted:
                line.take(key)
            scene.cache.abort(request)


@breaks("I1", "base")
def an_insert_that_mixes_up_the_pages(put: Patch) -> None:
    take = inserting._take

    def mixed(
        tree: Tree, node: Node, component: TreeComponent, slots: bytes, *, is_left: bool
    ) -> None:
        turned = slots[SLOT_BYTES:] + slots[:SLOT_BYTES]
        take(tree, node, component, turned, is_left=is_left)

    put.setattr(inserting, "_take", mixed)
    Scene().cached(PROMPT)


@breaks("I3", "window")
def a_window_that_keeps_what_it_left_behind(put: Patch) -> None:
    scene = Scene()
    put.into(scene.cache.publisher, leave_behind=lambda self, request, page, ahead=1: None)
    scene.computed(PROMPT, chunk=16)


@breaks("I4", "base")
def a_match_that_moves_what_another_reads(put: Patch) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    scene.computed(LONGER)

    def move(self: Serving, request: Request) -> None:
        cell = scene.nodes[0].cells[0]
        assert cell.device is not None
        cell.device = cell.device[SLOT_BYTES:] + cell.device[:SLOT_BYTES]

    after_lease(put, scene, move)
    scene.begin(OTHER)


@breaks("I6")
def an_end_that_donates_no_state(put: Patch) -> None:
    scene = Scene(state=True)
    put.into(scene.cache.states, offer_states=lambda self, request, part: None)
    scene.cached(PROMPT)


@breaks("I9", "window")
def a_window_that_gives_back_what_it_left_behind(put: Patch) -> None:
    give = PageSlots.give_back_behind
    scene = Scene()
    put.into(
        scene.cache.publisher,
        leave_behind=lambda self, request, page, ahead=1: give(self.pages, request, page),
    )
    scene.computed(PROMPT, chunk=16)


@breaks("I9", "window")
def evict_first_data_that_counts_as_used(put: Patch) -> None:
    take = inserting._take
    put.setattr(
        inserting,
        "_take",
        lambda tree, node, component, slots, is_left: take(
            tree, node, component, slots, is_left=False
        ),
    )
    Scene().computed(PROMPT, chunk=16)


@breaks("I9", "window")
def evict_first_data_that_goes_before_older_data(put: Patch) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    put.setattr(inserting, "LEFT_BEHIND", LEFT_BEHIND + (100 << CLASS_BITS))
    scene.cached(OTHER * 4)


@breaks("I9", "window")
def a_victim_that_was_used_before_what_was_left_behind(put: Patch) -> None:
    def used_first(self: components.Candidates, least: int) -> tuple[int | None, int | None]:
        giver, level = following(self, least)
        return giver, level if giver is None or not self._used[giver].n else 0

    following = components.Candidates._next
    put.setattr(components.Candidates, "_next", used_first)
    scene = Scene()
    scene.cached(PROMPT)
    scene.cache.evict("window", scene.component("window").device.free + 1)


@breaks("I10")
def a_point_one_page_early(put: Patch) -> None:
    ahead = ResumePoints.ahead

    def early(self: ResumePoints, *given: Any) -> Any:
        points, captured = ahead(self, *given)
        return {page - 1: kind for page, kind in points.items()}, captured

    scene = Scene()
    put.into(scene.cache.points, ahead=early)
    scene.begin(PROMPT)


@breaks("I10")
def a_point_that_the_engine_named_and_nobody_keeps(put: Patch) -> None:
    put.setattr(cache_module, "resume_pages", lambda *given: ())
    Scene().begin(PROMPT, resume_at=16)


@breaks("I10", "window")
def a_point_whose_pages_go_first(put: Patch) -> None:
    def all_left(
        self: Offers, request: Request, part: RequestComponent, runs: list[inserting.Run]
    ) -> list[inserting.Run]:
        return [run.cut(run.first, run.end, is_left=True) for run in runs]

    scene = Scene()
    put.into(scene.cache.publisher.offers, _classed=all_left)
    scene.computed(PROMPT, reserve=8)


@breaks("I10", "window")
def a_point_of_states_without_the_pages_before_it(put: Patch) -> None:
    def none(
        self: Offers, request: Request, part: RequestComponent, runs: list[inserting.Run]
    ) -> list[inserting.Run]:
        part.free_pages(runs)
        return []

    scene = Scene(state=True)
    put.into(scene.cache.publisher.offers, _classed=none)
    scene.computed(LONGER, reserve=8)


@breaks("I10", "window")
def pages_that_are_kept_where_no_state_is(put: Patch) -> None:
    scene = Scene(state=True)
    put.into(scene.cache.publisher.offers, _classed=lambda self, request, part, runs: runs)
    scene.computed(PROMPT)


@breaks("I10", "window")
def a_decode_that_gives_back_what_a_point_needs(put: Patch) -> None:
    scene = Scene()
    put.into(scene.cache.pages, has_promise_left=lambda self, parts, pages: False)
    put.into(scene.cache.pages, is_worth_keeping=lambda self, request, page: False)
    request = scene.computed(PROMPT, reserve=8)
    request.key.extend(OTHER)
    for _ in OTHER:
        assert scene.cache.allocate(request, 1)
        scene.cache.computed(request, 1)


@breaks("I11")
def a_point_given_up_and_not_counted(put: Patch) -> None:
    scene = Scene(state=True)
    put.into(
        scene.cache.points,
        skip=lambda self, request, page, *_: request.points.pop(page, None) and None,
    )
    request = scene.admitted(PROMPT)
    assert scene.cache.allocate(request, len(PROMPT))
    scene.cache.computed(request, len(PROMPT))


@breaks("I12", "state")
def a_demand_that_leaves_out_the_points(put: Patch) -> None:
    change_demand(
        put,
        lambda demand, component, query: demand._replace(later=1) if component.is_state else demand,
    )
    Scene(state=True).admitted(PROMPT)


@breaks("I12", "base")
def evict_first_data_that_costs_a_promise(put: Patch) -> None:
    put.setattr(Account, "renewal", lambda self, n: n + 1)
    Scene().computed(PROMPT, chunk=16)


@breaks("L6", "window")
def a_window_that_gives_back_a_page_too_many(put: Patch) -> None:
    leave = Publisher.leave_behind
    scene = Scene()
    put.into(
        scene.cache.publisher,
        leave_behind=lambda self, request, page, ahead=1: leave(self, request, page + 1, ahead),
    )
    scene.computed(PROMPT, chunk=16)


@breaks("E4", "window")
def a_demotion_that_leaves_a_window_behind(put: Patch) -> None:
    needs = operations.needs_backup
    put.setattr(
        operations,
        "needs_backup",
        lambda tree, node: [
            component for component in needs(tree, node) if component.name != "window"
        ],
    )
    scene = Scene(plain=True, host_tokens=64, policy=WritePolicy.WRITE_BACK)
    scene.cached(PROMPT)
    scene.cache.evict("base", 16)


@breaks("B6", "base")
def an_insert_that_is_not_written_through(put: Patch) -> None:
    scene = Scene(host_tokens=64)
    put.into(scene.cache.backups, inserted=lambda self, *given: None)
    scene.cached(PROMPT)


@breaks("B7", "window")
def a_revived_window_that_is_not_backed_up(put: Patch) -> None:
    scene = Scene(plain=True, host_tokens=64)
    scene.cached(PROMPT)
    scene.cached(LONGER)
    for tier in (Tier.DEVICE, Tier.HOST):
        scene.cache.evict("window", 16, tier)
    put.into(scene.cache.backups, inserted=lambda self, *given: None)
    scene.cached(PROMPT)
