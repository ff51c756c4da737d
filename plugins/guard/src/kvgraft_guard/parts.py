"""The guarded parts of a cache: each calls the plain part, with checks around the call.

The guard itself is made last; until then the parts act like the plain ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pluggy import PluginManager

from kvgraft.assembly import Given, Made, PartsFactory
from kvgraft.cache import Cache
from kvgraft.config import CacheConfig, GuardMode
from kvgraft.errors import ContractViolation
from kvgraft.optional import load_part
from kvgraft.packages.dispatch import Mounted
from kvgraft.packages.registry import Plugin
from kvgraft.parts import NoStorage, Recorder, Step
from kvgraft.requests.backup import CleanReserve
from kvgraft.requests.eviction import Evictor
from kvgraft.requests.request import Request
from kvgraft.requests.slots import StateSlots
from kvgraft.requests.tables import state_number
from kvgraft.transfers import Fence, Journal, Transfer
from kvgraft.tree.component import Cause, TreeComponent
from kvgraft.tree.keys import TOKEN_BYTES
from kvgraft.tree.node import Node
from kvgraft.tree.operations import Operation
from kvgraft.tree.tree import Tree
from kvgraft.types import Direction, Tier
from kvgraft_guard.adopting import GuardedEngineSlots
from kvgraft_guard.events import guarded_recorder
from kvgraft_guard.hooks import HookGuard
from kvgraft_guard.integrity import check_cache, check_row
from kvgraft_guard.managing import managed
from kvgraft_guard.operations import guarded_operations
from kvgraft_guard.splits import check_split, read_node
from kvgraft_guard.tiering import SteppedTier, guarded_tier
from kvgraft_guard.watching import Guard
from kvgraft_scheduling.stepping import Batch, Stepper
from kvgraft_storage.tier import StorageTier

__all__ = [
    "GuardedCleanReserve",
    "GuardedEvictor",
    "GuardedJournal",
    "GuardedPartsFactory",
    "GuardedStateSlots",
    "GuardedStepper",
    "GuardedTree",
]


class _Guarded:
    """A part that gets the guard once all parts are there."""

    guard: Guard | None = None


class GuardedTree(_Guarded, Tree):
    """A tree that reports data coming to its nodes, data leaving them, and splits to the guard."""

    def split(self, node: Node, at: int) -> Node:
        was = read_node(node)
        upper = super().split(node, at)
        check_split(self, was, upper, node, at)
        return upper

    def put(
        self,
        node: Node,
        component: TreeComponent,
        tier: Tier,
        slots: bytes,
        source: Tier | None = None,
        grown_from: int | None = None,
    ) -> None:
        super().put(node, component, tier, slots, source, grown_from)
        if self.guard is not None:
            self.guard.watched.contents.arrived(tier, component, slots)

    def detach(self, node: Node, component: TreeComponent, tier: Tier, cause: Cause) -> bytes:
        if self.guard is not None:
            if tier is Tier.DEVICE:
                self.guard.moves.leaves(node, component)
            else:
                self.guard.watched.rooms.drops(node)
        self._expect_cleared(node, component, cause)
        return super().detach(node, component, tier, cause)

    def sink(self, node: Node, tier: Tier, n_cells: int) -> None:
        if self.guard is not None and tier is Tier.DEVICE:
            self.guard.watched.rooms.sinks(node)
        super().sink(node, tier, n_cells)

    def _expect_cleared(self, node: Node, component: TreeComponent, cause: Cause) -> None:
        """Only data of a cleared namespace is cleared (E2)."""
        if cause == "cleared" and not self.is_cleared(node):
            raise ContractViolation(
                "E2", component.name, f"{node!r} is dropped as cleared, and its namespace is not"
            )

    def prune(self, node: Node) -> None:
        if self.guard is not None:
            self.guard.watched.rooms.removes(node)
        super().prune(node)


class GuardedJournal(_Guarded, Journal):
    """A journal whose transfers are compared with the tree's reservations for them."""

    def submit(
        self, operation: Operation, direction: Direction, fence: Fence | None = None
    ) -> Transfer:
        if self.guard is None:
            return super().submit(operation, direction, fence)
        return self.guard.moves.submit(super().submit, operation, direction, fence)

    def acknowledge(self, transfer: Transfer) -> None:
        if self.guard is None:
            super().acknowledge(transfer)
        else:
            self.guard.moves.end(super().acknowledge, transfer)
            self.guard.acknowledged()


class GuardedEvictor(_Guarded, Evictor):
    """An evictor that must not free more than the operation needs."""

    def evict_for(
        self, component: TreeComponent, tier: Tier, n_slots: int, tenant: int | None
    ) -> bool:
        if self.guard is None:
            return super().evict_for(component, tier, n_slots, tenant)
        rooms = self.guard.watched.rooms
        evict = rooms.evict_device if tier is Tier.DEVICE else rooms.evict_host
        return evict(super().evict_for, component, n_slots, tenant)


class GuardedCleanReserve(_Guarded, CleanReserve):
    """A clean reserve whose entries are checked when they are made."""

    def fill_pool(self, component: TreeComponent, n_slots: int) -> None:
        if self.guard is None or not self.guard.looking:
            super().fill_pool(component, n_slots)
        else:
            self.guard.reserve.fill_pool(super().fill_pool, component, n_slots)


