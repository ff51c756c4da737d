"""Victims follow the policy, whatever it goes by: the model knows one that goes by namespace."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings

from kvgraft.errors import ContractViolation
from kvgraft.tree.tree import Tree
from kvgraft.types import Tier
from kvgraft_retention.lifetimes import Lifetimes
from kvgraft_testing.machine import (
    BY_AGE_UNLEARNT,
    BY_NAMESPACE,
    BY_PRIORITY,
    Keeping,
    Sizes,
    drive,
)
from kvgraft_testing.machine.brute_force import Gone
from kvgraft_testing.machine.harness import Harness
from kvgraft_testing.machine.recency import Recency, Retention
from kvgraft_testing.policies import check_policy

from .setups import SETUPS


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "keeping"),
    [("full", BY_NAMESPACE), ("full+swa+mamba", BY_NAMESPACE), ("full+swa", BY_PRIORITY)],
    ids=["full by namespace", "full+swa+mamba by namespace", "full+swa by priority"],
)
def test_victims_are_those_of_the_lowest_rank(name: str, keeping: Keeping) -> None:
    found = drive(replace(SETUPS[name], keeping=keeping), settings=settings())
    assert found.violation is None, "\n".join([str(found.violation), *found.steps])
    assert found.counts["admitted"]


@pytest.mark.parametrize("keeping", [BY_NAMESPACE, BY_PRIORITY], ids=["namespace", "priority"])
def test_cleared_data_keeps_its_place_in_the_models_order(keeping: Keeping) -> None:
    harness = Harness(replace(SETUPS["full"], keeping=keeping), Sizes())
    component = harness.model.components[0]
    for namespace in ("tenant", 0, None):
        recency = Recency(harness.model, keeping)
        recency.settle([(namespace, [Retention(priority=keeping.priority(namespace) or 0)])])
        recency.created({(namespace, (1, 2))})
        there = Gone(namespace, 1)
        recency.settle([(namespace, [])])
        was = recency.last(component, "device", ((namespace, (1, 2)),))
        recency.cleared({namespace: there})
        assert recency.last(component, "device", ((there, (1, 2)),)) == was
    harness.close()


def test_density_goes_by_age_until_it_has_learnt_something() -> None:
    found = drive(replace(SETUPS["full"], keeping=BY_AGE_UNLEARNT), settings=settings())
    assert found.violation is None, "\n".join([str(found.violation), *found.steps])
    assert found.counts["admitted"]


def serve_two_tenants_and_make_room(keeping: Keeping = BY_NAMESPACE) -> None:
    """The one used last is to leave first."""
    rank = keeping.rank
    first, last = sorted(("tenant", 0), key=rank)
    assert rank(first) < rank(last)
    harness = Harness(replace(SETUPS["full"], keeping=keeping), Sizes())
    for namespace in (last, first):
        live = harness.begin(namespace, (1, 2, 3, 4), 0, None)
        harness.admit(live)
        harness.prefill_all(live)
        harness.finish(live)
    harness.rooms.drain()
    harness.rooms.evict(harness.model.components[0], 2, Tier.DEVICE)
    harness.close()


@pytest.mark.plain_build
def test_a_tree_that_gives_uses_no_class_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_two_tenants_and_make_room()
    ticks = Tree.tick

    def tick(tree: Tree) -> None:
        tree.use_class = 0
        ticks(tree)

    monkeypatch.setattr(Tree, "tick", tick)
    with pytest.raises(ContractViolation, match=r"T7.*data that was to leave before stayed"):
        serve_two_tenants_and_make_room()


@pytest.mark.plain_build
def test_an_order_that_forgets_priorities_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_two_tenants_and_make_room(BY_PRIORITY)
    monkeypatch.setattr(Lifetimes, "of", lambda lifetimes, stamp: None)
    with pytest.raises(ContractViolation, match=r"T7.*data that was to leave before stayed"):
        serve_two_tenants_and_make_room(BY_PRIORITY)


def test_the_policy_by_namespace_keeps_the_contract() -> None:
    check_policy(BY_NAMESPACE.make)
