"""Clauses about caches side by side, small host mirrors, copies and packages, each seen to fail."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from kvgraft import (
    Component,
    DemandQuery,
    DevicePool,
    Direction,
    HostMirror,
    LockQuery,
    PlaneSpec,
    TransferQuery,
)
from kvgraft.packages.registry import select
from kvgraft.pools.allocator import SlotAllocator
from kvgraft.pools.component import run_copy
from kvgraft.transfers import PlaneCopy, pair_planes
from kvgraft_testing import CLAUSES, Status
from kvgraft_testing.checking import Checker

from ..mutants.components import hosted, moving
from ..mutants.packages import Package, paged, state
from .installed import SOUND, checker_of, put

BESIDE = "T9-caches-share-nothing"
UNDISTURBED = "T9-caches-disturb-nobody"
COVER = "B3-copies-cover-every-slot-and-plane"
STILL = "B3-nothing-moves-before-the-engine-moves-it"
NO_MIRROR = "P8-it-works-without-a-host-tier"
SMALL = "P8-a-small-mirror-is-right"
LITTLE = "P8-little-host-memory-serves"
NO_TORCH = "P2-loading-it-imports-no-torch"


def said_of(package: Package, ident: str) -> str:
    """Why a clause fails."""
    result = checker_of(package).decide(ident)
    assert result.status is Status.FAILED, result
    assert result.clause == ident
    return result.evidence


# -- caches side by side


@lru_cache
def shared_slots(n_slots: int) -> SlotAllocator:
    return SlotAllocator(n_slots)


@lru_cache
def shared_planes(specs: tuple[PlaneSpec, ...], n_slots: int) -> list[Any]:
    return list(DevicePool(specs, n_slots).planes)


class OneAllocator(DevicePool):
    def __init__(self, specs: Sequence[PlaneSpec], n_slots: int, device: Any = "cpu") -> None:
        super().__init__(specs, n_slots, device)
        self.allocator = shared_slots(n_slots)


class OneMemory(DevicePool):
    def __init__(self, specs: Sequence[PlaneSpec], n_slots: int, device: Any = "cpu") -> None:
        super().__init__(specs, n_slots, device, shared_planes(tuple(specs), n_slots))


def test_caches_with_one_set_of_slots_break_t9() -> None:
    said = said_of(paged(device=OneAllocator), BESIDE)
    assert said == "a second cache has the first one's slots of the device pool"


def test_caches_in_the_same_memory_break_t9() -> None:
    said = said_of(paged(device=OneMemory), BESIDE)
    assert said.startswith("device plane 'k' of layer 0 of one cache and device plane 'k' of")


BOOK: dict[str, int] = {"asked": 0}


class WithBook(DevicePool):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.book = BOOK


def test_caches_that_keep_one_book_break_t9() -> None:
    class Holding(Component):
        book: dict[str, int]

    def counts(component: Component, query: DemandQuery) -> None:
        BOOK["asked"] += 1

    package = paged(hooks={"budget_contribution": counts})
    implementation = package.implementation("mutant")
    plain = implementation.create_component

    def create_component(options: Any, context: Any) -> Component:
        built = plain(options=options, context=context)
        component = Holding(built.reach, built.device, built.host)
        component.book = BOOK
        return component

    from kvgraft import hookimpl
    from kvgraft.packages.registry import load_plugin

    implementation.create_component = hookimpl(create_component)
    result = Checker(load_plugin("mutant", implementation), profile="dev").decide(UNDISTURBED)
    assert result.status is Status.FAILED
    assert "both of two caches hold the same component.book" in result.evidence


# -- small mirrors


def mirrored(n_slots: Any) -> Package:
    """A component whose mirror has as many slots as a function of the host's pages says."""
    package = paged()
    implementation = package.implementation

    class Sized(Package):
        def implementation(self, name: str) -> Any:
            found = implementation(name)
            plain = found.create_component

            def create_component(options: Any, context: Any) -> Component:
                built = plain(options=options, context=context)
                n = n_slots(context.pages(context.host_tokens), built.device.capacity)
                built.host = HostMirror(built.device.specs, n) if n else None
                return built  # type: ignore[no-any-return]

            from kvgraft import hookimpl

            found.create_component = hookimpl(create_component)
            return found

    return Sized()


def test_a_mirror_where_there_is_no_host_memory_breaks_p8() -> None:
    said = said_of(mirrored(lambda pages, device: pages or device), NO_MIRROR)
    assert said == "pages of 1, host_tokens=0: has a host mirror of 16 slots; leave it out"


def test_a_declared_mirror_that_is_missing_at_one_page_breaks_p8() -> None:
    said = said_of(mirrored(lambda pages, device: pages if pages > 1 else 0), SMALL)
    assert said == "pages of 1, host memory of 1: declared, and no mirror is there"


def test_a_mirror_that_ignores_the_hosts_size_breaks_p8() -> None:
    said = said_of(mirrored(lambda pages, device: device if pages else 0), SMALL)
    assert said == "pages of 1, host memory of 1: its mirror has 16 slots, there is room for 1"


