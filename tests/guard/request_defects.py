"""A core that breaks its promises to requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event
from typing import Any, cast

from kvgraft import (
    Cache,
    ComponentMatch,
    Direction,
    LeaseError,
    TokenKey,
    TransferError,
    WritePolicy,
)
from kvgraft.admission import Decision, Outcome, promises
from kvgraft.admission.decision import default_demand
from kvgraft.admission.promises import Budget
from kvgraft.requests.components import Account, RequestComponent
from kvgraft.requests.leases import Leases
from kvgraft.requests.publishing import Publisher
from kvgraft.requests.request import Request
from kvgraft.requests.slots import PageSlots, StateSlots
from kvgraft.serving import Serving
from kvgraft.transfers import Journal
from kvgraft.tree import eviction, matching, operations, pinning
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.matching import Match
from kvgraft.tree.tree import Tree
from kvgraft.types import Demand, Tier
from kvgraft_scheduling.engine_slots import EngineSlots
from kvgraft_scheduling.stepping import Batch, Stepper

from .defect import breaks
from .scene import LONGER, PAGE, PROMPT, Patch, Scene

__all__: list[str] = []


def after_lease(put: Patch, scene: Scene, change: Any) -> None:
    """Change something at the end of every match."""
    lease = Serving._lease

    def changed(self: Serving, request: Request, limit: int) -> None:
        lease(self, request, limit)
        change(self, request)

    put.into(scene.cache, _lease=changed)


# -- match


@breaks("M6", "base")
def a_match_that_evicts(put: Patch) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    after_lease(
        put,
        scene,
        lambda self, request: eviction.evict_device(self.tree, self.tree.components[0], 1),
    )
    scene.begin([7, 7, 7, 7, 7])


@breaks("M6")
def a_match_that_adds_nodes(put: Patch) -> None:
    def grow(self: Serving, request: Request) -> None:
        node = request.receipt.anchor
        for number in range(8):
            key = bytes([number + 1]) * self.tree.page_bytes
            self.tree.grow(key, node, node.end, node.end + 1)

    scene = Scene(plain=True)
    after_lease(put, scene, grow)
    scene.begin(PROMPT)


@breaks("M2")
def a_match_that_leaves_nothing_to_compute(put: Patch) -> None:
    scene = Scene()
    put.into(scene.cache, _limit=lambda self, request: request.prompt // PAGE)
    scene.cached(PROMPT)
    scene.begin(PROMPT)


@breaks("M3")
def a_device_anchor_behind_the_anchor(put: Patch) -> None:
    def further(self: Serving, request: Request) -> None:
        request.device_tokens = request.anchor_tokens + PAGE

    scene = Scene()
    after_lease(put, scene, further)
    scene.begin(PROMPT)


@breaks("M3", "window")
def a_device_anchor_where_data_is_on_host(put: Patch) -> None:
    scene = Scene(host_tokens=64)
    scene.on_host_only(PROMPT)
    resolve = matching.resolve

    def hopeful(*given: Any) -> Any:
        found = resolve(*given)
        return found._replace(device_anchor=found.anchor)

    put.setattr(matching, "resolve", hopeful)
    scene.begin(LONGER)


@breaks("M1", "window")
def a_match_across_a_gap(put: Patch) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    scene.cached(LONGER)
    scene.cache.evict("window", scene.component("window").device.capacity)
    put.setattr(matching, "_first_gap", lambda *given, **named: None)
    scene.begin(LONGER[:37])


@breaks("M1")
def a_match_of_other_tokens(put: Patch) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    key = TokenKey([9] * 40)
    put.setattr(key, "trail_root", scene.cache.tree.root(None))
    put.setattr(key, "trail_end", scene.nodes[-1].end)
    put.setattr(key, "trail", scene.nodes[-1])
    scene.cache.begin(key)


@breaks("T11")
def a_namespace_in_the_tree_of_another(put: Patch) -> None:
    root = Tree.root
    scene = Scene()
    put.into(scene.cache.tree, root=lambda self, namespace: root(self, None))
    scene.cached(PROMPT)
    scene.cache.begin(TokenKey(LONGER, "tenant"))


@breaks("T11")
def a_key_of_two_running_requests(put: Patch) -> None:
    scene = Scene()
    put.into(scene.cache, expect_free=lambda self, key, call: None)
    key = TokenKey(PROMPT[:8])
    requests = [scene.cache.begin(key) for _ in range(2)]
    with suppress(LeaseError):
        for request in requests:
            scene.cache.admit(request)


@breaks("T11")
def tokens_of_a_step_behind_others(put: Patch) -> None:
    scene = Scene(plain=True)

    def anywhere(self: Stepper, batch: Batch, counts: object) -> None:
        batch.keys = [request.key.data for request in batch.requests]

    put.into(scene.cache.stepper, _expect_at_end=anywhere)
    request = scene.computed(PROMPT[:8], reserve=8)
    request.key.extend([1])
    with suppress(LeaseError):
        scene.cache.step([request], [1])


@breaks("L3", "window")
def a_window_that_is_not_pinned(put: Patch) -> None:
    pin = pinning._pin_span

    def forgetful(tree: Tree, component: TreeComponent, *given: Any) -> int:
        return pin(tree, component, *given) if component.is_prefix_closed else 0

    scene = Scene()
    scene.cached(PROMPT)
    put.setattr(pinning, "_pin_span", forgetful)
    scene.begin(LONGER)


@breaks("H4", "hisparse")
def a_running_request_whose_host_slots_are_not_pinned(put: Patch) -> None:
    scene = Scene(home=True, host_tokens=64)
    scene.cached(PROMPT)
    put.setattr(pinning, "pin_host", lambda *given: None)
    scene.begin(LONGER)


@breaks("M7", "window")
def a_lease_that_loses_data(put: Patch) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    scene.cached(LONGER)
    scene.begin([*PROMPT, 77])
    lift = eviction.lift_recency

    def careless(tree: Tree, node: Any, parent: Any) -> None:
        lift(tree, node, parent)
        if parent.end == len(PROMPT) // PAGE:
            parent.cells[scene.component("window").index].device = None

    put.setattr(eviction, "lift_recency", careless)
    scene.cache.evict("base", 2)


@breaks("M7", "window")
def a_lease_on_host_data_that_nobody_pins(put: Patch) -> None:
    scene = Scene(host_tokens=64)
    scene.on_host_only(PROMPT)
    put.setattr(pinning, "pin_host", lambda *given: None)
    scene.begin(LONGER)


# -- admission


@breaks("A6")
def a_chunk_cut_inside_a_page(put: Patch) -> None:
    decide = Budget.decide

    def cut(self: Budget, request: Request) -> Decision:
        request.chunk = 3
        return decide(self, request)

    scene = Scene()
    put.into(scene.cache.budget, decide=cut)
    scene.admitted(PROMPT)


@breaks("A6")
def a_chunk_larger_than_asked_for(put: Patch) -> None:
    chunk = Budget.next_chunk
    scene = Scene()
    put.into(
        scene.cache.budget, next_chunk=lambda self, request, limit: chunk(self, request, limit) + 4
    )
    scene.cache.next_chunk(scene.admitted(PROMPT), 8)


def change_demand(put: Patch, change: Any) -> None:
    put.setattr(
        promises,
        "default_demand",
        lambda component, query: change(default_demand(component, query), component, query),
    )


@breaks("A10", "state")
def a_state_that_is_not_budgeted(put: Patch) -> None:
    def forgetful(demand: Demand, component: TreeComponent, query: Any) -> Demand:
        return demand._replace(now=demand.now - 1) if component.is_state else demand

    change_demand(put, forgetful)
    Scene(state=True).admitted(PROMPT)


@breaks("A10", "state")
def a_state_that_is_not_set_up(put: Patch) -> None:
    scene = Scene(state=True)
    put.into(scene.cache.states, set_up_states=lambda self, request: None)
    scene.cache.allocate(scene.admitted(PROMPT), 4)


@breaks("A3", "base")
def a_load_back_that_is_not_budgeted(put: Patch) -> None:
    change_demand(put, lambda demand, component, query: demand._replace(now=1))
    scene = Scene(host_tokens=64)
    scene.on_host_only(PROMPT)
    scene.cache.admit(scene.begin(LONGER))


@breaks("A4", "window")
def a_window_budgeted_as_the_whole_prompt(put: Patch) -> None:
    change_demand(put, lambda demand, component, query: demand._replace(later=14))
    scene = Scene(plain=True)
    scene.cache.admit(scene.begin(range(4), chunk=4))


@breaks("A1", "base")
def a_promise_below_the_demand(put: Patch) -> None:
    opened = Account.open
    put.setattr(Account, "open", lambda self, peak, *rest: opened(self, peak - 1, *rest))
    Scene().admitted(PROMPT)


@breaks("A1", "base")
def a_page_more_than_needed(put: Patch) -> None:
    allocate = PageSlots.allocate_pages
    scene = Scene()
    put.into(
        scene.cache.pages,
        allocate_pages=lambda self, request, pages: allocate(self, request, pages + 1),
    )
    scene.cache.allocate(scene.admitted(PROMPT), 4)


@breaks("A9", "base")
def a_rejection_that_leaves_a_trace(put: Patch) -> None:
    decide = Budget.decide

    def forgetful(self: Budget, request: Request) -> Decision:
        decision = decide(self, request)
        if not decision.admitted:
            self.tree.components[0].devices[0].promised += 1
        return decision

    scene = Scene()
    put.into(scene.cache.budget, decide=forgetful)
    scene.admitted(range(40))
    assert not scene.cache.admit(scene.begin(range(200, 240))).admitted


@breaks("A8")
def a_rejection_without_a_reason(put: Patch) -> None:
    decide = Budget.decide

    def silent(self: Budget, request: Request) -> Decision:
        decide(self, request)
        return Decision(Outcome.DEFERRED, ())

    scene = Scene()
    put.into(scene.cache.budget, decide=silent)
    scene.cache.admit(scene.begin(PROMPT))


@breaks("A8", "base")
def a_request_said_to_fit_never_that_fits_an_empty_cache(put: Patch) -> None:
    scene = Scene()
    scene.admitted(range(40))
    put.into(scene.cache.budget, _nevers=lambda self, request, shortages: shortages)
    scene.cache.admit(scene.begin(range(200, 240)))


# -- load-back


@breaks("R1", "base")
def a_load_back_that_forgets_a_node(put: Patch) -> None:
    plan = operations.load_plan
    scene = Scene(host_tokens=64)
    scene.on_host_only(PROMPT)
    request = scene.admitted(LONGER)
    put.setattr(operations, "load_plan", lambda *given: [nodes[1:] for nodes in plan(*given)])
    scene.cache.load_back(request)


@breaks("M4", "base")
def a_load_back_larger_than_the_match_said(put: Patch) -> None:
    scene = Scene(host_tokens=64)
    scene.on_host_only(PROMPT)

    def fewer(self: Serving, request: Request) -> None:
        for part in request.components:
            part.host_slots = max(0, part.host_slots - 1)

    after_lease(put, scene, fewer)
    scene.cache.load_back(scene.admitted(LONGER))


@breaks("R5", "base")
def a_load_back_that_delivers_nothing_and_does_not_say_so(put: Patch) -> None:
    scene = Scene(host_tokens=64)
    scene.on_host_only(PROMPT)
    request = scene.admitted(LONGER)
    scene.cache.load_back(request)

    def silent(tree: Tree, operation: Any) -> bool:
        operations.abort(tree, operation)
        return True

    put.setattr(operations, "commit", silent)
    scene.settle()
    scene.cache.allocate(request, 4)


@breaks("R2", "base")
def a_load_back_that_fails_and_leaves_a_trace(put: Patch) -> None:
    submit = Journal.submit

    def broken(self: Journal, operation: Any, direction: Direction, fence: Any = None) -> Any:
        if direction is Direction.LOAD_BACK:
            raise TransferError("the engine is gone")
        return submit(self, operation, direction, fence)

    scene = Scene(host_tokens=64)
    put.into(scene.cache.journal, submit=broken)
    scene.on_host_only(PROMPT)
    scene.cache.load_back(scene.admitted(LONGER))


@breaks("A7", "base")
def a_load_back_that_finds_no_room(put: Patch) -> None:
    scene = Scene(host_tokens=128, policy=WritePolicy.WRITE_BACK)
    scene.on_host_only(PROMPT)
    scene.cached(range(200, 232))
    scene.cached(range(300, 332))
    request = scene.admitted(LONGER)
    put.into(scene.cache.evictor, _demote=lambda self, component, n_slots: None)
    scene.cache.load_back(request)


# -- computing


@breaks("A7", "base")
def an_admitted_chunk_that_does_not_fit(put: Patch) -> None:
    scene = Scene()
    put.into(scene.cache.budget, fitting_chunk=lambda self, request, tokens: 0)
    request = scene.admitted(PROMPT, chunk=4)
    assert scene.cache.allocate(request, 4)
    scene.cache.computed(request, 4)
    scene.cache.next_chunk(request)


@breaks("A7", "base")
def an_admitted_allocation_that_is_refused(put: Patch) -> None:
    scene = Scene()
    put.into(scene.cache.pages, allocate_pages=lambda self, request, pages: False)
    scene.cache.allocate(scene.admitted(PROMPT), 8)


@breaks("A7", "base")
def an_allocation_refused_that_was_just_offered(put: Patch) -> None:
    scene = Scene()
    put.into(scene.cache.pages, allocate_pages=lambda self, request, pages: False)
    request = scene.admitted(PROMPT, chunk=4)
    n_tokens = scene.cache.next_chunk(request, 16)
    assert n_tokens == 16
    scene.cache.allocate(request, n_tokens)


@breaks("A5", "base")
def a_refused_allocation_that_evicts(put: Patch) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    request = scene.computed([7, *PROMPT[:11]])
    other = scene.admitted(range(300, 308))

    def greedy(self: PageSlots, request: Request, pages: int) -> bool:
        self.evictor.ensure_free(self.tree.components[0], Tier.DEVICE, pages, None)
        return False

    put.into(scene.cache.pages, allocate_pages=greedy)
    scene.cache.allocate(request, 36)
    del other


@breaks("A5")
def asking_for_a_chunk_that_evicts(put: Patch) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    request = scene.admitted([7, 7, 7, 7, 7])
    chunk = Budget.next_chunk

    def greedy(self: Budget, request: Request, limit: int | None) -> int:
        eviction.evict_device(self.tree, self.tree.components[0], 1)
        return chunk(self, request, limit)

    put.into(scene.cache.budget, next_chunk=greedy)
    scene.cache.next_chunk(request)


@breaks("A12", "base")
def a_promise_renewed_beyond_the_headroom(put: Patch) -> None:
    part = Account.release

    def generous(self: Account, n_slots: int) -> None:
        part(self, n_slots)
        self.promised += 100
        self.ledger.promised += 100

    scene = Scene()
    request = scene.computed(PROMPT)
    put.setattr(Account, "release", generous)
    scene.cache.checkpoint(request)


@breaks("M8", "state")
def a_state_shared_instead_of_copied(put: Patch) -> None:
    set_up = StateSlots.set_up_states

    def share(self: StateSlots, request: Request) -> None:
        for part in request.state_components:
            source = request.receipt.anchor.cells[part.component.index].device
            if source is not None:
                part.live = source
        set_up(self, request)

    scene = Scene(state=True)
    scene.cached(PROMPT)
    put.into(scene.cache.states, set_up_states=share)
    scene.cache.allocate(scene.admitted(LONGER), 4)


# -- the end


@breaks("I6")
def a_checkpoint_that_shares_nothing(put: Patch) -> None:
    scene = Scene()
    put.into(scene.cache.publisher, share=lambda *given: None)
    scene.cache.checkpoint(scene.computed(PROMPT))


@breaks("N1", "base")
def a_publication_that_was_to_keep_slots_and_swaps_them(put: Patch) -> None:
    share = Publisher.share
    scene = Scene()
    first, second = scene.computed(PROMPT[:12]), scene.computed(PROMPT[:12])
    scene.cache.checkpoint(first)
    put.into(
        scene.cache.publisher,
        share=lambda self, request, page, locks, retained: share(self, request, page, locks),
    )
    scene.cache.checkpoint(second, keep_slots=True)


@breaks("N2", "base")
def slots_that_are_adopted_in_another_order(put: Patch) -> None:
    offered = EngineSlots._offered
    scene = Scene()
    put.into(scene.cache.engine_slots, _offered=lambda self, *what: offered(self, *what)[::-1])
    adopt(scene)


@breaks("N2", "base")
def adopted_slots_that_the_engine_keeps(put: Patch) -> None:
    scene = Scene()
    put.into(scene.cache.engine_slots, _release=lambda self, component, slots: None)
    adopt(scene)


@breaks("N2", "base")
def a_slot_that_is_taken_and_not_handed_out(put: Patch) -> None:
    scene, take = Scene(), cast("Callable[..., Any]", EngineSlots.take)
    put.into(scene.cache.engine_slots, take=lambda self, name, n: take(self, name, n)[1:])
    scene.cache.engine_slots.take("base", 3)


def adopt(scene: Scene) -> None:
    """A request adopts two pages."""
    slots, request = scene.cache.engine_slots, scene.begin(PROMPT)
    slots.admit(request)
    given = {each.name: slots.take(each.name, 2) for each in scene.cache.mounted}
    slots.adopt(request, 2, given)


@breaks("N2", "window")
def pages_before_a_window_that_keep_slots_without_data(put: Patch) -> None:
    scene = Scene()
    put.into(scene.cache.pages, give_back_behind=lambda self, request, page: None)
    scene.cache.engine_slots.allocate_at(scene.admitted(range(40)), 32)


@breaks("N2", "window")
def pages_in_a_window_without_slots(put: Patch) -> None:
    behind, scene = PageSlots.give_back_behind, Scene()
    put.into(
        scene.cache.pages,
        give_back_behind=lambda self, request, page: behind(self, request, page + 2),
    )
    scene.cache.engine_slots.allocate_at(scene.admitted(range(40)), 32)


@breaks("I6")
def more_cached_than_computed(put: Patch) -> None:
    finish = Cache.finish
    scene = Scene()
    put.into(scene.cache, finish=lambda self, request, *more: finish(self, request, *more) + 40)
    scene.cached(PROMPT)


@breaks("H8", "base")
def promises_kept_after_the_end(put: Patch) -> None:
    scene = Scene()
    put.into(scene.cache.budget, close=lambda self, parts: None)
    scene.cache.abort(scene.admitted(PROMPT))


@breaks("H8", "hisparse")
def private_slots_kept_while_others_run(put: Patch) -> None:
    scene = Scene(home=True, host_tokens=64)
    scene.admitted(PROMPT[:8])
    request = scene.admitted(range(100, 108))

    def forgetful(self: Budget, parts: Sequence[RequestComponent]) -> None:
        for part in parts:
            part.private = ()
        close(self, parts)

    close = Budget.close
    put.into(scene.cache.budget, close=forgetful)
    scene.cache.abort(request)


@breaks("L1", "base")
def pins_kept_after_the_end(put: Patch) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    request = scene.begin(LONGER)
    put.setattr(pinning, "release", lambda tree, receipt: receipt.locks and receipt.locks.close())
    scene.cache.abort(request)


@breaks("I8", "base")
def a_match_that_fails_and_leaves_its_pins(put: Patch) -> None:
    scene = Scene()
    scene.cached(PROMPT)

    def fail(self: Serving, request: Request) -> None:
        raise ZeroDivisionError

    after_lease(put, scene, fail)
    scene.begin(LONGER)


@breaks("M1", "window")
def a_match_that_a_component_wanted_shorter(put: Patch) -> None:
    def as_it_is(self: Leases, found: Match, limit: int) -> Match:
        return found

    scene = Scene()
    scene.cached(PROMPT)
    scene.window.answers["finalize_match_result"] = lambda view: ComponentMatch(view.anchor // 2)
    put.into(scene.cache.leases, _shorten=as_it_is)
    scene.begin(LONGER)
    scene.close()


@breaks("B4")
def a_copy_that_does_not_wait_for_the_point_named_with_its_data(put: Patch) -> None:
    scene = Scene(plain=True, host_tokens=64)
    request = scene.computed(PROMPT)
    put.setattr(Journal, "set_fence", lambda self, fence: None)
    scene.cache.checkpoint(request, Event())
