"""Components with one defect each, written without a look at `components`.

They tell whether the suite finds mechanisms or only the examples it was written for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, ClassVar

import torch

from kvgraft import (
    COPY_ON_WRITE,
    HOST_MIRROR,
    Component,
    ComponentMatch,
    Demand,
    DemandQuery,
    DevicePool,
    Direction,
    Everything,
    HostMirror,
    Leading,
    LockQuery,
    MatchView,
    PlaneSpec,
    Reach,
    Span,
    Tier,
    Trailing,
    TransferQuery,
)
from kvgraft.pools import slot_index
from kvgraft.pools.allocator import SlotAllocator
from kvgraft.transfers import PlaneCopy, pair_planes

from .components import ComponentMutant
from .packages import WINDOW, Package, paged, state

__all__ = ["COMPONENTS_HELD_OUT"]

COMPONENTS_HELD_OUT: list[ComponentMutant] = []

Build = Callable[[], Package]


def mutant(name: str, *rules: str) -> Callable[[Build], Build]:
    """Register the package that a function builds."""

    def add(build: Build) -> Build:
        COMPONENTS_HELD_OUT.append(ComponentMutant(name, rules, build()))
        return build

    return add


def nothing(component: Component, query: object) -> None:
    del component, query


def copies(build: Callable[[Component, TransferQuery], Any], **hooks: Any) -> dict[str, Any]:
    """Hooks of a component that builds its copies itself."""
    ends = {"commit_hicache_transfers": nothing, "abort_hicache_transfers": nothing}
    return {"build_hicache_transfers": build, **ends, **hooks}


def released(component: Component, segment: Sequence[Span]) -> None:
    del component, segment


def locked(acquire: Callable[..., Any], release: Callable[..., Any] = released) -> dict[str, Any]:
    """Hooks of a component that says what to pin."""
    return {"acquire_component_lock": acquire, "release_component_lock": release}


def pages(tokens: int, size: int) -> int:
    return -(-tokens // size)


def whole(query: DemandQuery, private: tuple[int, ...] = ()) -> Demand:
    """Every page the request will ever have, one slot a page."""
    held = pages(query.computed, query.page_size)
    now = pages(query.computed + query.chunk, query.page_size) - held + 1
    total = pages(query.total, query.page_size) - held + 1
    return Demand(now + query.host_slots, max(0, total - now), private)


def wide(**given: Any) -> Package:
    """Pages, every one before a boundary needed."""
    return paged(reach=Reach(Everything()), **given)


def windowed(boundary: int, size: int) -> int:
    """First page of the window before a boundary."""
    return max(0, (boundary * size - WINDOW) // size)


# -- matches


@mutant("a match that needs HOST is lengthened by a page", "M5")
def _() -> Package:
    def hook(component: Component, view: MatchView) -> ComponentMatch | None:
        if view.device_anchor < view.anchor < view.limit:
            return ComponentMatch(view.anchor + 1)
        return None

    return paged(hooks={"finalize_match_result": hook})


@mutant("a match is limited to less than nothing", "M5")
def _() -> Package:
    def hook(component: Component, view: MatchView) -> ComponentMatch | None:
        return ComponentMatch(view.anchor - 4)

    return paged(hooks={"finalize_match_result": hook})


@mutant("the first match of a prefix is cut, the second is not", "M2", "D1")
def _() -> Package:
    seen: set[MatchView] = set()

    def hook(component: Component, view: MatchView) -> ComponentMatch | None:
        if view in seen:
            return None
        seen.add(view)
        return ComponentMatch(view.anchor // 2)

    return paged(hooks={"finalize_match_result": hook})


@mutant("every third match is cut", "M2", "D1")
def _() -> Package:
    numbers = count()

    def hook(component: Component, view: MatchView) -> ComponentMatch | None:
        return ComponentMatch(max(0, view.anchor - 1)) if next(numbers) % 3 == 2 else None

    return paged(hooks={"finalize_match_result": hook})


@mutant("a match takes a slot in advance", "M6", "T8", "T9")
def _() -> Package:
    def hook(component: Component, view: MatchView) -> None:
        if view.anchor:
            component.device.allocator.allocate(1)

    return paged(hooks={"finalize_match_result": hook})


@mutant("a match returns its boundary as a float", "M5")
def _() -> Package:
    def hook(component: Component, view: MatchView) -> ComponentMatch:
        return ComponentMatch(view.anchor / 1)  # type: ignore[arg-type]

    return paged(hooks={"finalize_match_result": hook})


@mutant("a match asks for a state at a negative boundary", "M5")
def _() -> Package:
    def hook(component: Component, view: MatchView) -> ComponentMatch:
        return ComponentMatch(view.anchor, (view.anchor - view.limit - 1,))

    return state(hooks={"finalize_match_result": hook})


@mutant("a match writes into a pool", "M6", "T9", "M7", "R5", "M8", "B3")
def _() -> Package:
    def hook(component: Component, view: MatchView) -> None:
        if view.anchor > 1:
            component.device.lanes[0][: view.anchor] = 0

    return paged(hooks={"finalize_match_result": hook})


# -- pins


@mutant("a pin leaves out the first page of the window", "L3")
def _() -> Package:
    def acquire(component: Component, query: LockQuery) -> list[Span]:
        low = windowed(query.boundary, query.page_size)
        return [Span(min(low + 1, query.boundary), query.boundary)]

    return paged(hooks=locked(acquire))


@mutant("a pin reaches a page beyond the boundary", "L3")
def _() -> Package:
    def acquire(component: Component, query: LockQuery) -> list[Span]:
        return [Span(windowed(query.boundary, query.page_size), query.boundary + 1)]

    return paged(hooks=locked(acquire))


@mutant("a pin has a hole", "L3")
def _() -> Package:
    def acquire(component: Component, query: LockQuery) -> list[Span]:
        end = query.boundary
        low = windowed(end, query.page_size)
        middle = (low + end) // 2
        return [Span(low, middle), Span(middle + 1, end)] if end - low > 2 else [Span(low, end)]

    return paged(hooks=locked(acquire))


@mutant("a pin is forgotten where the boundary is deep", "L3")
def _() -> Package:
    def acquire(component: Component, query: LockQuery) -> list[Span] | None:
        return None if query.boundary < 5 else []

    return paged(hooks=locked(acquire))


@mutant("a pin of a state is a page", "L3")
def _() -> Package:
    def acquire(component: Component, query: LockQuery) -> list[Span]:
        return [Span(query.boundary + 1, query.boundary + 1)] if query.boundary else []

    return state(hooks=locked(acquire))


@mutant("a second release of an equal segment raises", "L1")
def _() -> Package:
    held: set[tuple[Span, ...]] = set()

    def acquire(component: Component, query: LockQuery) -> list[Span]:
        segment = [Span(windowed(query.boundary, query.page_size), query.boundary)]
        held.add(tuple(segment))
        return segment

    def release(component: Component, segment: Sequence[Span]) -> None:
        held.remove(tuple(segment))

    return paged(hooks=locked(acquire, release))


@mutant("a pin takes a slot and its release forgets it", "T8", "L1", "T9", "A7")
def _() -> Package:
    def acquire(component: Component, query: LockQuery) -> None:
        if query.boundary:
            component.device.allocator.allocate(1)

    return paged(hooks=locked(acquire))


@mutant("a pin is a generator", "L3")
def _() -> Package:
    def acquire(component: Component, query: LockQuery) -> Any:
        return (Span(page, page + 1) for page in range(query.boundary))

    return paged(reach=Reach(Everything()), hooks=locked(acquire))


@mutant("a release frees the slots it unpins", "T9", "T8", "L1", "E1")
def _() -> Package:
    def acquire(component: Component, query: LockQuery) -> None:
        return None

    def release(component: Component, segment: Sequence[Span]) -> None:
        if segment:
            component.device.allocator.free(b"\0\0\0\0")

    def first(component: Component, query: LockQuery) -> list[Span]:
        return [Span(windowed(query.boundary, query.page_size), query.boundary)]

    return paged(hooks=locked(first, release))


# -- transfers


@mutant("slots of a long transfer are paired backwards", "B3", "R5", "T9")
def _() -> Package:
    def build(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        made = pair_planes(component, query)
        if query.direction is Direction.BACKUP or len(query.host_slots) <= 8:
            return made
        return [copy._replace(target_rows=copy.target_rows.flip(0)) for copy in made]

    return paged(hooks=copies(build))


@mutant("a load-back forgets the last layer", "R5", "R1", "B3")
def _() -> Package:
    def build(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        made = pair_planes(component, query)
        return made if query.direction is Direction.BACKUP else [c for c in made if not c.layer]

    return paged(hooks=copies(build))


@mutant("a backup forgets the values", "B3", "R5", "T9", "B2")
def _() -> Package:
    def build(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        made = pair_planes(component, query)
        return made[::2] if query.direction is Direction.BACKUP else made

    return paged(hooks=copies(build))


@mutant("a load-back moves the bytes itself and returns nothing to copy", "B3", "R7", "R5")
def _() -> Package:
    def build(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        made = pair_planes(component, query)
        if query.direction is Direction.BACKUP:
            return made
        for copy in made:
            copy.target[copy.target_rows] = copy.source[copy.source_rows]
        return []

    return paged(hooks=copies(build))


@mutant("a backup moves the bytes itself and returns nothing to copy", "B3", "B4", "R5")
def _() -> Package:
    def build(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        made = pair_planes(component, query)
        if query.direction is Direction.LOAD_BACK:
            return made
        for copy in made:
            copy.target[copy.target_rows] = copy.source[copy.source_rows]
        return []

    return paged(hooks=copies(build))


@mutant("a backup reads its source when it is built", "B4", "B3")
def _() -> Package:
    def build(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        made = pair_planes(component, query)
        if query.direction is Direction.LOAD_BACK:
            return made
        staged = []
        for copy in made:
            rows = torch.arange(len(copy.source_rows))
            staged.append(copy._replace(source=copy.source[copy.source_rows], source_rows=rows))
        return staged

    return paged(hooks=copies(build))


@mutant("row numbers of a transfer are overwritten by the next", "B3", "R5", "T9", "M7", "R2")
def _() -> Package:
    kept = torch.zeros(64, dtype=torch.int64)

    def build(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        made = pair_planes(component, query)
        rows = slot_index(query.host_slots)
        kept[: len(rows)] = rows
        shared = kept[: len(rows)]
        if query.direction is Direction.BACKUP:
            return [copy._replace(target_rows=shared) for copy in made]
        return [copy._replace(source_rows=shared) for copy in made]

    return paged(hooks=copies(build))


@mutant("a transfer goes through one row of staging memory", "B3", "R5", "T9")
def _() -> Package:
    def build(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        made: list[PlaneCopy] = []
        for copy in pair_planes(component, query):
            n_rows = len(copy.source_rows)
            stage = torch.zeros((1, copy.source.shape[1]), dtype=copy.source.dtype)
            middle = torch.zeros(n_rows, dtype=torch.int64)
            made.append(PlaneCopy(copy.layer, copy.source, stage, copy.source_rows, middle))
            made.append(PlaneCopy(copy.layer, stage, copy.target, middle, copy.target_rows))
        return made

    return paged(hooks=copies(build))


@mutant("a commit frees the HOST slots it was notified of", "B3", "T9", "R2", "T8")
def _() -> Package:
    def commit(component: Component, query: TransferQuery) -> None:
        if query.direction is Direction.LOAD_BACK and component.host is not None:
            component.host.allocator.free(query.host_slots)

    return paged(hooks=copies(pair_planes, commit_hicache_transfers=commit))


@mutant("an abort frees the slots again", "R2", "T9", "T8")
def _() -> Package:
    def abort(component: Component, query: TransferQuery) -> None:
        if query.direction is Direction.LOAD_BACK:
            component.device.allocator.free(query.device_slots)

    return paged(hooks=copies(pair_planes, abort_hicache_transfers=abort))


@mutant("an abort raises", "R2")
def _() -> Package:
    def abort(component: Component, query: TransferQuery) -> None:
        raise KeyError("no such transfer")

    return paged(hooks=copies(pair_planes, abort_hicache_transfers=abort))


@mutant("a commit clears the loaded data", "R5", "R7", "B3", "T9")
def _() -> Package:
    def commit(component: Component, query: TransferQuery) -> None:
        if query.direction is Direction.LOAD_BACK:
            for lanes in component.device.lanes:
                lanes[slot_index(query.device_slots)[-1:]] = 0

    return paged(hooks=copies(pair_planes, commit_hicache_transfers=commit))


@mutant("layers of a load-back come last first", "R7", "B3", "R5")
def _() -> Package:
    def build(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        made = pair_planes(component, query)
        top = max(copy.layer for copy in made)
        return [copy._replace(layer=top - copy.layer) for copy in made]

    return paged(hooks=copies(build))


# -- budgets


@mutant("a window is budgeted without its load back", "A3")
def _() -> Package:
    def budget(component: Component, query: DemandQuery) -> Demand:
        return whole(query._replace(host_slots=0))

    return paged(hooks={"budget_contribution": budget})


@mutant("a chunk is budgeted rounded down", "A1", "A7")
def _() -> Package:
    def budget(component: Component, query: DemandQuery) -> Demand:
        return Demand(query.chunk // query.page_size + query.host_slots, 0)

    return paged(hooks={"budget_contribution": budget})


@mutant("later chunks are not budgeted", "A1", "A7")
def _() -> Package:
    def budget(component: Component, query: DemandQuery) -> Demand:
        return Demand(whole(query).now, 0)

    return paged(reach=Reach(Everything()), hooks={"budget_contribution": budget})


@mutant("decoding is not budgeted", "A1", "A7", "A4")
def _() -> Package:
    def budget(component: Component, query: DemandQuery) -> Demand:
        return whole(query._replace(total=query.prompt))

    return paged(reach=Reach(Everything()), hooks={"budget_contribution": budget})


@mutant("a window is budgeted as if it were half as wide", "A4", "A7", "A1")
def _() -> Package:
    def budget(component: Component, query: DemandQuery) -> Demand:
        asked = whole(query)
        window = pages(WINDOW, query.page_size)
        return Demand(asked.now, min(asked.later, window // 2))

    return paged(hooks={"budget_contribution": budget})


@mutant("states to capture are not budgeted", "A10")
def _() -> Package:
    def budget(component: Component, query: DemandQuery) -> Demand:
        return Demand(1 + query.host_slots, 0)

    return state(hooks={"budget_contribution": budget})


@mutant("private rows are budgeted one too few with every second request", "A1", "H7", "D1")
def _() -> Package:
    numbers = count()

    def budget(component: Component, query: DemandQuery) -> Demand:
        return whole(query, (next(numbers) % 2 + 1,))

    return paged(
        reach=Reach(Everything()), private={"rows": 8}, hooks={"budget_contribution": budget}
    )


@mutant("a budget takes the private rows itself", "A9", "H8", "T8", "A1", "H7")
def _() -> Package:
    def budget(component: Component, query: DemandQuery) -> Demand:
        component.private[0].allocator.allocate(1)
        return whole(query, (0,))

    return paged(
        reach=Reach(Everything()), private={"rows": 40}, hooks={"budget_contribution": budget}
    )


@mutant("a budget has no entry for its second private pool", "A1", "H7")
def _() -> Package:
    def budget(component: Component, query: DemandQuery) -> Demand:
        return whole(query, (1,))

    return paged(
        reach=Reach(Everything()),
        private={"rows": 8, "keys": 8},
        hooks={"budget_contribution": budget},
    )


@mutant("a budget asks for more private rows than there are", "A8", "H7")
def _() -> Package:
    def budget(component: Component, query: DemandQuery) -> Demand:
        return whole(query, (9 if query.computed else 1,))

    return paged(
        reach=Reach(Everything()), private={"rows": 8}, hooks={"budget_contribution": budget}
    )


@mutant("a budget counts in tokens", "A4", "A8", "A1")
def _() -> Package:
    def budget(component: Component, query: DemandQuery) -> Demand:
        return Demand(query.total * 40 + query.host_slots, 0)

    return paged(hooks={"budget_contribution": budget})


# -- pools


class ForgetfulPool(DevicePool):
    """Copies of a state leave out the last plane."""

    def copy_slots(self, source: bytes, target: bytes) -> None:
        read, write = slot_index(source), slot_index(target)
        for lanes in self.lanes[:-1]:
            lanes[write] = lanes[read]


@mutant("a state is copied without its last plane", "M8")
def _() -> Package:
    return state(device=ForgetfulPool)


class AliasedPool(DevicePool):
    """Slot 1 is the same memory as slot 0."""

    def __init__(self, specs: Sequence[PlaneSpec], n_slots: int, device: Any = "cpu") -> None:
        super().__init__(specs, n_slots, device)
        kept = [torch.zeros_like(lanes[: max(1, n_slots - 1)]) for lanes in self.lanes]
        self.lanes = [torch.as_strided(rows, (n_slots, rows.shape[1]), (0, 1)) for rows in kept]


@mutant("all slots of a pool are the same memory", "T9", "M7", "M8", "B3", "R5", "T8")
def _() -> Package:
    return paged(device=AliasedPool)


class Twice(SlotAllocator):
    """The last slot is handed out twice."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        if capacity > 2:
            self._write_down(capacity)
            self._free[0] = self._free[1]


