"""Settings of tenants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, PositiveFloat
from pydantic_core import PydanticCustomError

from kvgraft.refusals import SettingsModel, checked, shown

__all__ = ["OTHERS", "TenantSettings", "tenants_settings"]

Share = Annotated[float, Field(ge=0, le=1)]
"""Part of a pool."""


class TenantSettings(SettingsModel):
    """One tenant's namespaces, and its shares of every pool: 0.25 is a quarter.

    Attributes:
        namespaces: those that belong to it.
        prefixes: text namespaces that begin with one of these belong to it, too; the longest prefix
            counts.
        guarantee: the share that other tenants' requests can neither take nor count on.
        limit: the largest share that it may have.
        host_guarantee: the same share on HOST; by default as on DEVICE.
        host_limit: the same share on HOST; by default as on DEVICE.
        weight: its part of the borrowed slots, relative to the weights of the others.
    """

    namespaces: tuple[Any, ...] = ()
    prefixes: tuple[str, ...] = ()
    guarantee: Share = 0.0
    limit: Annotated[float, Field(gt=0, le=1)] = 1.0
    host_guarantee: Share | None = None
    host_limit: Annotated[float, Field(gt=0, le=1)] | None = None
    weight: PositiveFloat = 1.0

    @property
    def on_host(self) -> tuple[float, float]:
        """Guarantee and limit on HOST."""
        guarantee = self.guarantee if self.host_guarantee is None else self.host_guarantee
        return guarantee, self.limit if self.host_limit is None else self.host_limit


OTHERS = "default"
"""The tenant of the namespaces that no other names."""


def tenants_settings(given: Mapping[str, Any]) -> dict[str, TenantSettings]:
    """Tenants by name, whose shares and namespaces agree; for a pydantic validator."""
    tenants = {name: checked(TenantSettings, each, "tenants", name) for name, each in given.items()}
    said = refused_tenants(tenants)
    if said:
        raise PydanticCustomError("inside", "{said}", {"said": f"setting tenants: {said}"})
    return tenants


def refused_tenants(tenants: Mapping[str, TenantSettings]) -> str:
    """Why these tenants cannot share a cache; empty if they can."""
    owners: dict[Any, str] = {}
    for name, each in tenants.items():
        shares = (each.guarantee, each.limit), each.on_host
        for (guarantee, limit), tier in zip(shares, ("", "host_")):
            if guarantee > limit:
                return (
                    f"{name!r} has {tier}guarantee={guarantee} above {tier}limit={limit}; give "
                    f"{tier}limit={guarantee} or more"
                )
        named = [("namespace", namespace) for namespace in each.namespaces]
        for owned in named + [("prefix", prefix) for prefix in each.prefixes]:
            kind, namespace = owned
            try:
                owner = owners.setdefault(owned, name)
            except TypeError:
                return f"{name!r} has the {kind} {shown(namespace)}, which is not hashable"
            if owner != name:
                return f"{owner!r} and {name!r} have the {kind} {shown(namespace)}; give it to one"
    for tier, guarantees in (
        ("", [each.guarantee for each in tenants.values()]),
        ("host_", [each.on_host[0] for each in tenants.values()]),
    ):
        if sum(guarantees) > 1 + 1e-9:
            return (
                f"{' + '.join(map(str, guarantees))} of {tier}guarantee are more than 1; lower "
                f"one by {round(sum(guarantees) - 1, 6)}"
            )
    for name, each in tenants.items():
        if name != OTHERS and not (each.namespaces or each.prefixes):
            return (
                f"{name!r} has neither namespaces nor prefixes, so nobody is it; give "
                f"'namespaces': [{shown(name)}] or others"
            )
    return ""
