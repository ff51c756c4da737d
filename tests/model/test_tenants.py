"""The model knows tenants: their guarantees, and what they have borrowed (K4, K5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvgraft.errors import ContractViolation
from kvgraft_retention.tenants import TenantLedger
from kvgraft_testing.machine import Sizes
from kvgraft_testing.machine.harness import Harness

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
