"""Copies between DEVICE and HOST (B, R)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from kvgraft.errors import ContractViolation, TransferError
from kvgraft.packages.dispatch import Mounted
from kvgraft.pools.component import pair_planes
from kvgraft.transfers import PlaneCopy
from kvgraft.types import Direction, TransferQuery
from kvgraft_testing.clause import clause, expect
from kvgraft_testing.clauses.pools import fill, rows
from kvgraft_testing.subject import Subject

__all__ = ["bad_copies", "copies_for", "some_slots"]

N_SLOTS = 5


def _mirrored(subject: Subject) -> str | None:
    if not subject.is_mirrored:
        return "the component says that it has no host mirror"
    return (
        None
        if subject.mount(subject.page_size).component.host is not None
        else "it has no host mirror"
    )


def _whole_on_host(subject: Subject) -> str | None:
    if subject.home_is_host:
        return "its canonical copy is on HOST; DEVICE holds something else"
    return _mirrored(subject)


def _slots(numbers: Sequence[int]) -> bytes:
    return np.asarray(numbers, dtype=np.int32).tobytes()


def _some(mounted: Mounted, seed: int, most: int = N_SLOTS) -> tuple[list[int], list[int]]:
    """Scattered device and host slots, in pairs."""
    draw = random.Random(seed)
    component = mounted.component
    assert component.host is not None
    n = min(most, component.device.capacity, component.host.capacity)
    return (
        draw.sample(range(component.device.capacity), n),
        draw.sample(range(component.host.capacity), n),
    )


def some_slots(mounted: Mounted, seed: int) -> tuple[bytes, bytes]:
    """The same, as queries have them."""
    device_slots, host_slots = _some(mounted, seed)
    return _slots(device_slots), _slots(host_slots)


def copies_for(mounted: Mounted, query: TransferQuery) -> list[PlaneCopy]:
    """The copies of a transfer, the component's own or the core's."""
    hooks = mounted.transfer_hooks
    built = hooks.build(query) if hooks is not None else None
    return pair_planes(mounted.component, query) if built is None else list(built)


SHARES = (1, 2, 3, N_SLOTS, 1 << 30)
"""Most slots of a transfer; the last number means all slots."""


def bad_copies(subject: Subject) -> ContractViolation | None:
    """The planes or slots that the copies of a component's own hook leave out; None if none."""
    if _copies_itself(subject) is not None:
        return None
    for page_size in subject.page_sizes:
        for most in SHARES:
            mounted = subject.mount(page_size)
            if mounted.component.host is None:
                continue
            try:
                missing = _left_out(subject, mounted, most)
            except (TransferError, RuntimeError, IndexError, TypeError, ValueError) as error:
                missing = f"copies cannot run: {type(error).__name__}: {error}"
            if missing is not None:
                said = f"pages of {page_size}, {most} slots at most: {missing}"
                return ContractViolation("B3", subject.name, said)
    return None


def _left_out(subject: Subject, mounted: Mounted, most: int) -> str | None:
    """Where a plane of a slot does not come back as it was, or is not written at all."""
    component, loads_only = mounted.component, subject.home_is_host
    assert component.host is not None
    sources, mirrors = _some(mounted, most, most)
    targets = list(reversed(_some(mounted, most + 50, most)[0]))
    held = fill(component.device, 3)
    fill(component.host, 4)
    if not loads_only:
        subject.run(copies_for(mounted, _query(Direction.BACKUP, sources, mirrors)))
    came = []
    for seed in (5, 6):
        fill(component.device, seed)
        subject.run(copies_for(mounted, _query(Direction.LOAD_BACK, targets, mirrors)))
        came.append([plane.clone() for plane in rows(component.device)])
    for spec, first, second, before in zip(component.device.specs, *came, held):
        for source, target in zip(sources, targets):
            where = f"layer {spec.layer} plane {spec.name!r}"
            if not bool((first[target] == second[target]).all()):
                return f"{where} of device slot {target} is not written by a load-back"
            if not loads_only and not bool((first[target] == before[source]).all()):
                return f"{where} of device slot {source} came back different in slot {target}"
    return None


def _query(direction: Direction, device: Sequence[int], host: Sequence[int]) -> TransferQuery:
    return TransferQuery(direction, _slots(device), _slots(host))


def _copies_itself(subject: Subject) -> str | None:
    if not subject.has("build_hicache_transfers"):
        return "the copies are left to the core"
    return _mirrored(subject)


@clause("B3", "Copies cover every plane of every slot they are for.", needs=_copies_itself)
def copies_cover_every_slot_and_plane(subject: Subject) -> None:
    found = bad_copies(subject)
    if found is not None:
        raise found


