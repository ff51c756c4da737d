"""Victims follow the policy, whatever it goes by: the model knows one that goes by namespace."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings

from kvgraft.errors import ContractViolation
from kvgraft.testing.machine import BY_AGE_UNLEARNT, BY_NAMESPACE, Sizes, drive
from kvgraft.testing.machine.harness import Harness
from kvgraft.testing.policies import check_policy
from kvgraft.tree.tree import Tree
from kvgraft.types import Tier

from .setups import SETUPS

NAMES = ("full", "full+swa+mamba")


@pytest.mark.parametrize("name", NAMES)
def test_victims_are_those_of_the_lowest_rank(name: str) -> None:
    found = drive(replace(SETUPS[name], keeping=BY_NAMESPACE), settings=settings())
    assert found.violation is None, "\n".join([str(found.violation), *found.steps])
    assert found.counts["admitted"]


def test_density_goes_by_age_until_it_has_learnt_something() -> None:
    found = drive(replace(SETUPS["full"], keeping=BY_AGE_UNLEARNT), settings=settings())
    assert found.violation is None, "\n".join([str(found.violation), *found.steps])
    assert found.counts["admitted"]


def serve_two_tenants_and_make_room() -> None:
    """The one used last is to leave first."""
    rank = BY_NAMESPACE.rank
    first, last = sorted(("tenant", 0), key=rank)
    assert rank(first) < rank(last)
    harness = Harness(replace(SETUPS["full"], keeping=BY_NAMESPACE), Sizes())
    for namespace in (last, first):
        live = harness.begin(namespace, (1, 2, 3, 4), 0, None)
        harness.admit(live)
        harness.prefill_all(live)
        harness.finish(live)
    harness.rooms.drain()
    harness.rooms.evict(harness.model.components[0], 2, Tier.DEVICE)
    harness.close()


def test_a_tree_that_gives_uses_no_class_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_two_tenants_and_make_room()
    ticks = Tree.tick

    def tick(tree: Tree) -> None:
        tree.use_class = 0
        ticks(tree)

    monkeypatch.setattr(Tree, "tick", tick)
    with pytest.raises(ContractViolation, match=r"T7.*data that was to leave before stayed"):
        serve_two_tenants_and_make_room()


def test_the_policy_by_namespace_keeps_the_contract() -> None:
    check_policy(BY_NAMESPACE.make)
