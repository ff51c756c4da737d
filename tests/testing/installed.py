"""Components with a defect as installed packages, for the ways to check installed components."""

from __future__ import annotations

from pathlib import Path

from kvgraft.packages.registry import load_plugin
from kvgraft_testing.checking import Checker

from ..mutants.packages import Package
from ..packages.distributions import Shelf

__all__ = ["SOUND", "budgeting", "checker_of", "put"]

SOUND = """
import os, random, sys, time, traceback
from kvgraft import HOST_MIRROR, ComponentDeclaration, ComponentOptions, Demand, Kind
from kvgraft import Reach, Trailing, hookimpl

@hookimpl
def declare_component():
    return ComponentDeclaration(
        name="thrown", api_version="1.0", kind=Kind.PAGED, summary="thrown away",
        options=ComponentOptions, capabilities=frozenset({HOST_MIRROR}),
    )

@hookimpl
def create_component(options, context):
    import torch
    from kvgraft.pools import Component, DevicePool, HostMirror, PlaneSpec

    planes = [PlaneSpec(0, "kv", (context.page_size,), torch.bfloat16)]
    host = context.pages(context.host_tokens)
    device = DevicePool(planes, context.pages(context.device_tokens), context.device)
    return Component(Reach(Trailing(5)), device, HostMirror(planes, host) if host else None)
"""
"""A component that keeps the contract."""


def budgeting(body: str) -> str:
    """The same with a budget of its own."""
    return f"{SOUND}\n@hookimpl\ndef budget_contribution(component, query):\n    {body}\n"


def put(directory: Path, source: str) -> Shelf:
    """Install it as `thrown`."""
    shelf = Shelf(directory)
    shelf.put("kvgraft-thrown", source)
    return shelf


def checker_of(package: Package, profile: str = "dev") -> Checker:
    """The clauses over a package given as an object."""
    return Checker(load_plugin("mutant", package.implementation("mutant")), profile=profile)
