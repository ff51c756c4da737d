"""A core whose steps of all running requests go wrong, or what an engine reads after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvgraft import cache
from kvgraft.requests.components import Account, RequestState
from kvgraft.requests.request import Request
from kvgraft.requests.slots import StateSlots
from kvgraft.requests.tables import slot_table
from kvgraft.tree.component import TreeComponent
from kvgraft_scheduling.rows import Rows
from kvgraft_scheduling.stepping import Batch, Stepper

from .defect import breaks
from .scene import PAGE, Patch, Scene

__all__: list[str] = []


def decoding(scene: Scene, n_requests: int = 2) -> list[Request]:
    """Requests that have taken two steps, of which the first reads their rows."""
    requests = [
        scene.computed(range(100 * number, 100 * number + PAGE + 1), reserve=4 * PAGE)
        for number in range(1, n_requests + 1)
    ]
    steps(scene, requests, 2)
    return requests


def steps(scene: Scene, requests: Sequence[Request], n: int) -> None:
    for _ in range(n):
        assert scene.cache.step(requests).requests == requests


@breaks("T9")
def tokens_of_a_step_that_are_written_elsewhere(put: Patch) -> None:
    mapping = Stepper._slot_mapping

    def shifted(self: Stepper, *given: Any) -> dict[str, torch.Tensor]:
        return {name: each + 1 for name, each in mapping(self, *given).items()}

    scene = Scene(plain=True)
    requests = decoding(scene)
    put.into(scene.cache.stepper, _slot_mapping=shifted)
    steps(scene, requests, 3)


@breaks("T9")
def a_step_that_does_not_tell_of_new_entries(put: Patch) -> None:
    write = Rows.write

    def silent(self: Rows, component: TreeComponent, first: Any, n: Any, slots: Any) -> None:
        write(self, component, first, n, slots)
        self._changed[component.index].pop()

    scene = Scene(plain=True)
    requests = decoding(scene)
    put.setattr(Rows, "write", silent)
    steps(scene, requests, 3 * PAGE)


@breaks("T9")
def tokens_of_a_step_that_are_counted_twice(put: Patch) -> None:
    note = Stepper.note

    def twice(self: Stepper, batch: Batch) -> None:
        note(self, batch)
        for request in batch.requests:
            request.computed += 1

    scene = Scene(plain=True)
    requests = decoding(scene)
    put.into(scene.cache.stepper, note=twice)
    steps(scene, requests, 3)


@breaks("I7", "state")
def a_state_at_the_end_of_a_page_that_a_step_forgets(put: Patch) -> None:
    def nothing(self: Stepper, batch: Batch, fast: Any) -> None:
        pass

    scene = Scene(plain=True, state=True)
    requests = decoding(scene)
    put.into(scene.cache.stepper, _keep_states=nothing)
    steps(scene, requests, 3 * PAGE)


@breaks("I7", "state")
def a_state_that_a_step_copies_for_another_request(put: Patch) -> None:
    keep = Stepper._keep_states

    def crossed(self: Stepper, batch: Batch, fast: Any) -> None:
        (state,) = (component.index for component in self.rows.state_components)
        live = self.rows.states[state].copy()
        self.rows.states[state][batch.rows] = np.roll(live[batch.rows], 1)
        keep(self, batch, fast)
        self.rows.states[state][:] = live

    scene = Scene(plain=True, state=True)
    requests = decoding(scene)
    for request, number in zip(requests, (1, 2)):
        (part,) = request.state_components
        assert part.live is not None
        for lanes in scene.mounted("state").component.device.lanes:
            lanes[int.from_bytes(part.live, "little")] = number
    put.into(scene.cache.stepper, _keep_states=crossed)
    steps(scene, requests, 3 * PAGE)


@breaks("G1")
def a_demand_without_drafts(put: Patch) -> None:
    scene = Scene(plain=True, max_drafts=PAGE)
    put.setattr(scene.cache.points, "draft_pages", 0)
    decoding(scene, 1)


@breaks("G4")
def a_pass_with_drafts_that_goes_beyond_a_state(put: Patch) -> None:
    def all_of_them(self: Stepper, batch: Batch) -> Any:
        return np.full(len(batch.rows), batch.n_tokens, np.int64)

    scene = Scene(plain=True, state=True, max_drafts=PAGE)
    requests = decoding(scene, 1)
    put.into(scene.cache.stepper, _up_to_states=all_of_them)
    right = [1]
    for _ in range(4):
        step = scene.cache.step(requests, n_drafts=PAGE, n_computed=right)
        assert step.requests == requests
        assert step.n_tokens is not None
        right = step.n_tokens.tolist()


@breaks("A1", "base")
def slots_of_a_step_that_stay_promised(put: Patch) -> None:
    def kept(self: Stepper, requests: list[Request], *where: Any) -> None:
        take(self, requests, *where)
        requests[0].components[0].account.promised += 1

    take = Stepper._take_slots
    scene = Scene(plain=True)
    requests = decoding(scene)
    put.into(scene.cache.stepper, _take_slots=kept)
    steps(scene, requests, 3 * PAGE)


@breaks("A7")
def a_step_that_takes_slots_where_none_is_free(put: Patch) -> None:
    def always(self: Stepper, n_pages: int) -> bool:
        return True

    scene = Scene(plain=True)
    for number in range(10, 20):
        scene.cached(range(100 * number, 100 * number + 2 * PAGE))
    requests = decoding(scene)
    assert scene.component("base").device.free < 2
    put.into(scene.cache.stepper, _has_room=always)
    steps(scene, requests, 3 * PAGE)


@breaks("T9", "base")
def a_table_that_names_other_slots(put: Patch) -> None:
    def shifted(*given: Any) -> Any:
        return slot_table(*given) + 1

    scene = Scene(plain=True)
    request = scene.computed(range(9))
    put.setattr(cache, "slot_table", shifted)
    scene.cache.table(request, "base")


@breaks("I12", "state")
def a_state_that_was_passed_and_stays_promised(put: Patch) -> None:
    def nothing(self: Account, n: int) -> None:
        pass

    scene = Scene(plain=True, state=True)
    request = scene.admitted(range(4 * PAGE + 1), resume_at=2 * PAGE)
    put.setattr(Account, "forgo", nothing)
    assert scene.cache.allocate(request, 3 * PAGE)
    for n_tokens in (2 * PAGE, PAGE):
        scene.cache.computed(request, n_tokens)
    scene.cache.abort(request)


@breaks("I7", "state")
def a_state_inside_a_page_that_is_left_as_that_of_its_end(put: Patch) -> None:
    offer = StateSlots.offer_states

    def whatever(self: StateSlots, request: Request, part: RequestState) -> None:
        if part.live is not None and part.tracked is None:
            self._offer(part, request.computed // PAGE, part.live)
            part.live = None
        offer(self, request, part)

    scene = Scene(plain=True, state=True)
    request = scene.computed(range(3 * PAGE + 2))
    put.into(scene.cache.states, offer_states=whatever)
    scene.cache.finish(request)


@breaks("T9")
def a_pass_that_may_have_computed_more_than_it_had_slots_for(put: Patch) -> None:
    end = Stepper.end

    def more(self: Stepper, batch: Batch, given: list[int], refused: list[int]) -> Any:
        step = end(self, batch, given, refused)
        self.rows.given[batch.rows] += 1
        return step

    scene = Scene(plain=True)
    put.setattr(Stepper, "end", more)
    decoding(scene)


@breaks("T9")
def tokens_behind_the_first_of_two_cuts_that_count(put: Patch) -> None:
    def latest(self: Request, end: int) -> None:
        self.cuts[self.row] = end

    scene = Scene(plain=True)
    requests = decoding(scene)
    put.setattr(Request, "was_cut", latest)
    for _ in range(3):  # the guard looks at one of three requests in each step
        ends = [request.computed for request in requests]
        scene.cache.step(requests, n_tokens=3, n_computed=0)
        for request, end in zip(requests, ends):
            request.key.extend([1] * (end + 3 - request.key.n_tokens))
            request.key.truncate(end + 1)
            request.key.extend([7, 7])
            request.key.truncate(end + 2)
        scene.cache.step(requests, n_tokens=0)
