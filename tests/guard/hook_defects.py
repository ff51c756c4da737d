"""Components that break the contract, and a core that calls their hooks wrongly."""

from __future__ import annotations

from typing import Any

from kvgraft import ComponentMatch, Demand, DemandQuery, Span
from kvgraft.requests.leases import Leases
from kvgraft.transfers import PlaneCopy, journal
from kvgraft.tree import pinning
from kvgraft.tree.pinning import Receipt
from kvgraft.tree.tree import Tree
from kvgraft.types import TransferQuery

from .defect import breaks
from .scene import LONGER, PROMPT, Patch, Scene

__all__: list[str] = []


def take_a_slot(scene: Scene) -> None:
    scene.mounted("window").component.device.allocator.allocate(1)


# -- match


@breaks("M6", "window")
def a_match_that_takes_a_slot(put: Patch) -> None:
    scene = Scene()
    put.setitem(scene.window.answers, "finalize_match_result", lambda view: take_a_slot(scene))
    scene.begin(PROMPT)


@breaks("M5", "window")
def a_match_made_longer(put: Patch) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    put.setitem(
        scene.window.answers,
        "finalize_match_result",
        lambda view: ComponentMatch(view.anchor + 1),
    )
    scene.begin(LONGER)


@breaks("M5", "window")
def a_match_limited_below_nothing(put: Patch) -> None:
    scene = Scene()
    put.setitem(scene.window.answers, "finalize_match_result", lambda view: ComponentMatch(-1))
    scene.begin(PROMPT)


@breaks("M5", "window")
def a_checkpoint_between_pages(put: Patch) -> None:
    scene = Scene()
    put.setitem(
        scene.window.answers,
        "finalize_match_result",
        lambda view: ComponentMatch(view.anchor, (1.5,)),  # type: ignore[arg-type]
    )
    scene.begin(PROMPT)


@breaks("M5", "window")
def a_state_captured_behind_the_prompt(put: Patch) -> None:
    scene = Scene()
    put.setitem(
        scene.window.answers,
        "finalize_match_result",
        lambda view: ComponentMatch(view.anchor, (view.limit + 7,)),
    )
    scene.begin(PROMPT)


@breaks("M5", "window")
def a_state_captured_where_the_request_resumes(put: Patch) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    put.setitem(
        scene.window.answers,
        "finalize_match_result",
        lambda view: ComponentMatch(view.anchor, (view.anchor,)),
    )
    scene.begin(LONGER)


# -- pins


@breaks("L7", "window")
def a_window_that_pins_everything(put: Patch) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    put.setitem(
        scene.window.answers, "acquire_component_lock", lambda query: [Span(0, query.boundary)]
    )
    scene.begin(LONGER)


@breaks("L1", "window")
def a_segment_changed_after_it_was_acquired(put: Patch) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    request = scene.begin(LONGER)
    put.setitem(
        scene.window.answers,
        "budget_contribution",
        lambda query: scene.window.segments[-1].append(Span(0, 0)),  # type: ignore[attr-defined]
    )
    scene.cache.admit(request)
    scene.cache.abort(request)


@breaks("L2", "base")
def a_segment_released_twice(put: Patch) -> None:
    lock = Leases.lock

    def twice(self: Leases, boundary: int) -> Any:
        locks = lock(self, boundary)
        if locks is not None:
            for component, hooks in self.lockers:
                segment = list(locks.segments[component.index])
                locks.undo.callback(hooks.release, segment)
        return locks

    scene = Scene()
    put.into(scene.cache.leases, lock=twice)
    scene.cache.abort(scene.begin(PROMPT))


@breaks("L1", "base")
def segments_never_released(put: Patch) -> None:
    def release(tree: Tree, receipt: Receipt) -> None:
        receipt.locks = None
        plain(tree, receipt)

    plain = pinning.release
    put.setattr(pinning, "release", release)
    scene = Scene()
    scene.cached(PROMPT)
    scene.close()


# -- transfers


@breaks("B3", "window")
def a_backup_into_other_rows(put: Patch) -> None:
    scene = Scene(host_tokens=64)

    def shifted(query: TransferQuery) -> list[PlaneCopy]:
        return [copy._replace(target_rows=copy.target_rows.roll(1)) for copy in scene.copies(query)]

    put.setitem(scene.window.answers, "build_hicache_transfers", shifted)
    scene.cached(PROMPT[:-1])


@breaks("B3", "window")
def a_backup_the_wrong_way(put: Patch) -> None:
    scene = Scene(host_tokens=64)

    def reversed_copies(query: TransferQuery) -> list[PlaneCopy]:
        return [
            PlaneCopy(each.layer, each.target, each.source, each.target_rows, each.source_rows)
            for each in scene.copies(query)
        ]

    put.setitem(scene.window.answers, "build_hicache_transfers", reversed_copies)
    scene.cached(PROMPT)


