"""A bound hook has the types of its specification."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args, get_origin, get_type_hints

import pytest

from kvgraft import hookspecs
from kvgraft.packages.dispatch import LockHooks, Mounted, TransferHooks
from kvgraft.pools import Component
from kvgraft.pools.component import PlaneCopy
from kvgraft_guard import managing

BOUND = {
    "finalize_match_result": (Mounted, "finalize_match_result"),
    "acquire_component_lock": (LockHooks, "acquire"),
    "release_component_lock": (LockHooks, "release"),
    "build_hicache_transfers": (TransferHooks, "build"),
    "commit_hicache_transfers": (TransferHooks, "commit"),
    "abort_hicache_transfers": (TransferHooks, "abort"),
    "budget_contribution": (Mounted, "budget_contribution"),
}
"""By hook, the record and the attribute that it is bound to."""


def _types_of(record: type, attribute: str) -> tuple[object, object]:
    """The types of the query and the answer of a bound hook."""
    found = get_type_hints(record)[attribute]
    optional = [each for each in get_args(found) if get_origin(each) is Callable]
    (query,), answer = get_args(optional[0] if optional else found)
    return query, type(None) if answer is None else answer


def test_every_bound_hook_is_an_attribute() -> None:
    assert [spec.__name__ for spec in managing.BOUND_HOOKS] == list(BOUND)


@pytest.mark.parametrize("hook", BOUND)
def test_a_bound_hook_has_the_types_of_its_specification(hook: str) -> None:
    names = {"Component": Component, "PlaneCopy": PlaneCopy}
    hints = get_type_hints(getattr(hookspecs, hook), localns=names)
    answer = hints.pop("return")
    component, query = hints.values()
    assert component is Component
    assert _types_of(*BOUND[hook]) == (query, answer)