class GuardedStateSlots(StateSlots):
    """New states hold conspicuous bytes, NaN for floats: an engine that expects zeros is wrong.

    Only where the guard checks all operations.
    """

    def set_up_states(self, request: Request) -> None:
        new = [part for part in request.state_components if part.live is None]
        super().set_up_states(request)
        for part in new if request.fresh else ():
            device = self.mounted[part.component.index].component.device
            if part.live is not None and device.device.type != "meta":
                for lanes in device.lanes:
                    ones = -1 if lanes.dtype.is_signed else 255
                    lanes[state_number(part.live)] = ones


class GuardedStepper(_Guarded, Stepper):
    """A stepper that sends requests down the slow path if the guard checks them.

    A sampled guard checks one request of so many, over all steps, with its row of every table. It
    does not check array operations over the others; `check_integrity` compares their rows. A guard
    that checks everything takes two requests of three so, others the next time, and compares the
    array operations over the rest with the expected results.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._n_requests = self._n_steps = 0

    def chosen(self, requests: Sequence[Request]) -> npt.NDArray[np.bool_] | None:
        guard = self.guard
        if guard is None:
            return None
        chosen: npt.NDArray[np.bool_]
        if guard.period == 1:
            self._n_steps += 1
            chosen = (np.arange(len(requests)) + self._n_steps) % 3 > 0
            guard.steps.begins(requests, ~chosen)
        else:
            at = np.arange(self._n_requests, self._n_requests + len(requests))
            self._n_requests += len(requests)
            chosen = at % guard.period == 0
        guard.chosen = [requests[each] for each in np.flatnonzero(chosen).tolist()]
        return chosen

    def end(self, batch: Batch, given: list[int], refused: list[int]) -> Step:
        step = super().end(batch, given, refused)
        guard = self.guard
        if guard is not None:
            chosen, guard.chosen = guard.chosen, []
            with guard.checking("step"):
                for request in chosen if guard.period > 1 else batch.requests:
                    self._check_stepped(request, batch, step)
                if guard.period == 1:
                    guard.steps.ends(batch.slow, batch.requests, step)
        return step

    def _check_stepped(self, request: Request, batch: Batch, step: Step) -> None:
        check_row(self.rows, request)
        if batch.tokens is not None and all(each is not request for each in step.refused):
            n_tokens = len(batch.tokens) // TOKEN_BYTES // len(batch.requests)
            if step.n_tokens is not None:
                at = next(at for at, each in enumerate(step.requests) if each is request)
                n_tokens = min(n_tokens, int(step.n_tokens[at]))
            _check_end(request, n_tokens)


def _check_end(request: Request, n_tokens: int) -> None:
    """A step appended tokens right behind the computed ones (T11)."""
    if request.key.n_tokens != request.computed + n_tokens:
        raise ContractViolation(
            "T11",
            None,
            f"a step appended {n_tokens} tokens to a key that holds {request.key.n_tokens} now, "
            f"behind {request.computed} computed ones",
        )


class GuardedPartsFactory(PartsFactory):
    """Makes the parts of a guarded cache, and then the guard.

    `check_cache` recomputes the books of a cache, guarded or not.
    """

    check_cache = staticmethod(check_cache)

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self._watched: list[_Guarded] = []
        self._tier: SteppedTier | None = None

    def kind(self, plain: type[Made]) -> type[Made]:
        """The guarded class of a part that has one."""
        guarded: type[Any]
        if plain is StateSlots and self.config.guard is not GuardMode.ON:
            return plain
        for guarded in (
            GuardedTree,
            GuardedJournal,
            GuardedEvictor,
            GuardedCleanReserve,
            GuardedStateSlots,
            GuardedStepper,
            GuardedEngineSlots,
        ):
            if issubclass(guarded, plain):
                return guarded
        return plain

    def hook_manager(self, plugin: Plugin) -> PluginManager:
        return managed(plugin, HookGuard(plugin, ask_twice=self.config.guard is GuardMode.ON))

    def make(self, plain: Callable[Given, Made], *given: Given.args, **named: Given.kwargs) -> Made:
        made = super().make(plain, *given, **named)
        if isinstance(made, _Guarded):
            self._watched.append(made)
        return made

    def storage(
        self,
        tree: Tree,
        mounted: Sequence[Mounted],
        evictor: Evictor,
        requests: Mapping[int, Request],
    ) -> StorageTier | NoStorage:
        if self.config.storage is None:
            return NoStorage()
        kind = self.kind(guarded_tier(load_part("storage")))
        self._tier = kind(
            tree, mounted, evictor, self.config.storage, self.clock, requests=requests
        )
        return self._tier

    def recorder(self, tree: Tree, ended: Callable[[], object]) -> Recorder:
        if self.config.guard is not GuardMode.ON:
            return super().recorder(tree, ended)
        made: Recorder = guarded_recorder(load_part("events"))(tree, ended)
        return made

    def ready(self, cache: Cache) -> Guard:
        # A constructor that made another class would not let anybody derive from `Cache`.
        cache.__class__ = guarded_operations(type(cache))
        hooks = [
            plugin
            for each in cache.mounted
            if each.manager is not None
            for plugin in each.manager.get_plugins()
            if isinstance(plugin, HookGuard)
        ]
        guard = Guard(cache, hooks)
        for part in self._watched:
            part.guard = guard
        if cache.arenas is not None:
            cache.arenas.mover.on_move = guard.watched.moved
        if self._tier is not None:
            self._tier.watch(cache, guard)
        return guard
