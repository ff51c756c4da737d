"""A core that passes the books and is found by a second opinion."""

from __future__ import annotations

from kvgraft import LoadModel, TokenKey, WritePolicy
from kvgraft.admission.waiting import WaitingQueue
from kvgraft.leasing import Leasing
from kvgraft.mirroring import Mirroring
from kvgraft.private import PrivateSlots
from kvgraft.request import Request
from kvgraft.slots import SLOT_BYTES
from kvgraft.tree import explaining, inserting, operations
from kvgraft.tree.node import Node
from kvgraft.tree.track import Track
from kvgraft.tree.tree import Tree
from kvgraft.types import Tier

from .defect import breaks
from .request_defects import after_lease
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
    def alone(self: Leasing, request: Request) -> None:
        request.waits = []

    scene = Scene(host_tokens=64)
    scene.on_host_only(PROMPT)
    scene.cache.load_back(scene.admitted(LONGER))
    after_lease(put, alone)
    scene.begin([*PROMPT, *OTHER])


@breaks("R8")
def a_load_that_is_skipped_although_it_is_faster(put: Patch) -> None:
    weigh = Leasing._recompute
    scene = Scene(host_tokens=64, load=LoadModel())
    scene.on_host_only(PROMPT)
    put.setattr(Leasing, "_recompute", lambda self, found: not weigh(self, found))
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

    def mixed(tree: Tree, node: Node, track: Track, run: inserting.Run) -> None:
        turned = run.device[SLOT_BYTES:] + run.device[:SLOT_BYTES]
        take(tree, node, track, run._replace(device=turned))

    put.setattr(inserting, "_take", mixed)
    Scene().cached(PROMPT)


@breaks("I3", "window")
def a_window_that_keeps_what_it_left_behind(put: Patch) -> None:
    put.setattr(PrivateSlots, "give_back_behind", lambda self, request, page: None)
    Scene().computed(PROMPT)


@breaks("I4", "base")
def a_match_that_moves_what_another_reads(put: Patch) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    reader = scene.computed(LONGER)

    def move(self: Leasing, request: Request) -> None:
        cell = reader.receipt.anchor.cells[0]
        assert cell.device is not None
        cell.device = cell.device[SLOT_BYTES:] + cell.device[:SLOT_BYTES]

    after_lease(put, move)
    scene.begin(OTHER)


@breaks("I7")
def an_end_that_donates_no_state(put: Patch) -> None:
    put.setattr(PrivateSlots, "offer_states", lambda self, request, track: None)
    Scene(state=True).cached(PROMPT)


@breaks("L6", "window")
def a_window_that_gives_back_a_page_too_many(put: Patch) -> None:
    give = PrivateSlots.give_back_behind
    put.setattr(
        PrivateSlots,
        "give_back_behind",
        lambda self, request, page: give(self, request, page + 1),
    )
    Scene().computed(PROMPT)


@breaks("E4", "window")
def a_demotion_that_leaves_a_window_behind(put: Patch) -> None:
    needs = operations.needs_backup
    put.setattr(
        operations,
        "needs_backup",
        lambda tree, node: [track for track in needs(tree, node) if track.name != "window"],
    )
    scene = Scene(plain=True, host_tokens=64, policy=WritePolicy.WRITE_BACK)
    scene.cached(PROMPT)
    scene.cache.evict("base", 16)


@breaks("B6", "base")
def an_insert_that_is_not_written_through(put: Patch) -> None:
    put.setattr(Mirroring, "inserted", lambda self, nodes, fence: None)
    Scene(host_tokens=64).cached(PROMPT)


@breaks("B7", "window")
def a_revived_window_that_is_not_backed_up(put: Patch) -> None:
    scene = Scene(plain=True, host_tokens=64)
    scene.cached(PROMPT)
    scene.cached(LONGER)
    for tier in (Tier.DEVICE, Tier.HOST):
        scene.cache.evict("window", 1, tier)
    put.setattr(Mirroring, "inserted", lambda self, nodes, fence: None)
    scene.cached(PROMPT)
