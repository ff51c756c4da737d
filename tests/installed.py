"""A component's package as installed, for the tests of each."""

from __future__ import annotations

import subprocess
import sys

import torch

from kvgraft.packages.registry import Plugin, discover
from kvgraft.pools import Component

__all__ = ["assert_planes_survive", "expect_no_torch", "installed"]


def installed(name: str) -> Plugin:
    """The package that brings a component, found by its entry point."""
    (found,) = (entry for entry in discover() if entry.name == name)
    assert found.status == "ok"
    assert found.plugin is not None
    return found.plugin


def expect_no_torch(name: str) -> None:
    """Find a component in a fresh process and see that torch was not imported (P2)."""
    code = (
        f"import sys; from kvgraft.packages.registry import select; select(['{name}']); "
        f"assert 'kvgraft_{name}.plugin' in sys.modules; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def assert_planes_survive(component: Component) -> None:
    """Random bytes in slot 1, to host slot 2, back to slot 3, plane by plane."""
    device, host = component.device, component.host
    assert host is not None
    assert [spec[:2] for spec in device.specs] == [spec[:2] for spec in host.specs]
    noise = torch.Generator().manual_seed(7)
    for lanes, mirrored in zip(device.lanes, host.lanes, strict=True):
        info = torch.iinfo(lanes.dtype)
        lanes[1] = torch.randint(
            info.min, info.max, lanes[1].shape, dtype=lanes.dtype, generator=noise
        )
        mirrored[2] = lanes[1]
    for lanes, mirrored in zip(device.lanes, host.lanes, strict=True):
        lanes[3] = mirrored[2]
    for plane, lanes in zip(device.planes, device.lanes, strict=True):
        assert lanes[1].count_nonzero() > 0
        assert torch.equal(plane[3].view(torch.uint8), plane[1].view(torch.uint8))