@breaks("B3", "window")
def a_backup_of_every_row_twice(put: Patch) -> None:
    scene = Scene(host_tokens=64)
    put.setitem(
        scene.window.answers, "build_hicache_transfers", lambda query: scene.copies(query) * 2
    )
    scene.cached(PROMPT)


@breaks("B3", "window")
def a_backup_within_the_host_mirror(put: Patch) -> None:
    scene = Scene(host_tokens=64)

    def inside(query: TransferQuery) -> list[PlaneCopy]:
        return [copy._replace(source=copy.target) for copy in scene.copies(query)]

    put.setitem(scene.window.answers, "build_hicache_transfers", inside)
    scene.cached(PROMPT)


@breaks("B3", "window")
def a_backup_that_reads_more_than_it_writes(put: Patch) -> None:
    scene = Scene(host_tokens=64)

    def uneven(query: TransferQuery) -> list[PlaneCopy]:
        return [
            copy._replace(source_rows=copy.source_rows.repeat(2)) for copy in scene.copies(query)
        ]

    put.setitem(scene.window.answers, "build_hicache_transfers", uneven)
    scene.cached(PROMPT)


@breaks("B2", "window")
def a_backup_that_copies_nothing(put: Patch) -> None:
    scene = Scene(host_tokens=64)
    put.setitem(scene.window.answers, "build_hicache_transfers", lambda query: [])
    scene.cached(PROMPT)


def without_last(scene: Scene, query: TransferQuery) -> list[PlaneCopy]:
    return [
        copy._replace(source_rows=copy.source_rows[:-1], target_rows=copy.target_rows[:-1])
        for copy in scene.copies(query)
    ]


@breaks("B2", "window")
def a_backup_that_leaves_a_slot_out(put: Patch) -> None:
    scene = Scene(host_tokens=64)
    put.setitem(
        scene.window.answers, "build_hicache_transfers", lambda query: without_last(scene, query)
    )
    scene.cached(PROMPT)


@breaks("R5", "window")
def a_load_back_that_leaves_a_slot_out(put: Patch) -> None:
    scene = Scene(host_tokens=64)
    scene.on_host_only(PROMPT)
    put.setitem(
        scene.window.answers, "build_hicache_transfers", lambda query: without_last(scene, query)
    )
    scene.loaded(LONGER)


@breaks("R7", "window")
def a_load_back_that_names_another_layer(put: Patch) -> None:
    scene = Scene(host_tokens=64)
    scene.on_host_only(PROMPT)

    def misnamed(query: TransferQuery) -> list[PlaneCopy]:
        return [copy._replace(layer=copy.layer + 1) for copy in scene.copies(query)]

    put.setitem(scene.window.answers, "build_hicache_transfers", misnamed)
    scene.loaded(LONGER)


@breaks("R2", "base")
def a_transfer_both_committed_and_aborted(put: Patch) -> None:
    commit = journal._notify_committed

    def both(queries: Any) -> None:
        commit(queries)
        journal._notify_aborted(queries)

    put.setattr(journal, "_notify_committed", both)
    Scene(host_tokens=64).cached(PROMPT)


@breaks("R2", "base")
def transfers_that_no_component_hears_the_end_of(put: Patch) -> None:
    put.setattr(journal, "_notify_committed", lambda queries: None)
    scene = Scene(host_tokens=64)
    scene.cached(PROMPT)
    scene.close()


# -- admission


@breaks("A9", "window")
def a_budget_that_takes_a_slot(put: Patch) -> None:
    scene = Scene()
    put.setitem(scene.window.answers, "budget_contribution", lambda query: take_a_slot(scene))
    scene.admitted(PROMPT)


def pages(query: DemandQuery) -> int:
    return -(-query.total // query.page_size) + 1


@breaks("A3", "base")
def host_hits_budgeted_twice(put: Patch) -> None:
    scene = Scene(host_tokens=64)
    scene.on_host_only(PROMPT[:8])
    put.setitem(
        scene.base.answers,
        "budget_contribution",
        lambda query: Demand(pages(query) + 2 * query.host_slots, 0),
    )
    request = scene.begin(PROMPT[:12])
    assert request.needs_load_back
    scene.cache.admit(request)


@breaks("A3", "base")
def host_hits_not_budgeted(put: Patch) -> None:
    scene = Scene(host_tokens=64)
    scene.on_host_only(PROMPT[:8])
    put.setitem(scene.base.answers, "budget_contribution", lambda query: Demand(pages(query), 0))
    scene.cache.admit(scene.begin(PROMPT[:12]))


def counts_the_window_twice(query: DemandQuery) -> Demand:
    return Demand(pages(query) + query.host_slots, 20)


@breaks("A4", "window")
def a_window_budgeted_without_a_bound(put: Patch) -> None:
    scene = Scene()
    put.setitem(scene.window.answers, "budget_contribution", counts_the_window_twice)
    scene.cache.admit(scene.begin(PROMPT, chunk=4))
