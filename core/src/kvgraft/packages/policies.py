"""Finds eviction policies by name: built in, or published by an installed package."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvgraft.errors import ConfigError
from kvgraft.packages.entry_points import import_failure, published
from kvgraft.policies.policy import EvictionPolicy

__all__ = ["BUILT_IN", "POLICY_GROUP", "load_policy", "policy_names"]

POLICY_GROUP = "kvgraft.policies"
"""Entry point group of packages with policies: a class, or a function, without arguments."""

BUILT_IN = {
    "density": "kvgraft.policies.density:Density",
    "lru": "kvgraft.policies.lru:LeastRecentlyUsed",
}
"""The core's own, imported when they are named."""


def policy_names() -> list[str]:
    """Policies that can be named in settings here."""
    return sorted({*BUILT_IN, *(each.name for each in published(POLICY_GROUP))})


def load_policy(name: str) -> EvictionPolicy:
    """A new policy.

    Raises:
        ConfigError: nobody has one of this name, or its package cannot be used.
    """
    built_in = BUILT_IN.get(name)
    if built_in is not None:
        module, _, member = built_in.partition(":")
        policy: EvictionPolicy = getattr(import_module(module), member)()
        return policy
    for each in published(POLICY_GROUP):
        if each.name == name:
            if each.contested is not None:
                raise ConfigError(f"eviction policy {name!r}: {each.contested}")
            return _made(name, each.load)
    raise ConfigError(
        f"setting policy={name!r}: no such eviction policy here; use one of "
        f"{', '.join(policy_names())}, or install its package"
    )


def _made(name: str, load: Any) -> EvictionPolicy:
    try:
        policy: EvictionPolicy = load()()
    except Exception as error:
        raise ConfigError(f"eviction policy {name!r}: {import_failure(error)}") from error
    missing = [each for each in MEMBERS if not hasattr(policy, each)]
    if missing:
        raise ConfigError(
            f"eviction policy {name!r}: a {type(policy).__name__} has no {', '.join(missing)}; "
            "implement kvgraft.policies.EvictionPolicy"
        )
    return policy


MEMBERS = ("name", "classifies", "order", "opened", "classify", "admitted", "finished")
