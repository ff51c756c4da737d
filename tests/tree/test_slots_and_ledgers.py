"""Free slots and the books about the rest."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft import ConfigError, ContractViolation, IntegrityError, Tier
from kvgraft.pools.allocator import SlotAllocator
from kvgraft.requests.components import Account
from kvgraft.tree.ledger import Ledger
from kvgraft_arena.resizing import MovableLedger
from kvgraft_retention.tenants import SharedLedger, TenantLedger


def numbers(slots: bytes) -> list[int]:
    return array("i", slots).tolist()


@given(capacity=st.integers(0, 12), steps=st.lists(st.integers(-4, 14)))
def test_every_slot_is_free_or_taken_once(capacity: int, steps: list[int]) -> None:
    """A positive step allocates that many slots, any other gives back the slots taken first."""
    pool = SlotAllocator(capacity)
    taken: list[bytes] = []
    for step in steps:
        if step > 0:
            before = pool.n_free
            slots = pool.allocate(step)
            assert (slots is None) == (step > before)
            if slots is None:
                assert pool.n_free == before
            else:
                assert len(numbers(slots)) == step
                taken.append(slots)
        elif taken:
            pool.free(taken.pop(0))
        owned = [slot for slots in taken for slot in numbers(slots)]
        assert sorted(owned + pool.free_slots()) == list(range(capacity))
        assert pool.n_free == capacity - len(owned)


def test_the_slots_given_back_last_are_taken_first() -> None:
    pool = SlotAllocator(8)
    pool.allocate(3)
    last = pool.allocate(2)
    assert last is not None
    pool.free(last)
    assert pool.allocate(2) == last


def test_more_free_slots_than_the_pool_has_break_t9() -> None:
    pool = SlotAllocator(2)
    with pytest.raises(ContractViolation, match="T9: core: 3 free slots in a pool of 2"):
        pool.free(b"\0\0\0\0")


@pytest.mark.parametrize("capacity", [-1, 2**31])
def test_a_pool_whose_slots_do_not_fit_int32_is_refused(capacity: int) -> None:
    with pytest.raises(ConfigError, match=f"{capacity} slots do not fit int32"):
        SlotAllocator(capacity)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger("full", Tier.DEVICE, SlotAllocator(8))


def test_a_ledger_is_what_it_is_whatever_was_asked_before() -> None:
    """Compiled classes below an `ABC` shared the answers (ADR 0027)."""
    movable = MovableLedger("full", Tier.DEVICE, SlotAllocator(8))
    shared = SharedLedger("full", Tier.DEVICE, SlotAllocator(8), [], 1)
    kinds = {MovableLedger, Ledger, SharedLedger, TenantLedger}
    for _ in range(2):
        assert {kind for kind in kinds if isinstance(shared, kind)} == {SharedLedger}
        assert {kind for kind in kinds if isinstance(movable, kind)} == {MovableLedger, Ledger}


def test_private_and_reserved_slots_leave_the_free_ones_and_come_back(ledger: Ledger) -> None:
    private, reserved = ledger.take_private(3), ledger.reserve(2)
    assert private is not None
    assert reserved is not None
    assert (ledger.free, ledger.private, ledger.in_flight) == (3, 3, 2)
    ledger.check()
    assert ledger.take_private(4) is None
    assert ledger.reserve(4) is None
    ledger.give_private(private)
    ledger.cancel(reserved)
    assert ledger.counts() == {
        "capacity": 8, "free": 8, "evictable": 0, "pinned": 0, "private": 0, "in_flight": 0,
    }  # fmt: skip
    ledger.check()


@pytest.mark.parametrize("term", ["evictable", "pinned", "private", "in_flight"])
@pytest.mark.parametrize("step", [1, -1])
def test_a_ledger_that_does_not_balance_says_so_with_its_equation(
    ledger: Ledger, term: str, step: int
) -> None:
    setattr(ledger, term, step)
    with pytest.raises(IntegrityError, match=rf"T8: .*{term}\({step}\).* vs capacity\(8\)"):
        ledger.check()


def test_a_negative_promise_does_not_pass(ledger: Ledger) -> None:
    ledger.promised = -1
    with pytest.raises(IntegrityError, match=r"A12: .*promised\(-1\)"):
        ledger.check()


def test_headroom_is_free_plus_evictable_less_promised(ledger: Ledger) -> None:
    account = Account(ledger)
    account.open(peak=5, remaining=9, load=1)
    assert ledger.headroom == 2
    assert len(numbers(account.take(4))) == 4
    assert (ledger.free, ledger.promised, ledger.headroom) == (4, 2, 2)


def test_slots_a_request_parts_with_renew_its_promise_while_it_has_pages_to_compute(
    ledger: Ledger,
) -> None:
    account = Account(ledger)
    account.open(peak=4, remaining=6, load=0)
    ledger.give_private(account.take(4))
    account.release(4)
    assert (account.held, account.promised) == (0, 2)
    account.close()
    assert (account.promised, ledger.promised) == (0, 0)
