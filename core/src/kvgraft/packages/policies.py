"""Finds eviction policies by name: built in, or published by an installed package."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module

from kvgraft.entry_points import import_failure, published
from kvgraft.errors import ConfigError
from kvgraft.policies.policy import EvictionPolicy
from kvgraft.refusals import of_type

__all__ = ["BUILT_IN", "POLICY_GROUP", "load_policy", "missing_members", "policy_names"]

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
            return _published(name, each.load)
    known = policy_names()
    near = get_close_matches(name, known, n=1)
    meant = f" did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"eviction policy {name!r} is not installed;{meant} use one of {', '.join(known)}, or "
        "install its package"
    )


def _published(name: str, load: Callable[[], object]) -> EvictionPolicy:
    """A package's policy. The package's code may raise anything, and is named then (P5)."""
    try:
        make = load()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"eviction policy {name!r}: {import_failure(error)}") from error
    if not callable(make):
        raise ConfigError(
            f"eviction policy {name!r}: its entry point is {of_type(make)}; publish a "
            "class, or a function without arguments"
        )
    try:
        policy = make()
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"eviction policy {name!r} cannot be made: {reason}") from error
    missing = missing_members(policy)
    if missing:
        raise ConfigError(
            f"eviction policy {name!r}: {of_type(policy)} has no {', '.join(missing)}; "
            "implement kvgraft.policies.EvictionPolicy"
        )
    made: EvictionPolicy = policy
    if made.name != name:
        raise ConfigError(
            f"eviction policy {name!r}: its `name` is {made.name!r:.40}; entry point and name must "
            "agree"
        )
    return made


def missing_members(policy: object) -> list[str]:
    """Names of `EvictionPolicy` that an object does not have."""
    return [each for each in MEMBERS if not hasattr(policy, each)]


MEMBERS = ("name", "classifies", "order", "opened", "classify", "admitted", "finished", "describe")