def test_copies_that_are_wrong_where_the_host_is_small_are_found() -> None:
    def build(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        copies = pair_planes(component, query)
        assert component.host is not None
        small = component.host.capacity < component.device.capacity // 2
        return copies[:-1] if small else copies

    checker = checker_of(moving(build))
    assert checker.decide(COVER).status is Status.PASSED
    result = checker.decide(LITTLE)
    assert result.status is Status.FAILED


# -- copies


def only(n_slots: int) -> Package:
    """Copies of the first slots of a transfer."""

    def build(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        return [
            copy._replace(
                source_rows=copy.source_rows[:n_slots], target_rows=copy.target_rows[:n_slots]
            )
            for copy in pair_planes(component, query)
        ]

    return moving(build)


def no_single(component: Component, query: TransferQuery) -> list[PlaneCopy]:
    return [] if len(query.device_slots) == 4 else pair_planes(component, query)


def outside(component: Component, query: TransferQuery) -> list[PlaneCopy]:
    return [
        copy._replace(target_rows=copy.target_rows + 99) for copy in pair_planes(component, query)
    ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "package", [only(8), moving(no_single), moving(outside)], ids=["first 8", "not one", "outside"]
)
def test_copies_that_leave_something_out_break_b3_and_nothing_else(package: Package) -> None:
    checker = checker_of(package)
    told = [checker.decide(each) for each in CLAUSES if not each.endswith("-driven")]
    assert [(each.clause, each.rule) for each in told if each.bad] == [(COVER, "B3")]


def test_a_load_back_that_leaves_a_plane_unwritten_breaks_b3_where_the_home_is_host() -> None:
    def build(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        copies = pair_planes(component, query)
        return copies if query.direction is Direction.BACKUP else copies[1:]

    ends = ("commit_hicache_transfers", "abort_hicache_transfers")
    hooks = dict(hosted().hooks) | dict.fromkeys(ends, lambda component, query: None)
    said = said_of(hosted(hooks={**hooks, "build_hicache_transfers": build}), COVER)
    assert "is not written by a load-back" in said


@pytest.mark.parametrize("package", [paged, state])
def test_a_hook_that_copies_at_once_breaks_b3(package: Any) -> None:
    def build(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        copies = pair_planes(component, query)
        for copy in copies:
            run_copy(copy)
        return copies

    said = said_of(moving(build, package=package), STILL)
    assert said.startswith("build_hicache_transfers for a backup wrote layer 0 plane 'k' of host")


# -- packages

TORCH = "import torch\n" + SOUND
DISTURBER = SOUND.replace('name="thrown"', 'name="other"')


@pytest.mark.long
def test_torch_imported_by_another_package_is_not_this_ones_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = put(tmp_path, SOUND)
    shelf.put("kvgraft-other", f"import torch\n{DISTURBER}", name="other")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = Checker(select(["thrown"])[0], profile="dev").decide(NO_TORCH)
    assert result.status is Status.PASSED, result.evidence
    for name in ("kvgraft_thrown", "kvgraft_other"):
        sys.modules.pop(name, None)


def test_a_module_that_imports_torch_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, TORCH)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = Checker(select(["thrown"])[0], profile="dev").decide(NO_TORCH)
    sys.modules.pop("kvgraft_thrown", None)
    assert result.status is Status.FAILED
    assert result.evidence.startswith("torch is imported at load, by ")
    assert result.evidence.endswith("kvgraft_thrown.py, line 1: import torch")


def test_wrong_bytes_are_reported_in_words() -> None:
    class Forgetting(DevicePool):
        """A copied state lacks its last plane."""

        def copy_slots(self, source: bytes, target: bytes) -> None:
            kept = self.lanes[-1].clone()
            super().copy_slots(source, target)
            self.lanes[-1].copy_(kept)

    checker = checker_of(state(device=Forgetting))
    violation = checker.subject.driven.violation
    assert violation is not None
    by_the_machine = (
        r"device slot \d+, layer 1 plane 'v', should hold the page that ends the \d+ tokens "
        r"(\d+|\([\d, ]+\))( in namespace '\w+')?; "
        r"it holds (rows without an owner: .*|the page that .*)"
    )
    by_the_guard = (
        r"the (data the request of \d+ tokens shares at page \d+ is|state captured at page \d+ is|"
        r"request of \d+ tokens begins with) slot \d+, "
        r"which is no copy of slot \d+: plane 'v' of layer 1 differs"
    )
    assert re.fullmatch(f"{by_the_machine}|{by_the_guard}", violation.evidence)


# -- a hook's own exception


def test_a_hook_that_raises_later_is_named_with_its_exception() -> None:
    """Not as a component that does something else a day later."""
    begun_s = time.time()

    def acquire_component_lock(component: Component, query: LockQuery) -> Any:
        return component.reach.pages(query.boundary, query.page_size) or None

    def release_component_lock(component: Component, segment: Any) -> None:
        del component, segment
        if time.time() > begun_s + 3600:
            raise KeyError("expired")

    hooks = (acquire_component_lock, release_component_lock)
    checker = checker_of(paged(hooks={each.__name__: each for each in hooks}))
    told = checker.decide("L1-hooks-answer")
    assert told.evidence == "hook release_component_lock raised KeyError: 'expired'"
    fickle = checker.decide("D1-it-does-the-same-each-time")
    assert fickle.status is Status.UNDECIDED
    assert fickle.evidence == "L1 is broken, which L1-hooks-answer reports"