@clause("B3", "Naming copies moves nothing; the engine does.", needs=_copies_itself)
def nothing_moves_before_the_engine_moves_it(subject: Subject) -> None:
    for direction in Direction:
        mounted = subject.mount(subject.page_size)
        component = mounted.component
        assert component.host is not None
        before = {"device": fill(component.device, 6), "host": fill(component.host, 7)}
        copies_for(mounted, _query(direction, *_some(mounted, 11)))
        for tier, pool in (("device", component.device), ("host", component.host)):
            for spec, plane, held in zip(pool.specs, rows(pool), before[tier]):
                moved = (plane != held).any(dim=1).nonzero().flatten().tolist()
                said = f"layer {spec.layer} plane {spec.name!r} of {tier} slots {moved}"
                expect(
                    not moved,
                    "B3",
                    subject,
                    f"build_hicache_transfers for a {direction.value} wrote {said}; "
                    "return copies and let the engine run them",
                )


@clause("R5", "Backed-up data comes back whole, into any slots.", needs=_whole_on_host)
def data_survives_the_round_trip(subject: Subject) -> None:
    for page_size in subject.page_sizes:
        mounted = subject.mount(page_size)
        host = mounted.component.host
        if host is None:
            continue
        device = mounted.component.device
        sources, mirrors = _some(mounted, page_size)
        targets = list(reversed(_some(mounted, page_size + 50)[0]))
        held = fill(device, 3)
        fill(host, 4)
        out = TransferQuery(Direction.BACKUP, _slots(sources), _slots(mirrors))
        subject.run(copies_for(mounted, out))
        fill(device, 5)
        back = TransferQuery(Direction.LOAD_BACK, _slots(targets), _slots(mirrors))
        subject.run(copies_for(mounted, back))
        for spec, plane, before in zip(device.specs, rows(device), held):
            for source, target in zip(sources, targets):
                expect(
                    bool((plane[target] == before[source]).all()),
                    "R5",
                    subject,
                    f"page size {page_size}: layer {spec.layer} plane {spec.name!r} of slot "
                    f"{source} came back different in slot {target}",
                )


@clause("B3", "A transfer writes the slots it was given and no others.", needs=_mirrored)
def a_transfer_touches_its_own_slots(subject: Subject) -> None:
    for direction in Direction:
        mounted = subject.mount(subject.page_size)
        component = mounted.component
        assert component.host is not None
        device_slots, host_slots = _some(mounted, 7)
        before = {"device": fill(component.device, 6), "host": fill(component.host, 7)}
        query = TransferQuery(direction, _slots(device_slots), _slots(host_slots))
        subject.run(copies_for(mounted, query))
        written = {"device": device_slots, "host": host_slots}
        target = "host" if direction is Direction.BACKUP else "device"
        for tier, pool in (("device", component.device), ("host", component.host)):
            for plane, held in zip(rows(pool), before[tier]):
                changed = set((plane != held).any(dim=1).nonzero().flatten().tolist())
                allowed = set(written[tier]) if tier == target else set()
                expect(
                    changed <= allowed,
                    "B3",
                    subject,
                    f"{direction.value} of {tier} slots {written[tier]} wrote {sorted(changed)}",
                )


@clause("R7", "A copy names the layer whose data it completes.", needs=_mirrored)
def copies_name_their_layers(subject: Subject) -> None:
    mounted = subject.mount(subject.page_size)
    device = mounted.component.device
    layers = {spec.layer for spec in device.specs}
    device_slots, host_slots = _some(mounted, 8)
    query = TransferQuery(Direction.LOAD_BACK, _slots(device_slots), _slots(host_slots))
    owners = {lanes.data_ptr(): spec for spec, lanes in zip(device.specs, device.lanes)}
    for copy in copies_for(mounted, query):
        expect(copy.layer in layers, "R7", subject, f"a copy names layer {copy.layer} of {layers}")
        spec = owners.get(copy.target.data_ptr())
        expect(
            spec is None or spec.layer == copy.layer,
            "R7",
            subject,
            f"a copy into layer {spec.layer if spec else None} names layer {copy.layer}",
        )


@clause("R2", "Commit and abort of a transfer change no free slot.", needs=_mirrored)
def ends_of_transfers_free_nothing(subject: Subject) -> None:
    mounted = subject.mount(subject.page_size)
    component = mounted.component
    assert component.host is not None
    device_slots, host_slots = _some(mounted, 9)
    pools = [component.device.allocator, component.host.allocator]
    before = [sorted(pool.free_slots()) for pool in pools]
    hooks = mounted.transfer_hooks
    ends = (hooks.commit, hooks.abort) if hooks is not None else (None,)
    for direction in Direction:
        query = TransferQuery(direction, _slots(device_slots), _slots(host_slots))
        for end in ends:
            copies_for(mounted, query)
            if end is not None:
                end(query)
            free = [sorted(pool.free_slots()) for pool in pools]
            expect(free == before, "R2", subject, f"free slots went from {before} to {free}")
