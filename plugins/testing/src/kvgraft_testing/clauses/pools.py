"""Slots and the bytes in them (T, M8)."""

from __future__ import annotations

import sys
from itertools import product

import torch

from kvgraft.errors import ContractViolation, KvgraftError, LeaseError
from kvgraft.packages.dispatch import shown
from kvgraft.pools import Component, DevicePool, HostMirror
from kvgraft.pools.allocator import SLOT_BYTES, SlotAllocator
from kvgraft_testing.clause import clause, expect
from kvgraft_testing.clauses.holding import collections_in, memory, owned, use
from kvgraft_testing.subject import Subject

__all__ = ["fill", "one_by_one", "rows", "shared_books", "shared_pools"]


def rows(pool: DevicePool | HostMirror) -> list[torch.Tensor]:
    """The pool's bytes, one uint8 `[n_slots, nbytes]` per plane, over the pool's own memory."""
    return [lanes.view(torch.uint8) for lanes in pool.lanes]


def fill(pool: DevicePool | HostMirror, seed: int) -> list[torch.Tensor]:
    """Give every slot bytes of its own; returns a copy of them."""
    generator = torch.Generator().manual_seed(seed)
    for plane in rows(pool):
        noise = torch.randint(0, 256, plane.shape, generator=generator, dtype=torch.uint8)
        for slot, row in enumerate(noise):  # one by one: rows may be views of one another
            plane[slot] = row
    return [plane.clone() for plane in rows(pool)]


def one_by_one(component: Component, n: int) -> list[bytes]:
    """`n` device slots, each on its own; fewer if the pool has no more."""
    taken: list[bytes] = []
    while len(taken) < n and (slot := component.device.allocator.allocate(1)) is not None:
        taken.append(slot)
    return taken


def _pools(subject: Subject) -> list[tuple[str, DevicePool | HostMirror]]:
    found: list[tuple[str, DevicePool | HostMirror]] = []
    for page_size in subject.page_sizes:
        component = subject.mount(page_size).component
        found.append((f"device pool, page size {page_size}", component.device))
        if component.host is not None:
            found.append((f"host mirror, page size {page_size}", component.host))
    return found


@clause("T9", "No two slots of a pool share a byte.")
def slots_share_no_byte(subject: Subject) -> None:
    for name, pool in _pools(subject):
        before = fill(pool, 1)
        for slot in range(min(pool.capacity, 8)):
            for plane in rows(pool):
                plane[slot] ^= 255
            for plane, held in zip(rows(pool), before):
                changed = (plane != held).any(dim=1).nonzero().flatten().tolist()
                expect(
                    set(changed) <= {slot},
                    "T9",
                    subject,
                    f"{name}: writing slot {slot} changed slots {changed}",
                )
                plane[slot] ^= 255


def shared_pools(subject: Subject) -> ContractViolation | None:
    """Slots and memory that two caches with the component share; None if they share nothing."""
    first, second = (subject.mount(subject.page_size).component for _ in range(2))
    shared = owned(first).keys() & owned(second).keys()
    if shared:
        names = sorted(owned(first)[each] for each in shared)
        said = f"a second cache has the first one's {', '.join(names)}"
        return ContractViolation("T9", subject.name, said)
    for (name, start, end), (other, begin, stop) in product(memory(first), memory(second)):
        if begin < end and start < stop:
            said = f"{name} of one cache and {other} of another are the same memory"
            return ContractViolation("T9", subject.name, said)
    return None


@clause("T9", "Two caches share no pool and no memory.")
def caches_share_nothing(subject: Subject) -> None:
    found = shared_pools(subject)
    if found is not None:
        raise found


def shared_books(subject: Subject) -> ContractViolation | None:
    """A collection that two caches hold and one of them changes; None if there is none."""
    first, second = (subject.mount(subject.page_size) for _ in range(2))
    mine, others = collections_in(first.component), collections_in(second.component)
    before = {each: repr(others[each][1]) for each in mine.keys() & others.keys()}
    try:
        use(first, subject.page_size)
    except (KvgraftError, AssertionError):
        return None  # that is for other clauses to say
    for each, held in before.items():
        name, value = others[each]
        if repr(value) != held:
            said = (
                f"both of two caches hold the same {name}, which one of them changed: "
                f"{shown(held)} became {shown(repr(value))}"
            )
            return ContractViolation("T9", subject.name, said)
    return None


@clause("T9", "One cache changes nothing that another one holds.")
def caches_disturb_nobody(subject: Subject) -> None:
    found = shared_books(subject)
    if found is not None:
        raise found


def _allocators(subject: Subject) -> list[tuple[str, SlotAllocator]]:
    found = [(name, pool.allocator) for name, pool in _pools(subject)]
    for page_size in subject.page_sizes:
        private = subject.mount(page_size).component.private
        found += [
            (f"pool {each.name!r}, page size {page_size}", each.allocator) for each in private
        ]
    return found


def _numbers(slots: bytes | None) -> list[int]:
    return memoryview(slots or b"").cast("i").tolist()


