"""Components at home on HOST, and private pools (H)."""

from __future__ import annotations

from kvgraft.cache import Cache
from kvgraft.requests.request import Request
from kvgraft.tree.keys import TokenKey
from kvgraft.types import Direction, TransferQuery
from kvgraft_testing.clause import clause, expect
from kvgraft_testing.clauses.moving import copies_for
from kvgraft_testing.subject import Subject

__all__ = [
    "a_hit_leaves_the_canonical_copy_where_it_is",
    "private_slots_are_budgeted",
    "private_slots_come_back",
]


def _at_home_on_host(subject: Subject) -> str | None:
    return None if subject.home_is_host else "its canonical copy is on DEVICE"


def _has_private_pools(subject: Subject) -> str | None:
    if subject.mount(subject.page_size).component.private:
        return None
    return "it has no private pool"


def _prompt(subject: Subject) -> int:
    """Tokens of a prompt that ends within its fifth page, if pages have several tokens."""
    return 4 * subject.page_size + 1


def _served(cache: Cache, tokens: range, ending: str) -> Request | None:
    """One request from match to its end; None if the pools are too small for it."""
    request = cache.begin(TokenKey(tokens), reserve=2)
    if not cache.admit(request).admitted:
        cache.abort(request)
        return None
    cache.load_back(request)
    cache.drain()
    while request.computed < request.prompt:
        chunk = cache.next_chunk(request)
        assert cache.allocate(request, chunk)
        cache.computed(request, chunk)
    getattr(cache, ending)(request)
    return request


@clause("H5", "A prefix hit moves only the data that DEVICE needs.", needs=_at_home_on_host)
def a_hit_leaves_the_canonical_copy_where_it_is(subject: Subject) -> None:
    mounted = subject.mount(subject.page_size)
    component = mounted.component
    slot = bytes(4)
    copies = copies_for(mounted, TransferQuery(Direction.LOAD_BACK, slot, slot))
    targets = {copy.target.data_ptr() for copy in copies}
    own = {lanes.data_ptr() for lanes in component.device.lanes}
    expect(targets <= own, "H5", subject, "a load-back writes outside the device pool")
    assert component.host is not None
    kept = len(component.host.specs) - len(copies)
    expect(
        kept > 0, "H5", subject, f"a load-back moves all {len(copies)} planes of the host's copy"
    )


@clause("H8", "Private slots come back however a request ends.", needs=_has_private_pools)
def private_slots_come_back(subject: Subject) -> None:
    for ending in ("finish", "abort", "retract"):
        cache = subject.open(subject.page_size)
        component = next(each.component for each in cache.mounted if each.name == subject.name)
        served = 0
        for start in range(4):
            served += _served(cache, range(start, start + _prompt(subject)), ending) is not None
            for pool in component.private:
                expect(
                    pool.allocator.n_free == pool.allocator.capacity,
                    "H8",
                    subject,
                    f"after {ending} {pool.allocator.n_free} of {pool.allocator.capacity} slots of "
                    f"{pool.name!r} are free",
                )
        cache.close()
        expect(served, "A8", subject, f"no request of {_prompt(subject)} tokens fits 16 pages")


@clause("H7", "Every request is budgeted its private slots.", needs=_has_private_pools)
def private_slots_are_budgeted(subject: Subject) -> None:
    cache = subject.open(subject.page_size)
    request = cache.begin(TokenKey(range(_prompt(subject))))
    if cache.admit(request).admitted:
        demands = request.components[cache.tree.component(subject.name).index].demand.private
        expect(
            any(demands), "H7", subject, f"private pools are there, a request is budgeted {demands}"
        )
    cache.abort(request)
    cache.close()
