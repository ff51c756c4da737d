"""A core that puts requests off for pages that another does not compute (A8, M1, T11, A9, I10)."""

from __future__ import annotations

from typing import Any

from kvgraft import Decision, Request, TokenKey
from kvgraft.admission.decision import Waiting
from kvgraft.requests.request import Pending
from kvgraft.serving import Serving
from kvgraft_scheduling.pending import PendingPages

from .defect import breaks
from .scene import PAGE, PROMPT, Patch, Scene

__all__: list[str] = []

SHORT = PROMPT[: 4 * PAGE]
"""Two requests of it fit."""


def changed(put: Patch, scene: Scene, change: Any) -> None:
    """Change what is found pending, unless nothing is."""
    find = PendingPages.find

    def other(self: PendingPages, request: Request) -> Pending | None:
        found = find(self, request)
        return None if found is None else found._replace(**change(found, request))

    put.into(scene.cache.pending, find=other)


def waits(scene: Scene, namespace: object = None, times: int = 1) -> tuple[Request, Request]:
    """One request computes, another of the same prompt asks a few times."""
    first = scene.cache.begin(TokenKey(SHORT), chunk=2 * PAGE)
    assert scene.cache.admit(first).admitted
    second = scene.cache.begin(TokenKey([*SHORT, 1], namespace), max_deferrals=3)
    for _ in range(times):
        assert not scene.cache.admit(second).shortages
    return first, second


@breaks("A8")
def a_wait_that_is_not_counted(put: Patch) -> None:
    deferred = Serving._defer

    def for_ever(self: Serving, request: Request) -> Decision | None:
        decision = deferred(self, request)
        request.deferrals_left += decision is not None
        return decision

    scene = Scene(plain=True)
    put.into(scene.cache, _defer=for_ever)
    waits(scene)


@breaks("A8")
def a_wait_for_a_request_that_has_ended(put: Patch) -> None:
    def late(self: PendingPages, request: Request) -> Pending | None:
        return Pending(2 * PAGE, 0, ended)

    scene = Scene(plain=True)
    ended = scene.cache.begin(TokenKey(SHORT))
    scene.cache.abort(ended)
    put.into(scene.cache.pending, find=late)
    waits(scene)


@breaks("A8")
def a_wait_for_a_request_that_waits_itself(put: Patch) -> None:
    def each_other(self: PendingPages, request: Request) -> Pending | None:
        return None if request is second else Pending(2 * PAGE, 0, second)

    scene = Scene(plain=True)
    _, second = waits(scene, times=0)
    third = scene.cache.begin(TokenKey([*SHORT, 1]), max_deferrals=3)
    put.into(scene.cache.pending, find=each_other)
    scene.cache.admit(third)


@breaks("T11")
def a_wait_for_another_namespaces_request(put: Patch) -> None:
    def anybody(self: PendingPages, request: Request) -> Pending | None:
        first = next(iter(self.requests.values()))
        return None if request is first else Pending(2 * PAGE, 0, first)

    scene = Scene(plain=True)
    put.into(scene.cache.pending, find=anybody)
    waits(scene, "tenant")


@breaks("M1")
def a_wait_for_more_than_is_shared(put: Patch) -> None:
    scene = Scene(plain=True)
    changed(put, scene, lambda found, request: {"tokens": found.tokens + PAGE})
    waits(scene)


@breaks("M1")
def a_request_that_was_deferred_and_keeps_its_match(put: Patch) -> None:
    deferred = Serving._defer

    def forgetful(self: Serving, request: Request) -> Decision | None:
        decision = deferred(self, request)
        request.deferred = False
        return decision

    scene = Scene(plain=True)
    put.into(scene.cache, _defer=forgetful)
    waits(scene, times=2)


@breaks("I10")
def a_wait_for_a_boundary_without_a_point(put: Patch) -> None:
    scene = Scene(plain=True)
    changed(put, scene, lambda found, request: {"tokens": PAGE})
    waits(scene)


@breaks("A9")
def a_wait_that_takes_points_of_the_other(put: Patch) -> None:
    ask = PendingPages.ask_for_point

    def greedy(self: PendingPages, request: Request) -> None:
        ask(self, request)
        first = next(iter(self.requests.values()))
        first.points.update(dict.fromkeys(range(1, 4), next(iter(first.points.values()))))

    scene = Scene(plain=True)
    put.into(scene.cache.pending, ask_for_point=greedy)
    waits(scene)


@breaks("A8")
def a_wait_for_others_than_those_that_hold_the_room(put: Patch) -> None:
    waits_for = Serving._waits_for

    def one_more(self: Serving) -> Waiting:
        waiting = waits_for(self)
        return waiting._replace(running=waiting.running + 1)

    scene = Scene(plain=True)
    scene.admitted(PROMPT)
    put.into(scene.cache, _waits_for=one_more)
    assert scene.cache.admit(scene.begin(range(100, 140))).shortages
