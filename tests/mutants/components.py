"""Components with one defect each, and the rules a report may name for it."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import kvgraft
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
    Kind,
    LockQuery,
    MatchView,
    PlaneSpec,
    Reach,
    Span,
    Tier,
    TransferQuery,
)
from kvgraft.pools.allocator import SlotAllocator
from kvgraft.transfers import PlaneCopy, pair_planes

from .packages import WINDOW, Lax, Package, paged, state

__all__ = ["MUTANTS", "ComponentMutant"]


class ComponentMutant(NamedTuple):
    """A component with a defect.

    Attributes:
        name: the defect, in words.
        rules: rules the report may name; the first is the one meant.
        package: the component.
    """

    name: str
    rules: tuple[str, ...]
    package: Package


MUTANTS: list[ComponentMutant] = []


def mutant(name: str, *rules: str) -> Callable[[Callable[[], Package]], Callable[[], Package]]:
    """Register the package that a function builds."""

    def add(build: Callable[[], Package]) -> Callable[[], Package]:
        MUTANTS.append(ComponentMutant(name, rules, build()))
        return build

    return add


# -- matches


def finalizing(answer: Callable[[Component, MatchView], Any]) -> Package:
    return paged(hooks={"finalize_match_result": answer})


@mutant("a match is made longer by one page", "M5")
def lengthens() -> Package:
    return finalizing(lambda component, view: ComponentMatch(view.anchor + 1))


@mutant("a match is cut to a negative boundary", "M5")
def negative() -> Package:
    return finalizing(lambda component, view: ComponentMatch(view.anchor - 2))


@mutant("a match is answered differently the second time", "D1")
def fickle() -> Package:
    calls = count()
    return finalizing(lambda component, view: ComponentMatch(view.anchor // (1 + next(calls) % 2)))


@mutant("a match takes a slot for later", "M6", "T8", "T9")
def greedy_match() -> Package:
    def answer(component: Component, view: MatchView) -> None:
        component.device.allocator.allocate(1)

    return finalizing(answer)


@mutant("a state is captured at a boundary before the sequence", "M5")
def captures_nowhere() -> Package:
    def answer(component: Component, view: MatchView) -> ComponentMatch:
        return ComponentMatch(view.anchor, (view.anchor - view.limit - 1,))

    return state(hooks={"finalize_match_result": answer})


@mutant("a state is captured behind the last boundary of the prompt", "M5")
def captures_behind() -> Package:
    def answer(component: Component, view: MatchView) -> ComponentMatch:
        return ComponentMatch(view.anchor, (view.limit + 7,))

    return state(hooks={"finalize_match_result": answer})


@mutant("a state is captured where the request resumes", "M5")
def captures_again() -> Package:
    def answer(component: Component, view: MatchView) -> ComponentMatch:
        return ComponentMatch(view.anchor, (view.anchor,))

    return state(hooks={"finalize_match_result": answer})


# -- pins


def window(boundary: int, page_size: int) -> list[Span]:
    return [Span(max(0, boundary - -(-WINDOW // page_size)), boundary)] if boundary else []


def locking(
    acquire: Callable[[Component, LockQuery], Sequence[Span] | None],
    release: Callable[[Component, Sequence[Span]], None] = lambda component, segment: None,
) -> Package:
    return paged(
        hooks={
            "acquire_component_lock": acquire,
            "release_component_lock": release,
        }
    )


@mutant("a pin is one page short of the window", "L3")
def short_pin() -> Package:
    def acquire(component: Component, query: LockQuery) -> list[Span]:
        (*spans,) = window(query.boundary, query.page_size)
        return [Span(min(span.start + 1, span.end), span.end) for span in spans]

    return locking(acquire)


@mutant("a pin leaves out the newest page", "L3")
def stale_pin() -> Package:
    def acquire(component: Component, query: LockQuery) -> list[Span]:
        spans = window(query.boundary, query.page_size)
        return [Span(span.start, max(span.start, span.end - 1)) for span in spans]

    return locking(acquire)


@mutant("a window pins the whole prefix", "L7")
def wide_pin() -> Package:
    return locking(lambda component, query: [Span(0, query.boundary)])


@mutant("a pin reaches behind the boundary", "L3")
def long_pin() -> Package:
    return locking(lambda component, query: [Span(0, query.boundary + 1)])


@mutant("a release changes the next pin", "D1")
def drifting_pin() -> Package:
    calls = count(1)

    def acquire(component: Component, query: LockQuery) -> list[Span]:
        spans = window(query.boundary, query.page_size)
        extra = next(calls) % 2
        return [Span(max(0, span.start - extra), span.end) for span in spans]

    return locking(acquire)


@mutant("a release frees a slot it never took", "L1", "T8", "T9", "T3")
def freeing_release() -> Package:
    def release(component: Component, segment: Sequence[Span]) -> None:
        component.device.allocator.free((0).to_bytes(4, "little"))

    return locking(lambda component, query: window(query.boundary, query.page_size), release)


@mutant("a release raises", "L1")
def raising_release() -> Package:
    def release(component: Component, segment: Sequence[Span]) -> None:
        raise RuntimeError("no such lock")

    return locking(lambda component, query: window(query.boundary, query.page_size), release)


# -- transfers


def moving(
    build: Callable[[Component, TransferQuery], list[PlaneCopy]],
    commit: Callable[[Component, TransferQuery], None] = lambda component, query: None,
    abort: Callable[[Component, TransferQuery], None] = lambda component, query: None,
    package: Callable[..., Package] = paged,
) -> Package:
    return package(
        hooks={
            "build_hicache_transfers": build,
            "commit_hicache_transfers": commit,
            "abort_hicache_transfers": abort,
        }
    )


@mutant("a transfer forgets a plane", "R5", "B3")
def forgets_a_plane() -> Package:
    return moving(lambda component, query: pair_planes(component, query)[:-1])


@mutant("a load-back delivers pages in reverse", "R5", "B3")
def reversed_pages() -> Package:
    def build(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        copies = pair_planes(component, query)
        if query.direction is Direction.BACKUP:
            return copies
        return [copy._replace(target_rows=copy.target_rows.flip(0)) for copy in copies]

    return moving(build)


@mutant("a backup writes one slot more", "B3")
def writes_more() -> Package:
    def build(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        copies = pair_planes(component, query)
        extra = [
            copy._replace(
                source_rows=copy.source_rows[:1],
                target_rows=(copy.target_rows[:1] + 1) % copy.target.shape[0],
            )
            for copy in copies
        ]
        return copies + extra

    return moving(build)


@mutant("a backup copies from HOST to DEVICE", "R5", "B3")
def wrong_way() -> Package:
    def build(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        back = query._replace(direction=Direction.LOAD_BACK)
        return pair_planes(component, back)

    return moving(build)


@mutant("a load-back says that the last layer is the first", "R7")
def wrong_layers() -> Package:
    def build(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        copies = pair_planes(component, query)
        return [copy._replace(layer=1 - copy.layer) for copy in copies]

    return moving(build)


@mutant("a commit frees the host slots", "R2", "T8", "T9")
def commit_frees() -> Package:
    def commit(component: Component, query: TransferQuery) -> None:
        assert component.host is not None
        component.host.allocator.free(query.host_slots)

    return moving(pair_planes, commit)


@mutant("an abort frees the device slots again", "R2", "T8", "T9")
def abort_frees() -> Package:
    def abort(component: Component, query: TransferQuery) -> None:
        component.device.allocator.free(query.device_slots)

    return moving(pair_planes, abort=abort)


@mutant("a state's load-back leaves one plane behind", "R5", "B3")
def half_a_state() -> Package:
    def build(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        copies = pair_planes(component, query)
        return copies if query.direction is Direction.BACKUP else copies[1:]

    return moving(build, package=state)


# -- budgets


def budgeting(
    answer: Callable[[Component, DemandQuery], Demand | None],
    package: Callable[..., Package] = paged,
) -> Package:
    return package(hooks={"budget_contribution": answer})


def pages(tokens: int, query: DemandQuery) -> int:
    return -(-tokens // query.page_size)


def demand(query: DemandQuery) -> Demand:
    """The window's need: the chunk and one page more now, the window while it goes on."""
    held = pages(query.computed, query)
    step = pages(query.computed + query.chunk, query) - held
    total = pages(query.total, query) - held + 1
    reach = -(-WINDOW // query.page_size)
    peak = min(total, reach + step + 2)
    now = min(peak, step + 1)
    return Demand(now + query.host_slots, peak - now)


@mutant("a window's budget forgets the pages a load-back takes (F1)", "A3", "A7")
def forgets_the_load() -> Package:
    return budgeting(lambda component, query: demand(query._replace(host_slots=0)))


@mutant("host hits are counted in tokens instead of slots", "A3")
def counts_tokens() -> Package:
    def answer(component: Component, query: DemandQuery) -> Demand:
        return demand(query._replace(host_slots=query.host_slots * (query.page_size + 1)))

    return budgeting(answer)


@mutant("host hits are counted twice", "A3")
def counts_twice() -> Package:
    def answer(component: Component, query: DemandQuery) -> Demand:
        return demand(query._replace(host_slots=2 * query.host_slots))

    return budgeting(answer)


@mutant("a budget forgets the chunk", "A1", "A3", "A7")
def forgets_the_chunk() -> Package:
    return budgeting(lambda component, query: Demand(query.host_slots, 3))


@mutant("a window's budget grows with the prompt (F4)", "A4")
def grows() -> Package:
    def answer(component: Component, query: DemandQuery) -> Demand:
        total = pages(query.total, query) - pages(query.computed, query) + 1
        return Demand(total + query.host_slots, 0)

    return budgeting(answer)


@mutant("a window's budget stops growing at a hundred pages", "A4")
def grows_to_a_hundred() -> Package:
    def answer(component: Component, query: DemandQuery) -> Demand:
        total = pages(query.total, query) - pages(query.computed, query) + 1
        return Demand(min(total, 100) + query.host_slots, 0)

    return budgeting(answer)


@mutant("a budget has no page of slack", "A1")
def no_slack() -> Package:
    def answer(component: Component, query: DemandQuery) -> Demand:
        held = pages(query.computed, query)
        step = pages(query.computed + query.chunk, query) - held
        return Demand(step + query.host_slots, pages(query.total, query) - held - step)

    return paged(reach=Reach(Everything()), hooks={"budget_contribution": answer})


@mutant("a demand for later is counted in pages instead of slots", "A1", "A7")
def later_in_pages() -> Package:
    def answer(component: Component, query: DemandQuery) -> Demand:
        found = demand(query)
        return Demand(2 * (found.now - query.host_slots) + query.host_slots, found.later)

    return paged(slots_per_page=2, hooks={"budget_contribution": answer})


@mutant("a budget depends on the time of day", "D1")
def timely() -> Package:
    def answer(component: Component, query: DemandQuery) -> Demand:
        found = demand(query)
        return found._replace(later=found.later + int(time.time()) // 3600 % 7)

    return budgeting(answer)


@mutant("a state's budget forgets the copy on write", "A1", "A10")
def forgets_the_copy() -> Package:
    return budgeting(
        lambda component, query: Demand(query.host_slots, query.checkpoints), package=state
    )


@mutant("a state's budget forgets the states to capture", "A10")
def forgets_captures() -> Package:
    return budgeting(lambda component, query: Demand(1 + query.host_slots, 0), package=state)


@mutant("a budget is negative for later", "A1", "A3")
def negative_budget() -> Package:
    return budgeting(lambda component, query: demand(query)._replace(later=-1))


@mutant("a budget depends on how often it was asked", "D1", "A3", "A4")
def moody() -> Package:
    calls = count()

    def answer(component: Component, query: DemandQuery) -> Demand:
        found = demand(query)
        return found._replace(later=found.later + next(calls) % 3)

    return budgeting(answer)


# -- pools


class Aliased(DevicePool):
    """Neighbouring slots are the same memory."""

    def __init__(self, specs: Sequence[PlaneSpec], n_slots: int, device: Any = "cpu") -> None:
        super().__init__(specs, n_slots, device)
        self.lanes = [lanes[:1].expand(lanes.shape) for lanes in self.lanes]


class TakesTwice(SlotAllocator):
    """A slot given back twice is there once."""

    def free(self, slots: bytes) -> None:
        known = set(self.free_slots())
        numbers = [number for number in memoryview(slots).cast("i") if number not in known]
        super().free(array("i", numbers).tobytes())


class Leaks(SlotAllocator):
    """A refused allocation loses a slot."""

    def allocate(self, n: int) -> bytes | None:
        found = super().allocate(n)
        if found is None:
            super().allocate(1)
        return found


class Partial(SlotAllocator):
    """Hands out all free slots where more were asked for."""

    def allocate(self, n: int) -> bytes | None:
        return super().allocate(min(n, self.n_free))


class Doubles(SlotAllocator):
    """Of several slots the last is the first."""

    def allocate(self, n: int) -> bytes | None:
        found = super().allocate(n)
        return found if found is None or n < 3 else found[:-4] + found[:4]


def allocating(allocator: type[SlotAllocator], base: type[Any] = DevicePool) -> type[Any]:
    """A pool with another allocator."""

    def build(self: Any, specs: Sequence[PlaneSpec], n_slots: int, *given: Any) -> None:
        base.__init__(self, specs, n_slots, *given)
        self.allocator = allocator(n_slots)

    return type(allocator.__name__, (base,), {"__init__": build})


@mutant("a pool takes a slot back twice", "T9")
def takes_twice() -> Package:
    return paged(device=allocating(TakesTwice))


@mutant("a pool loses a slot where it is short", "T9")
def leaks_a_slot() -> Package:
    return paged(device=allocating(Leaks))


@mutant("a host mirror gives fewer slots than are asked for", "T9")
def gives_fewer() -> Package:
    return paged(host=allocating(Partial, HostMirror))


@mutant("a pool gives one slot twice at a time", "T9")
def gives_twice() -> Package:
    return paged(device=allocating(Doubles))


class Shallow(DevicePool):
    """A copied state is the original seen again."""

    def copy_slots(self, source: bytes, target: bytes) -> None:
        del source, target


class HalfCopied(DevicePool):
    """A copied state lacks its last plane."""

    def copy_slots(self, source: bytes, target: bytes) -> None:
        kept = [plane.clone() for plane in self.lanes[-1:]]
        super().copy_slots(source, target)
        self.lanes[-1].copy_(kept[0])


class Spilling(DevicePool):
    """A copied state overwrites its neighbour."""

    def copy_slots(self, source: bytes, target: bytes) -> None:
        super().copy_slots(source, target)
        neighbour = (int.from_bytes(target, "little") + 1) % self.capacity
        super().copy_slots(source, neighbour.to_bytes(4, "little"))


class Overbooked(DevicePool):
    """It says that it has more slots than its tensors have rows."""

    def __init__(self, specs: Sequence[PlaneSpec], n_slots: int, device: Any = "cpu") -> None:
        super().__init__(specs, n_slots, device)
        self.lanes = [lanes[:-1] for lanes in self.lanes]


@mutant("two slots are views of the same memory", "T9")
def aliased() -> Package:
    return paged(device=Aliased)


@mutant("a copied state is a view of its donor", "M8")
def shallow() -> Package:
    return state(device=Shallow)


@mutant("a copied state lacks a plane", "M8")
def half_copied() -> Package:
    return state(device=HalfCopied)


@mutant("a copied state overwrites its neighbour", "M8")
def spilling() -> Package:
    return state(device=Spilling)


@mutant("a pool says it has a slot more than memory", "T8", "T9")
def overbooked() -> Package:
    return paged(device=Overbooked)


# -- host-resident components


def hosted(**given: Any) -> Package:
    defaults: dict[str, Any] = {
        "reach": Reach(Everything()),
        "home": Tier.HOST,
        "private": {"hot": 8},
        "hooks": {"budget_contribution": hot_demand},
    }
    return paged(**{**defaults, **given})


def hot_demand(component: Component, query: DemandQuery) -> Demand:
    held = pages(query.computed, query)
    step = pages(query.computed + query.chunk, query) - held
    total = pages(query.total, query) - held + 1
    now = min(total, step + 1)
    return Demand(now + query.host_slots, total - now, (2,))


class FirstOfSeveral(DevicePool):
    def copy_slots(self, source: bytes, target: bytes) -> None:
        super().copy_slots(source[:4], target[:4])


@mutant("of several states only the first is copied", "M8")
def copies_the_first() -> Package:
    return state(device=FirstOfSeveral)


@mutant("a resumed request is budgeted no private slots", "H7")
def forgets_private_slots() -> Package:
    def budget(component: Component, query: DemandQuery) -> Demand:
        pages = -(-query.total // query.page_size) + 1
        return Demand(pages + query.host_slots, 0, (0 if query.computed else 2,))

    return paged(
        reach=Reach(Everything()), private={"rows": 9}, hooks={"budget_contribution": budget}
    )


@mutant("copies go by the pools of the component built last", "B3", "D1", "T9")
def copies_of_the_last() -> Package:
    last: list[DevicePool] = []

    class Noted(DevicePool):
        def __init__(self, specs: Sequence[PlaneSpec], n: int, device: Any = "cpu") -> None:
            super().__init__(specs, n, device)
            last.append(self)

    def build(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        made = pair_planes(component, query)
        lanes = {id(mine): other for mine, other in zip(component.device.lanes, last[-1].lanes)}
        return [
            copy._replace(
                source=lanes.get(id(copy.source), copy.source),
                target=lanes.get(id(copy.target), copy.target),
            )
            for copy in made
        ]

    return replace(moving(build), device=Noted)


@mutant("private slots are there and never budgeted", "H7")
def unbudgeted() -> Package:
    def answer(component: Component, query: DemandQuery) -> Demand:
        return hot_demand(component, query)._replace(private=(0,))

    return hosted(hooks={"budget_contribution": answer})


@mutant("a budget takes private slots itself", "H8", "T8", "M6", "A9")
def leaks_private() -> Package:
    def answer(component: Component, query: DemandQuery) -> Demand:
        component.private[0].allocator.allocate(1)
        return hot_demand(component, query)

    return hosted(hooks={"budget_contribution": answer})


class WholeOnDevice(DevicePool):
    """Keeps data on DEVICE that belongs on HOST."""

    def __init__(self, specs: Sequence[PlaneSpec], n_slots: int, device: Any = "cpu") -> None:
        both = [spec._replace(layer=layer) for layer in range(2) for spec in specs]
        super().__init__(both, n_slots, device)


@mutant("a prefix hit moves the keys and values over the bus", "H5")
def moves_everything() -> Package:
    return hosted(device=WholeOnDevice)


# -- packaging


@mutant("a hook is not marked with hookimpl", "P6")
def unmarked() -> Package:
    return paged(
        hooks={"budget_contribution": lambda component, query: demand(query)},
        bare=frozenset({"budget_contribution"}),
    )


@mutant("a hook's name is misspelt", "P6")
def misspelt() -> Package:
    return paged(hooks={"budget_contributions": lambda component, query: demand(query)})


@mutant("a hook takes other arguments", "P6")
def other_arguments() -> Package:
    return paged(hooks={"budget_contribution": lambda component, request: demand(request)})


@mutant("a lock has no release", "P6")
def no_inverse() -> Package:
    return paged(hooks={"acquire_component_lock": lambda component, query: None})


@mutant("the API version is taken from the core", "P3")
def borrowed_version() -> Package:
    return paged(api_version=lambda: kvgraft.API_VERSION)


@mutant("a budget counts the fields of its query", "P3")
def counts_fields() -> Package:
    def answer(component: Component, query: DemandQuery) -> Demand:
        page_size, computed, chunk, prompt, total, host_slots, checkpoints = query
        return demand(
            DemandQuery(page_size, computed, chunk, prompt, total, host_slots, checkpoints)
        )

    return budgeting(answer)


@mutant("it was written for another major version", "P3")
def next_major() -> Package:
    return paged(api_version="2.0")


@mutant("unknown options are swallowed", "P7")
def lax() -> Package:
    return paged(options=Lax)


@mutant("a capability is claimed that is not there", "P8")
def boastful() -> Package:
    return paged(mirror=False)


@mutant("a host mirror is there and not declared", "P8")
def modest() -> Package:
    return paged(capabilities=frozenset())


@mutant("a state claims pages", "P8")
def confused() -> Package:
    return paged(kind=Kind.STATE, options=state().options, capabilities=frozenset({COPY_ON_WRITE}))


@mutant("a capability has a name of its own", "P8")
def inventive() -> Package:
    return paged(capabilities=frozenset({HOST_MIRROR, "time_travel"}))