class TwicePool(DevicePool):
    def __init__(self, specs: Sequence[PlaneSpec], n_slots: int, device: Any = "cpu") -> None:
        super().__init__(specs, n_slots, device)
        self.allocator = Twice(n_slots)


@mutant("an allocator has one slot twice", "T9", "T8")
def _() -> Package:
    return paged(device=TwicePool)


class TwiceMirror(HostMirror):
    def __init__(self, specs: Sequence[PlaneSpec], n_slots: int, *, pin: bool = False) -> None:
        super().__init__(specs, n_slots, pin=pin)
        self.allocator = Twice(n_slots)


@mutant("a mirror's allocator has one slot twice", "T9", "T8", "B3")
def _() -> Package:
    return paged(host=TwiceMirror)


class SharedMirror(HostMirror):
    """Every mirror of the process is one piece of memory."""

    memory: ClassVar[dict[int, torch.Tensor]] = {}

    def __init__(self, specs: Sequence[PlaneSpec], n_slots: int, *, pin: bool = False) -> None:
        super().__init__(specs, n_slots, pin=pin)
        width = int(self.slab.shape[1])
        slab = self.memory.setdefault(width, torch.zeros((4096, width), dtype=torch.uint8))
        self.slab = slab[:n_slots]
        self.lanes = [
            self._lanes(start, lanes.shape[1] * lanes.element_size())
            for start, lanes in zip(self.offsets, list(self.lanes))
        ]