@clause(
    "T9",
    "An allocator hands out each slot once, all that are asked for or none, and takes no more "
    "back than it handed out.",
)
def slots_are_handed_out_once(subject: Subject) -> None:
    """Only `check_integrity()` finds a slot that was freed twice while others are out."""
    for name, pool in _allocators(subject):
        wanted = list(range(pool.capacity))
        for n_slots in (1, 2, 5, pool.capacity):
            taken = _take_all(subject, name, pool, n_slots)
            numbers = sorted(number for slots in taken for number in _numbers(slots))
            expect(numbers == wanted, "T9", subject, f"{name}: handed out {numbers} of {wanted}")
            for slots in taken:
                pool.free(slots)
            free = sorted(pool.free_slots())
            expect(free == wanted, "T9", subject, f"{name}: given back {wanted}, free are {free}")
        for slots in taken:
            try:
                pool.free(slots)
            except KvgraftError:
                continue
            raise ContractViolation("T9", subject.name, f"{name}: takes slots back twice")


def _ask_for_too_many(subject: Subject, name: str, pool: SlotAllocator) -> None:
    n_free, before = pool.n_free, sorted(pool.free_slots())
    refused, free = pool.allocate(n_free + 1), sorted(pool.free_slots())
    expect(
        refused is None and free == before,
        "T9",
        subject,
        f"{name}: asked for {n_free + 1} slots where {n_free} are free, it handed out "
        f"{_numbers(refused)} and {free} are free",
    )


def _take_all(subject: Subject, name: str, pool: SlotAllocator, n_slots: int) -> list[bytes]:
    """Every slot, by `n_slots` at a time and then those that are left."""
    taken: list[bytes] = []
    while (n_free := pool.n_free) > 0:
        if len(taken) < 2 or n_free <= n_slots:
            _ask_for_too_many(subject, name, pool)
        asked = min(n_slots, n_free)
        slots = pool.allocate(asked)
        expect(
            len(_numbers(slots)) == asked and pool.n_free == n_free - asked,
            "T9",
            subject,
            f"{name}: asked for {asked} slots it handed out {_numbers(slots)}, of {n_free} "
            f"{pool.n_free} are free",
        )
        taken.append(slots or b"")
        expect(len(taken) <= pool.capacity, "T9", subject, f"{name}: more slots than it has")
    return taken


@clause("T8", "A device pool is as large as its tensors, and not empty.")
def pools_are_as_large_as_they_say(subject: Subject) -> None:
    for name, pool in _pools(subject):
        sizes = {plane.shape[0] for plane in rows(pool)}
        expect(
            sizes == {pool.capacity} and pool.capacity > 0,
            "T8",
            subject,
            f"{name}: {pool.capacity} slots, tensors of {sorted(sizes)} rows",
        )


def _copies_states(subject: Subject) -> str | None:
    if not subject.is_state:
        return "about states; the component has pages"
    return None if subject.can_copy else "the component says that its states cannot be copied"


@clause(
    "M8",
    "A copied state has all bytes of the original, in memory of its own.",
    needs=_copies_states,
)
def a_copied_state_is_its_own(subject: Subject) -> None:
    pool = subject.mount(subject.page_sizes[0]).component.device
    for sources, targets in (([0], [1]), ([2, 0], [1, 3]), ([4, 1, 5], [2, 3, 0])):
        if max(*sources, *targets) < pool.capacity:
            _copy_states(subject, pool, sources, targets)


def _copy_states(
    subject: Subject, pool: DevicePool, sources: list[int], targets: list[int]
) -> None:
    before = fill(pool, 2)
    pool.copy_slots(_slots(sources), _slots(targets))
    others = [slot for slot in range(pool.capacity) if slot not in targets]
    what = f"slots {sources} copied to {targets}"
    for plane, held in zip(rows(pool), before):
        for source, target in zip(sources, targets):
            same = bool((plane[target] == held[source]).all())
            expect(same, "M8", subject, f"{what}: the copy lacks bytes of the state {source}")
        same = bool((plane[others] == held[others]).all())
        expect(same, "M8", subject, f"{what}: the copy wrote to other states")
        for source, target in zip(sources, targets):
            plane[target] ^= 255
            same = bool((plane[source] == held[source]).all())
            expect(same, "M8", subject, f"{what}: writing the copy changed the original")
            plane[target] ^= 255


def _slots(numbers: list[int]) -> bytes:
    return b"".join(number.to_bytes(SLOT_BYTES, sys.byteorder) for number in numbers)


def _refuses_copies(subject: Subject) -> str | None:
    if not subject.is_state:
        return "about states; the component has pages"
    return "the component says that its states can be copied" if subject.can_copy else None


@clause("P8", "A state that cannot be copied is not resumed from.", needs=_refuses_copies)
def without_copies_nothing_is_resumed(subject: Subject) -> None:
    from kvgraft.tree.keys import TokenKey

    cache = subject.open(subject.page_size)
    try:
        key = TokenKey(range(4 * subject.page_size))
        for _ in range(2):
            request = cache.begin(key)
            expect(request.anchor_tokens == 0, "P8", subject, f"resumed at {request.anchor_tokens}")
            if not cache.admit(request).admitted:
                raise LeaseError("the pool is too small for one request of 4 pages")
            cache.load_back(request)
            while request.computed < request.prompt:
                chunk = cache.next_chunk(request)
                cache.allocate(request, chunk)
                cache.computed(request, chunk)
            cache.finish(request)
            cache.drain()
    finally:
        cache.close()
