"""The model knows tenants: their guarantees, and what they have borrowed (K4, K5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvgraft.errors import ContractViolation
from kvgraft_retention.tenants import TenantLedger
from kvgraft_scheduling.stepping import Stepper
from kvgraft_testing.machine import Sizes
from kvgraft_testing.machine.harness import Harness

from ..mutants.cores_held_out import edited
from .setups import SETUPS

TENANTS: dict[str, dict[str, Any]] = {
    "a": {"namespaces": ["tenant"], "guarantee": 0.3, "weight": 0.01},
    "default": {"guarantee": 0.2},
}


def flood() -> None:
    """A tenant keeps its guarantee of 4 pages, and others fill the rest again and again."""
    harness = Harness(replace(SETUPS["full"], tenants=TENANTS), Sizes())
    for namespace, first, n_pages in (("tenant", 1, 4), (None, 2, 8), (None, 3, 8)):
        live = harness.begin(namespace, (first,) * (2 * n_pages), 0, None)
        harness.admit(live)
        harness.prefill_all(live)
        harness.finish(live)
        harness.rooms.drain()
    harness.close()


def test_a_tenant_keeps_its_guarantee() -> None:
    flood()


@pytest.mark.plain_build
def test_a_core_that_takes_guaranteed_data_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TenantLedger, "over", property(lambda ledger: ledger.used))
    with pytest.raises(ContractViolation, match=r"K4.*by its settings it is"):
        flood()


@pytest.mark.plain_build
def test_a_core_that_promises_guaranteed_slots_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness(replace(SETUPS["full"], tenants=TENANTS), Sizes())
    monkeypatch.setattr(TenantLedger, "guarantee", property(lambda ledger: 0))
    with pytest.raises(ContractViolation, match=r"K4"):
        harness.begin(None, (2,) * 26, 0, None)


def step_across_tenants() -> int:
    """Requests of two tenants decode in the same steps, and begin pages; how many steps."""
    harness = Harness(replace(SETUPS["full"], tenants=TENANTS), Sizes(page_size=1, device=20))
    for namespace in (None, "tenant"):
        live = harness.begin(namespace, harness.unseen(2), 6, None)
        harness.admit(live)
        harness.load_back(live)
        harness.prefill_all(live)
    harness.step_together((1, 2, 1, 2, 1))
    harness.close()
    return harness.bench.counts["steps across namespaces"]


def test_requests_of_several_tenants_step_together() -> None:
    """K5: each takes its slots from its own tenant's share."""
    assert step_across_tenants() == 5


@pytest.mark.plain_build
def test_a_step_that_takes_the_slots_of_all_tenants_from_one_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    edited(Stepper._take_in_order, "if n and (self.shares_pools or not", "if n and (not")(
        monkeypatch
    )
    with pytest.raises(ContractViolation, match=r"T8.*recomputed from the tree"):
        step_across_tenants()