@mutant("mirrors of two caches share their memory", "T9", "T8", "B3", "R5")
def _() -> Package:
    return paged(host=SharedMirror)


class SmallMirror(HostMirror):
    """Its allocator believes in twice as many slots as there is memory for."""

    def __init__(self, specs: Sequence[PlaneSpec], n_slots: int, *, pin: bool = False) -> None:
        super().__init__(specs, max(1, n_slots // 2), pin=pin)
        assert len(self.lanes) == len(specs)  # takes the memory now
        self.allocator = SlotAllocator(n_slots)


@mutant("a mirror has half the memory it hands out", "T8", "B3")
def _() -> Package:
    return paged(host=SmallMirror)


class Greedy(SlotAllocator):
    """Gives fewer slots than asked for rather than none."""

    def allocate(self, n: int) -> bytes | None:
        return super().allocate(min(n, self.n_free)) if n > 1 else super().allocate(n)


class GreedyMirror(HostMirror):
    def __init__(self, specs: Sequence[PlaneSpec], n_slots: int, *, pin: bool = False) -> None:
        super().__init__(specs, n_slots, pin=pin)
        self.allocator = Greedy(n_slots)


@mutant("a mirror gives fewer slots than asked for", "T8", "T9", "B2", "B3", "I8")
def _() -> Package:
    return paged(host=GreedyMirror)


# -- declarations and factories


@mutant("a release always raises", "L1")
def _() -> Package:
    def acquire(component: Component, query: LockQuery) -> list[Span]:
        return [Span(0, query.boundary)] if query.boundary else []

    def release(component: Component, segment: Sequence[Span]) -> None:
        raise LookupError(segment)

    return paged(reach=Reach(Leading(2), Trailing(3)), hooks=locked(acquire, release))


@mutant("pools of all caches are one object", "T8", "T9", "D1", "P7", "A8")
def _() -> Package:
    pools: dict[tuple[int, int], DevicePool] = {}

    class Cached(DevicePool):
        def __new__(cls, specs: Sequence[PlaneSpec], n_slots: int, device: Any = "cpu") -> Any:
            key = (n_slots, specs[0].shape[0])
            if key not in pools:
                pools[key] = super().__new__(cls)
            return pools[key]

        def __init__(self, specs: Sequence[PlaneSpec], n_slots: int, device: Any = "cpu") -> None:
            if not hasattr(self, "lanes"):
                super().__init__(specs, n_slots, device)

    return paged(device=Cached)


@mutant("a state says it can be copied and is not", "M8")
def _() -> Package:
    class Pool(DevicePool):
        def copy_slots(self, source: bytes, target: bytes) -> None:
            del source, target

    return state(capabilities=frozenset({HOST_MIRROR, COPY_ON_WRITE}), device=Pool)


@mutant("a mirror is declared and never built", "P8", "B3")
def _() -> Package:
    return paged(capabilities=frozenset({HOST_MIRROR}), mirror=False)


@mutant("private rows are promised and the pool is empty", "A8", "H7")
def _() -> Package:
    return paged(
        reach=Reach(Everything()),
        private={"rows": 0},
        hooks={"budget_contribution": lambda component, query: whole(query, (1,))},
    )


# -- at home on HOST


@mutant("a backup of pages at home on HOST is built twice", "B3", "H1", "H4", "R1", "R5")
def _() -> Package:
    def build(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        made = pair_planes(component, query)
        return [copy._replace(source_rows=copy.source_rows.roll(1)) for copy in made]

    return paged(home=Tier.HOST, reach=Reach(Everything()), hooks=copies(build))


@mutant("pages at home on HOST are budgeted without their loads", "A3")
def _() -> Package:
    def budget(component: Component, query: DemandQuery) -> Demand:
        return whole(query._replace(host_slots=0))

    return paged(home=Tier.HOST, reach=Reach(Everything()), hooks={"budget_contribution": budget})


@mutant("a pin of pages at home on HOST leaves the beginning out", "L3", "H4")
def _() -> Package:
    def acquire(component: Component, query: LockQuery) -> list[Span]:
        return [Span(query.boundary // 2, query.boundary)] if query.boundary else []

    return paged(home=Tier.HOST, reach=Reach(Everything()), hooks=locked(acquire))


@mutant("a factory refuses options it declares", "P7", "P6")
def _() -> Package:
    class Pool(DevicePool):
        def __init__(self, specs: Sequence[PlaneSpec], n_slots: int, device: Any = "cpu") -> None:
            if n_slots > 12:
                raise MemoryError(n_slots)
            super().__init__(specs, n_slots, device)

    return paged(device=Pool)
